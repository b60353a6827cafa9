"""Jacobi decoding, several blocks, recycling, lookahead: greedy decoding's tokens whatever the
options, and nothing thrown away."""

import random

import pytest
import torch

import forerun
from forerun.drafters.recycled import MOST_KEYS, RunPool, path_to, tails_of, tree_of
from forerun.errors import BadOption, NotAble
from forerun.evaluate.prompts import CODE
from forerun.families.causal import MAX_TAIL_TOKENS, Tail
from forerun.methods.multiblock import BlockDraft, GuessTree, advance, said_after
from forerun.probability.acceptance import descend_tree, rejection
from forerun.probability.noise import Noise
from forerun.probability.outcomes import Descent
from tests.helpers import ARCHITECTURES, PROMPTS, ask, every_pair, fresh, model

WAYS = [
    dict(method="jacobi", block=1),
    dict(method="jacobi", block=5, start="text"),
    dict(method="jacobi", block=64, start="random", refill=False),
    dict(method="multiblock", block=1, candidates=4),
    dict(method="multiblock", block=4, blocks=4, spawn=0.0, candidates=3),
    dict(method="multiblock", block=6, blocks=2, spawn=0.5, candidates=0),
    dict(method="multiblock", block=16, blocks=3, spawn=0.25, start="text"),
    dict(method="multiblock", block=64, blocks=2),
    dict(method="multiblock", block=8, blocks=1, refill=True, candidates=7, start="random"),
    dict(method="lookahead"),
    dict(method="lookahead", window=3, ngram=3, guesses=2),
]
NAMED = {"-".join(map(str, how.values())): how for how in WAYS}
ways = pytest.mark.parametrize("how", NAMED.values(), ids=NAMED)


def tokens(results):
    return [r.token_ids for r in results]


@every_pair(how=NAMED, arch=ARCHITECTURES, dtype=[torch.float64, torch.float32])
def test_greedy_text_is_plain_decodings_text(arch, how, dtype):
    m = model(arch, dtype, seed=int(dtype is torch.float32))
    plain = m.generate(PROMPTS, method="ar", max_tokens=16)
    fast = m.generate(PROMPTS, max_tokens=16, **how)
    assert tokens(fast) == tokens(plain)
    assert all(f.stats.forwards <= p.stats.forwards for f, p in zip(fast, plain))


@ways
@pytest.mark.parametrize("count", [1, 2, 3, 30])
def test_every_length_is_met_exactly_alone_and_batched(how, count):
    m = model("llama", torch.float64)
    plain = m.generate(PROMPTS, method="ar", max_tokens=count, ignore_eos=True)
    assert tokens(m.generate(PROMPTS, max_tokens=count, ignore_eos=True, **how)) == tokens(plain)
    assert [
        m.generate(p, max_tokens=count, ignore_eos=True, **how).token_ids for p in PROMPTS
    ] == tokens(plain)


@ways
def test_text_ends_at_an_end_token_anywhere_in_a_guess(how):
    m = model("llama", torch.float64)
    written = m.generate(PROMPTS[0], max_tokens=18, ignore_eos=True).token_ids
    for stop in dict.fromkeys(written):
        plain = m.generate(PROMPTS[0], method="ar", max_tokens=18, stop_token_ids=[stop])
        fast = m.generate(PROMPTS[0], max_tokens=18, stop_token_ids=[stop], **how)
        assert (fast.token_ids, fast.finish_reason) == (plain.token_ids, plain.finish_reason)


@ways
def test_a_seed_gives_the_same_sample_batched_or_alone(how):
    m = model("llama", torch.float64)
    sampled = dict(max_tokens=12, temperature=0.9, top_p=0.9, seed=3, ignore_eos=True, **how)
    together = tokens(m.generate(PROMPTS, **sampled))
    assert together == [m.generate(p, **sampled).token_ids for p in PROMPTS]
    assert together != tokens(m.generate(PROMPTS, **{**sampled, "seed": 4}))


@ways
def test_log_probabilities_are_those_of_plain_decoding(how):
    m = model("llama", torch.float64)
    plain = m.generate(
        PROMPTS[0], max_tokens=20, logprobs=2, ignore_eos=True, frequency_penalty=0.4
    )
    fast = m.generate(
        PROMPTS[0], max_tokens=20, logprobs=2, ignore_eos=True, frequency_penalty=0.4, **how
    )
    assert fast.token_ids == plain.token_ids
    for a, b in zip(fast.logprobs, plain.logprobs, strict=True):
        assert a["logprob"] == pytest.approx(b["logprob"]) and a[
            "sampled_logprob"
        ] == pytest.approx(b["sampled_logprob"])


@ways
def test_the_whole_context_can_be_used(how):
    m = model("llama", torch.float64)
    prompt = list(range(2, 152))
    plain = m.generate(prompt, method="ar", max_tokens=10, ignore_eos=True)
    assert (
        m.generate(prompt, max_tokens=10, ignore_eos=True, **how).token_ids == plain.token_ids
        and len(plain.token_ids) == 10
    )


def test_a_distilled_model_decodes_several_tokens_per_forward():
    m = forerun.load("zoo:consistency", lanes=4)
    prompts = CODE
    how = dict(max_tokens=64, ignore_eos=True)
    plain = m.generate(prompts, method="ar", **how)
    for options in (dict(method="jacobi"), dict(method="multiblock")):
        fast = m.generate(prompts, **options, **how)
        assert tokens(fast) == tokens(plain)
        assert sum(r.stats.forwards for r in fast) < 0.75 * sum(r.stats.forwards for r in plain)


def test_recycling_saves_forwards_and_says_where_tokens_came_from():
    m = forerun.load("zoo:ar", lanes=1)
    how = dict(method="multiblock", max_tokens=80, ignore_eos=True, block=16, blocks=3, spawn=0.0)
    without, with_it = (
        m.generate("import os\nimport sys\n\n\ndef", candidates=c, **how) for c in (0, 3)
    )
    assert (
        with_it.token_ids == without.token_ids and with_it.stats.forwards < without.stats.forwards
    )
    reasons = {event.reason for event in with_it.trace if event.tokens}
    assert "recycled" in reasons and reasons <= {
        "accepted",
        "recycled",
        "ahead",
        "resampled",
        "bonus",
    }
    assert sum(len(event.tokens) for event in with_it.trace) == 80


def test_what_other_requests_rejected_can_be_recycled_at_temperature_0_only():
    m = fresh(dtype=torch.float64)
    how = dict(method="multiblock", max_tokens=40, ignore_eos=True, share=True)
    first, again = (m.generate(PROMPTS[0], **how) for _ in range(2))
    assert (
        first.token_ids
        == again.token_ids
        == m.generate(PROMPTS[0], max_tokens=40, ignore_eos=True).token_ids
    )
    assert again.stats.forwards <= first.stats.forwards
    with pytest.raises(BadOption, match="temperature 0"):
        m.generate(PROMPTS[0], temperature=1.0, **how)


@pytest.mark.parametrize(
    "how, said",
    [
        (dict(method="jacobi", block=0), "block=0"),
        (dict(method="jacobi", start="zeros"), "known: random, repeat, text"),
        (dict(method="jacobi", refill=1), "refill=1"),
        (dict(method="multiblock", blocks=0), "blocks=0"),
        (dict(method="multiblock", spawn=1.5), "spawn=1.5"),
        (dict(method="multiblock", candidates=-1), "candidates=-1"),
        (dict(method="multiblock", share=1), "share=1"),
        (dict(method="multiblock", refill=True), "blocks=1"),
        (dict(method="lookahead", ngram=2), "ngram=2"),
        (dict(method="lookahead", window=60), str(MAX_TAIL_TOKENS)),
    ],
    ids=str,
)
def test_options_that_mean_nothing_are_refused(how, said):
    with pytest.raises(BadOption, match=said):
        model().generate([1], **how)


def test_a_model_that_fills_blanks_only_is_refused_by_name():
    with pytest.raises(
        NotAble, match="'multiblock' needs a model that scores several continuations"
    ):
        model("masked").generate([1], method="multiblock")


@pytest.mark.parametrize("start", ["repeat", "text", "random"])
def test_a_model_that_needs_no_prompt_guesses_from_nothing(start):
    m = model("any-subset", torch.float64)
    plain = m.generate("", method="sequential", max_tokens=6)
    assert m.generate("", method="jacobi", start=start, max_tokens=6).token_ids == plain.token_ids


@pytest.mark.parametrize(
    "how",
    [dict(method="multiblock", block=6), dict(method="lookahead"), dict(method="jacobi", block=6)],
    ids=str,
)
def test_rejected_guesses_count_in_the_statistics(how):
    stats = (
        model("llama", torch.float64)
        .generate(PROMPTS[0], max_tokens=60, ignore_eos=True, **how)
        .stats
    )
    assert 0 < stats.acceptance_rate < 1 and 0 in stats.acceptance_histogram
    assert 1 <= stats.acceptance_length <= 60 / stats.forwards + 1


def test_a_pool_gives_the_latest_first_and_none_twice():
    pool = RunPool(longest=3, per_key=2)
    pool.add([1, 2, 3, 4, 5])
    pool.add([1, 9])
    pool.add([1, 2, 3, 4])
    assert pool.after(1) == [(2, 3, 4), (9,)] and pool.after(5) == []
    pool.add([1, 7])
    assert pool.after(1) == [(7,), (2, 3, 4)]


class PlainPool:
    """What a pool is by definition: all that was added, looked through from the latest on."""

    def __init__(self, longest, per_key):
        self.longest, self.per_key, self.runs = longest, per_key, []

    def add(self, run):
        self.runs.append(tuple(run))

    def after(self, token):
        later = [
            run[place : place + self.longest]
            for run in reversed(self.runs)
            for place in range(len(run) - 1, 0, -1)
            if run[place - 1] == token
        ]
        return list(dict.fromkeys(later))[: self.per_key]


def check_pool(longest, per_key):
    chance = random.Random(longest)
    pool, plain = RunPool(longest, per_key), PlainPool(longest, per_key)
    for _ in range(300):
        run = [chance.randrange(4) for _ in range(chance.randrange(9))]
        pool.add(run)
        plain.add(run)
        if chance.random() < 0.3:
            pool.index()
        assert all(pool.after(token) == plain.after(token) for token in range(4))


@pytest.mark.parametrize("longest, per_key", [(1, 2), (2, 8), (5, 3), (16, 10)])
def test_a_pool_is_what_looking_through_all_runs_would_find(longest, per_key):
    check_pool(longest, per_key)


def test_a_pool_that_keeps_the_oldest_places_is_caught(monkeypatch):
    right = RunPool._latest
    monkeypatch.setattr(RunPool, "_latest", lambda pool, seen: right(pool, seen[::-1]))
    with pytest.raises(AssertionError):
        check_pool(2, 8)


def test_a_pool_forgets_what_was_not_used_for_longest():
    pool = RunPool(longest=1)
    pool.add(list(range(MOST_KEYS + 1)))
    pool.after(0)  # used, so 1 is the oldest now
    pool.index()
    pool.add([10**6, 1])
    pool.index()
    assert pool.after(0) and not pool.after(1)


def test_tails_leave_the_chain_where_they_differ_and_never_begin_alike():
    found = tails_of(
        [5, 6, 7], [(5, 6, 7), (5, 8, 1), (5, 8, 2), (9,), (5, 6, 7, 4)], count=4, longest=4
    )
    assert found == [(1, (8, 1)), (0, (9,)), (3, (4,))]
    tokens, parents = tree_of([5, 6, 7], found)
    assert tokens == [5, 6, 7, 8, 1, 9, 4] and parents == [0, 1, 2, 1, 4, 0, 3]
    assert (
        path_to(5, parents) == [1, 4, 5]
        and path_to(0, parents) == []
        and path_to(7, parents) == [1, 2, 3, 7]
    )


def test_in_a_chain_descending_is_rejection():
    p = torch.rand(3, 5, 7, dtype=torch.float64)
    p /= p.sum(-1, keepdim=True)
    x = torch.randint(0, 7, (3, 4))
    draws = [(11, 0), (12, 0), (13, 0)]
    descent = descend_tree(x, torch.arange(4).expand(3, 4), p, Noise(draws))
    verdict = rejection(x, None, p, Noise(draws))
    assert torch.equal(descent.node, verdict.accepted)
    assert torch.equal(descent.token, verdict.token)


def test_a_block_keeps_its_draft_when_it_becomes_the_first():
    window = [BlockDraft([1, 2], stable=6), BlockDraft([3, 4, 5, 6], stable=1)]
    # token 1 was right, 2 was not; of the second block 3 and 4 came out again
    said = [1, 9, 3, 4, 8, 6, 7]
    tree = GuessTree([1, 2, 3, 4, 5, 6], [])
    assert said_after(tree, Descent(node=1, token=9, likeliest=said), taken=1) == [3, 4, 8, 6]
    [block] = advance(window, [1, 2, 3, 4, 5, 6], [3, 4, 8, 6], said, decided=2)
    assert block == BlockDraft(
        [3, 4, 8, 6], stable=0
    )  # nothing of it is decided, but the draft is whole


def test_a_block_ahead_keeps_what_came_out_again():
    window = [BlockDraft([1, 2, 3]), BlockDraft([4, 5, 6], stable=1)]
    said = [9, 2, 3, 0, 5, 8, 7]
    first, ahead = advance(window, [1, 2, 3, 4, 5, 6], said[1:6], said, decided=1)
    assert first == BlockDraft([2, 3], stable=1) and ahead == BlockDraft([4, 5, 8], stable=2)


def test_candidates_beyond_the_slots_behind_a_text_are_left_out():
    """Text that fills the context leaves MAX_TAIL_TOKENS; shorter text leaves more."""
    m = model("llama", torch.float64)
    how = dict(max_tokens=40, ignore_eos=True)
    plain = m.generate([5, 6, 5, 6, 5], method="ar", **how)
    wide = m.generate([5, 6, 5, 6, 5], method="multiblock", block=128, candidates=7, **how)
    assert wide.token_ids == plain.token_ids

    def fitting(target, seq):
        tails = [Tail(0, [1] * 100) for _ in range(9)]

        async def answer():
            room = target.host.room - len(seq.text) - 1
            assert len(target.fitting(seq, [1], tails)) == min(9, room // 100)
            return await target.next_law(seq)

        return answer()

    ask(m, [5, 6, None], fitting)
