"""Block diffusion: what a block says, every way to fill it, self-speculation and its routers,
and editing."""

from itertools import pairwise

import numpy as np
import pytest
import torch

import forerun
from forerun.checkpoints import tiny
from forerun.errors import BadOption, NotAble
from forerun.families.block import BlockSpan
from forerun.methods.s2d2 import CONFIGURATIONS
from forerun.options import Sampling
from forerun.probability.logits import TokenHistory
from forerun.sequence.canvas import BLANK, Canvas
from tests.helpers import ask, every_pair, fresh, in_blocks, model, network

KINDS = tiny.BLOCK
SIZE = 8  # what the tiny models were "trained" for
METHODS = {
    "ar": {},
    "block": {"threshold": 0.02},
    "block-stepwise": {},
    "block-ssd": {"drafts": 3},
    "s2d2": {},
    "s2d2-exact": {"k": 5},
    "s2d2-canvases": {"router": "score", "enough": 1.0, "threshold": 0.02},
}
ROUTERS = [
    dict(router="span", span=3),
    dict(router="score", estimator="margin", strength=0.01),
    dict(router="hysteresis", score="dynamic", on=2.0, off=-1.0, threshold=0.02),
    dict(router="bandit", bins="2,1,2"),
]
# blocks of 8: before, one short, full, one over
PROMPTS = [[5, 6, 7], list(range(40, 47)), list(range(8)), list(range(30, 39))]
kinds = pytest.mark.parametrize("kind", KINDS)
causals = pytest.mark.parametrize("causal", ["nothing", "prefix", "text"])


def straightforward(kind, tokens, sees, wanted, positions=None):
    """The laws of some rows from one forward of the library's model under an explicit mask; tokens
    may be None, for the mask."""
    net = network(kind, torch.float64)
    ids = torch.tensor([[tiny.VOCAB if t is None else t for t in tokens]])
    at = None if positions is None else torch.tensor([positions])
    with torch.no_grad():
        logits = net(
            ids, attention_mask=torch.tensor(sees)[None, None], position_ids=at, use_cache=False
        ).logits
    return logits[0, wanted, : tiny.VOCAB].softmax(-1)


def speaking(kind, positions):
    """The rows that speak of some positions."""
    return [p - (kind == "block-shifted") for p in positions]


@every_pair(kind=KINDS, size=[1, 3, 8], known=[7, 8, 9])
def test_a_block_says_what_one_block_causal_forward_says(kind, size, known):
    canvas = [*range(20, 20 + known), *[None] * 9]
    start = known // size * size
    end = start + size
    blanks = list(range(known, end))
    span = BlockSpan(start, end, size)
    [(law, own)] = ask(
        model(kind, torch.float64),
        canvas,
        lambda target, seq: target.blocks(seq, [blanks], [()], span),
    )
    expected = straightforward(kind, canvas[:end], in_blocks(end, size), speaking(kind, blanks))
    assert torch.allclose(own, expected, atol=1e-9) and torch.allclose(law, expected, atol=1e-9)


@kinds
@causals
def test_several_canvases_of_a_block_are_each_as_if_alone(kind, causal):
    canvas = [*range(20, 30), *[None] * 6]
    placed = [(), [(12, 50)], [(12, 50), (14, 51)]]
    open_at = [[p for p in range(10, 16) if p not in dict(done)] for done in placed]
    span = BlockSpan(8, 16, 8, causal)
    together = ask(
        model(kind, torch.float64), canvas, lambda t, s: t.blocks(s, open_at, placed, span)
    )
    for at, done, (_, own) in zip(open_at, placed, together, strict=True):
        filled = [dict(done).get(i, t) for i, t in enumerate(canvas)]
        assert torch.allclose(
            own,
            straightforward(kind, filled, reading(causal, 8, 10, 16), speaking(kind, at)),
            atol=1e-9,
        )


def reading(causal, start, known, end):
    """Which rows see which: finished blocks and the block whole, or from left to right what is said
    to be (equation 4)."""
    sees = in_blocks(end, 8)
    lower = np.tril(np.ones((end, end), bool))
    if causal != "nothing":
        sees[start:known] = lower[start:known]
    if causal == "text":
        sees[:start] = lower[:start]
    return sees


@kinds
@causals
def test_a_verdict_is_block_size_1_decoding_of_the_chain_one_token_after_the_other(kind, causal):
    text, chain = list(range(20, 31)), [50, 51, 52, 53]
    m = model(kind, torch.float64)
    p = ask(m, [*text, *[None] * 6], lambda t, s: t.verdict(s, chain, BlockSpan(8, 16, 8, causal)))
    assert len(p) == len(chain)
    for i in range(len(chain)):
        known = [*text, *chain[:i]]
        tokens = known if kind == "block-shifted" else [*known, None]
        sees = np.tril(np.ones((len(tokens), len(tokens)), bool))
        if causal != "text":
            sees[:8] = in_blocks(len(tokens), 8)[:8]
        assert torch.allclose(p[i], straightforward(kind, tokens, sees, [-1])[0], atol=1e-9), i


@kinds
def test_ar_on_a_block_model_is_block_size_1(kind):
    m = model(kind, torch.float64)
    text, chain = list(range(20, 29)), [50, 51]
    [p] = ask(m, [*text, *[None] * 6], lambda t, s: t.conditionals(s, chain))
    assert len(p) == 3
    for i in range(3):
        tokens = [*text, *chain[:i], *([] if kind == "block-shifted" else [None])]
        sees = np.tril(np.ones((len(tokens), len(tokens)), bool))
        assert torch.allclose(p[i], straightforward(kind, tokens, sees, [-1])[0], atol=1e-9)
    for prompt in PROMPTS:
        plain = m.generate(prompt, method="ar", max_tokens=10, ignore_eos=True).token_ids
        assert (
            m.generate(prompt, method="block", block=1, max_tokens=10, ignore_eos=True).token_ids
            == plain
        )


@kinds
def test_an_outlook_drafts_what_a_block_after_the_chain_would_say(kind):
    text, chain, k = list(range(20, 29)), [50, 51], 3
    m = model(kind, torch.float64)
    verdict, *ahead = ask(
        m, [*text, *[None] * 9], lambda t, s: t.verdict_and_drafts(s, chain, k, [0, 1, 2])
    )
    [p] = ask(m, [*text, *[None] * 9], lambda t, s: t.conditionals(s, chain))
    assert torch.allclose(verdict, p, atol=1e-12)
    for n, law in enumerate(ahead):
        tokens = [*text, *chain[:n], *[None] * (k + 1)]
        sees = np.tril(np.ones((len(tokens), len(tokens)), bool))
        sees[len(text) + n :] = True
        wanted = speaking(kind, range(len(text) + n + 1, len(tokens)))
        assert torch.allclose(law, straightforward(kind, tokens, sees, wanted), atol=1e-9)
    own = ask(m, [*text, *[None] * 9], lambda t, s: t.marginals(s, [9, 10, 12]))
    sees = np.tril(np.ones((13, 13), bool))
    sees[9:] = True
    assert torch.allclose(
        own,
        straightforward(kind, [*text, *[None] * 4], sees, speaking(kind, [9, 10, 12])),
        atol=1e-9,
    )


@kinds
def test_nothing_of_a_later_block_leaks_into_an_earlier_one(kind):
    m = model(kind, torch.float64)
    laws = []
    for later in (60, 61):
        canvas = [20, 21, 22, None, None, None, None, None, later, later + 5, None]
        [(_, own)] = ask(
            m, canvas, lambda t, s: t.blocks(s, [[3, 4, 5, 6, 7]], [()], BlockSpan(0, 8, 8))
        )
        laws.append(own)
    assert torch.equal(*laws)


@every_pair(kind=KINDS, method=list(METHODS), tokens=[1, 7, 8, 9, 19])
def test_exactly_as_many_tokens_as_were_asked_for_and_never_a_mask(kind, method, tokens):
    m = model(kind)
    for temperature in (0.0, 1.5):
        how = dict(
            method=method,
            max_tokens=tokens,
            ignore_eos=True,
            temperature=temperature,
            **METHODS[method],
        )
        for result in m.generate(PROMPTS, **how):
            assert (
                len(result.token_ids) == tokens
                and max(result.token_ids) < tiny.VOCAB
                and min(result.token_ids) >= 0
            )


@pytest.mark.parametrize("method", METHODS)
def test_an_empty_prompt_works_where_something_speaks_of_the_first_token(method):
    assert (
        len(
            model("block")
            .generate("", method=method, max_tokens=9, ignore_eos=True, **METHODS[method])
            .token_ids
        )
        == 9
    )
    with pytest.raises(BadOption, match="prompt is empty"):
        model("block-shifted").generate("", method=method, max_tokens=9, **METHODS[method])


@kinds
@pytest.mark.parametrize("method", METHODS)
def test_batched_equals_alone_and_the_same_seed_gives_the_same_output(kind, method):
    m = model(kind, torch.float64)
    for temperature in (0.0, 0.8):
        how = dict(method=method, max_tokens=10, temperature=temperature, seed=3, **METHODS[method])
        together = [r.token_ids for r in m.generate(PROMPTS, **how)]
        assert together == [m.generate([p], **how)[0].token_ids for p in PROMPTS]
        assert together == [r.token_ids for r in m.generate(PROMPTS, **how)]


@kinds
@pytest.mark.parametrize(
    "method, causal",
    [
        *((m, c) for m in ("block", "s2d2") for c in ("nothing", "prefix", "text")),
        ("block-ssd", "nothing"),
    ],
)
def test_cached_equals_uncached(kind, causal, method, monkeypatch):
    m = fresh(kind, torch.float64)
    how = dict(
        method=method,
        max_tokens=18,
        ignore_eos=True,
        causal=causal,
        temperature=0.9,
        seed=1,
        **METHODS[method],
    )
    cached = [r.token_ids for r in m.generate(PROMPTS, **how)]
    monkeypatch.setattr("forerun.engine.cache.Memo.start", lambda self, plan: 0)
    assert [r.token_ids for r in m.generate(PROMPTS, **how)] == cached


@kinds
@pytest.mark.parametrize("method", ["s2d2-exact", "ar"])
def test_left_to_right_reading_is_cached_too(kind, method, monkeypatch):
    m = fresh(kind, torch.float64)
    how = dict(method=method, max_tokens=18, ignore_eos=True, temperature=0.9, seed=1)
    cached = [r.token_ids for r in m.generate(PROMPTS, **how)]
    monkeypatch.setattr("forerun.engine.cache.Memo.start", lambda self, plan: 0)
    assert [r.token_ids for r in m.generate(PROMPTS, **how)] == cached


@kinds
@pytest.mark.parametrize("method", [m for m in METHODS if m != "ar"])
def test_text_ends_at_an_end_token_in_the_middle_of_a_block(kind, method):
    m = model(kind, torch.float64)
    how = dict(method=method, max_tokens=16, ignore_eos=True, **METHODS[method])
    for prompt in PROMPTS:
        whole = m.generate(prompt, **how).token_ids
        end = whole[5]
        result = m.generate(prompt, stop_token_ids=[end], **how)
        assert result.finish_reason == "stop" and result.token_ids == whole[: whole.index(end) + 1]


@kinds
@pytest.mark.parametrize(
    "block, sub_block", [(1, None), (2, None), (5, None), (8, None), (2, 2), (5, 2), (8, 2), (8, 3)]
)
def test_ssd_inside_a_block_writes_what_stepwise_writes_in_no_more_forwards(kind, block, sub_block):
    m = model(kind, torch.float64)
    how = dict(max_tokens=17, block=block, sub_block=sub_block, ignore_eos=True)
    slow = m.generate(PROMPTS, method="block-stepwise", **how)
    static = m.generate(PROMPTS, method="block", schedule="static", **how)
    assert [r.token_ids for r in static] == [r.token_ids for r in slow]
    assert all(r.stats.forwards == 17 for r in slow)
    for tree in (dict(drafts=0), dict(drafts=2, tree="chain"), dict(drafts=4)):
        fast = m.generate(PROMPTS, method="block-ssd", **tree, **how)
        assert [r.token_ids for r in fast] == [r.token_ids for r in slow]
        assert all(a.stats.forwards <= b.stats.forwards for a, b in zip(fast, slow))


@kinds
def test_the_exact_corners_write_what_ar_writes(kind):
    m = model(kind, torch.float64)
    plain = [r.token_ids for r in m.generate(PROMPTS, method="ar", max_tokens=20, ignore_eos=True)]
    for ahead in ("whole", "every"):
        found = m.generate(
            PROMPTS, method="s2d2-exact", ahead=ahead, k=6, max_tokens=20, ignore_eos=True
        )
        assert [r.token_ids for r in found] == plain and all(r.stats.forwards <= 20 for r in found)
        assert {r.guarantee for r in found} == {"exact"}
    corner = m.generate(
        PROMPTS, method="s2d2", causal="text", router="span", span=1, max_tokens=20, ignore_eos=True
    )
    assert [r.token_ids for r in corner] == plain


@kinds
def test_a_static_schedule_takes_its_steps_and_a_dynamic_one_its_threshold(kind):
    m = model(kind)
    alone = kind == "block-shifted"  # there a block's first token has a forward of its own
    four = m.generate(
        list(range(8)), method="block", schedule="static", steps=4, max_tokens=16, ignore_eos=True
    )
    assert four.stats.forwards == (10 if alone else 8)
    for steps in (1, 3, 5, 7):
        how = dict(method="block", schedule="static", steps=steps, max_tokens=16)
        found = m.generate(list(range(8)), ignore_eos=True, **how)
        assert found.stats.forwards == 2 * (steps + alone)
    everything = m.generate(
        list(range(8)), method="block", threshold=0.0, max_tokens=16, ignore_eos=True
    )
    assert everything.stats.forwards == (4 if alone else 2)
    careful = m.generate(
        list(range(8)), method="block", threshold=1.0, max_tokens=16, ignore_eos=True
    )
    assert (
        careful.token_ids
        == m.generate(
            list(range(8)), method="block-stepwise", max_tokens=16, ignore_eos=True
        ).token_ids
    )


def rows_run(m, **how):
    ran = []
    original = type(m.backbone).forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(m.backbone),
            "forward",
            lambda self, b, s: ran.append(len(b.tokens_T)) or original(self, b, s),
        )
        result = m.generate(list(range(12)), ignore_eos=True, **how)
    return ran, result


def test_a_finished_blocks_keys_come_from_the_next_blocks_first_forward():
    ran, _ = rows_run(fresh("block"), method="block-stepwise", max_tokens=9)
    # The prompt and the rest of its block; that block alone while it is filled; then it, finished,
    # and the next one; then that.
    assert ran == [16, 8, 8, 8, 8 + 5, 5, 5, 5, 5]


def test_a_verdict_runs_only_the_rows_it_needs_and_with_causal_text_they_are_the_cache():
    ran, result = rows_run(fresh("block"), method="s2d2", max_tokens=4)
    # the block's four known tokens read anew, three of the chain, four masks
    assert ran[:2] == [16, 4 + 3 + 4]
    ran, result = rows_run(fresh("block"), method="s2d2", causal="text", max_tokens=4)
    assert ran[:2] == [16, 3 + 4]
    kept = len(result.trace[0].tokens)
    # the token that replaced a rejected one, and the blanks: the accepted ones are held
    assert kept < 3 and ran[2] == 4 - kept


def test_a_shifted_models_verdict_is_one_causal_pass():
    ran, _ = rows_run(fresh("block-shifted"), method="s2d2", causal="text", max_tokens=4)
    assert ran[:2] == [16, 1 + 3]  # the last known token speaks of the first blank


@pytest.mark.parametrize("options", ROUTERS, ids=lambda o: o["router"])
def test_s2d2_is_deterministic_at_temperature_0_and_seeded_above(options):
    m = model("block", torch.float64)
    how = dict(method="s2d2", max_tokens=24, ignore_eos=True, **options)
    assert (
        m.generate([5, 6], seed=1, **how).token_ids == m.generate([5, 6], seed=2, **how).token_ids
    )
    hot = [m.generate([5, 6], seed=s, temperature=1.0, **how).token_ids for s in (1, 1, 2)]
    assert hot[0] == hot[1] != hot[2]
    reasons = {event.reason for event in m.generate([5, 6], seed=1, **how).trace}
    assert reasons <= {"accepted", "resampled", "decided"}


def test_what_is_verified_and_what_is_not_is_the_routers_choice():
    m = model("block", torch.float64)

    def reasons(**options):
        return {
            e.reason
            for e in m.generate(
                [5, 6], method="s2d2", max_tokens=24, ignore_eos=True, **options
            ).trace
        }

    assert "decided" not in reasons(span=1)
    assert reasons(span=9) == {"decided"}
    assert reasons(router="score", enough=1e9) == {"decided"}
    assert "decided" not in reasons(router="score", enough=-1e9)
    assert reasons(router="hysteresis", on=1e9, off=-1e9) == {"decided"}
    assert {"decided", "accepted"} <= reasons(router="bandit")
    plain = m.generate([5, 6], method="block", max_tokens=24, ignore_eos=True).token_ids
    assert (
        m.generate([5, 6], method="s2d2", span=9, max_tokens=24, ignore_eos=True).token_ids == plain
    )


def test_a_ratio_that_forgives_accepts_more_and_one_that_doubts_less():
    m = model("block", torch.float64)

    def rate(power):
        how = dict(
            method="s2d2",
            temperature=1.0,
            seed=1,
            max_tokens=32,
            ignore_eos=True,
            ratio_power=power,
        )
        return np.mean([r.stats.acceptance_length for r in m.generate(PROMPTS * 4, **how)])

    assert rate(0.05) > rate(1.0) > rate(20.0)


@kinds
def test_a_block_model_drafts_for_a_left_to_right_model(kind):
    target, small = model("llama", torch.float64), model(kind, torch.float64)
    how = dict(max_tokens=12, ignore_eos=True)
    plain = [target.generate(p, method="ar", **how).token_ids for p in PROMPTS]
    assert [
        r.token_ids for r in target.generate(PROMPTS, method="specdiff", draft=small, k=4, **how)
    ] == plain


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(method="block", block=321), "at most 320"),
        (dict(method="block", block=0), "block=0"),
        (dict(method="block", sub_block=0), "sub_block"),
        (dict(method="block", causal="yes"), "causal"),
        (dict(method="block", schedule="fast"), "schedule"),
        (dict(method="block", threshold=2), "threshold"),
        (dict(method="block", steps=0), "steps"),
        (dict(method="block", edit=0.5, causal="text"), "causal='nothing'"),
        (dict(method="s2d2", router="coin"), "router"),
        (dict(method="s2d2", estimator="gut"), "estimator"),
        (dict(method="s2d2", score="new"), "score"),
        (dict(method="s2d2", bins="2,2"), "bins"),
        (dict(method="s2d2", on=0, off=1), "off"),
        (dict(method="s2d2", ratio_power=0), "ratio_power"),
        (dict(method="s2d2", ratio_power=0.5), "does nothing at temperature 0"),
        (dict(method="s2d2", accept="all"), "accept"),
        (dict(method="s2d2", config="sdar-9b-A"), "sdar-8b-A"),
        (dict(method="s2d2", config="sdar-8b-A", causal="prefix"), "leave one of them out"),
        (dict(method="s2d2-exact", k=17), "k=17"),
        (dict(method="s2d2-exact", ahead="none"), "ahead"),
        (dict(method="s2d2-canvases", drafts=6), "drafts"),
        (dict(method="s2d2-canvases", causal="text"), "causal='nothing'"),
        (dict(method="block-ssd", causal="prefix"), "causal='nothing'"),
        (dict(method="block", steps=4), "schedule='static'"),
        (dict(method="block", block=4, sub_block=5), "sub_block=5 must be at most 4"),
        (dict(method="s2d2", estimator="renyi", strength=0.5), "has none"),
        (dict(method="s2d2", bins="²,2,2"), "bins"),
        (dict(method="s2d2", cost="x"), "cost='x' must be a number"),
        (dict(method="s2d2", edit=0.5, presence_penalty=1.0), "with penalties"),
    ],
    ids=str,
)
def test_options_that_mean_nothing_are_refused(options, said):
    with pytest.raises(BadOption, match=said):
        model("block").generate([1], max_tokens=2, **options)


def test_models_of_another_family_are_refused():
    with pytest.raises(NotAble, match=r"'s2d2' needs a model that fills a block at a time.*'ar'"):
        model("llama").generate([1], method="s2d2")
    with pytest.raises(NotAble, match=r"'ssd' needs a model that looks at a whole canvas.*'block'"):
        model("block").generate([1], method="ssd")
    with pytest.raises(NotAble, match="cannot look past a hole"):
        model("block").infill(token_ids=[1, None, 2])
    with pytest.raises(NotAble, match="speak of their own tokens"):
        model("block-shifted").generate([1], method="block", edit=0.5, max_tokens=4)


def test_certify_and_compare_know_block_models():
    from forerun.certify.testing import certify
    from forerun.evaluate.compare import ComparisonSettings, Contestant, compare

    m = model("block", torch.float64)
    found = certify(m, "s2d2-exact", temperature=0.0, max_tokens=8, prompts=PROMPTS)
    assert found.verdict == "holds" and found.reference == "ar"
    found = certify(m, "block-ssd", temperature=0.0, max_tokens=8, prompts=PROMPTS, block=4)
    assert found.verdict == "holds" and found.reference == "block-stepwise"
    rows = compare(
        [Contestant(m, "ar", {}), Contestant(m, "s2d2-exact", {})],
        PROMPTS[:2],
        ComparisonSettings(rounds=1, max_tokens=6, temperature=0.0),
    )
    assert rows[1].equals_reference == 1.0


# Token editing.


def canvas(tokens, **sampling):
    history = TokenHistory(Sampling(**sampling), np.zeros(0, np.int64), 64, frozenset({63}))
    return Canvas(
        [BLANK if t is None else t for t in tokens],
        history=history,
        ending=lambda t: "stop" if t == 63 else None,
    )


def test_what_may_still_be_edited_is_not_said_and_does_not_end_the_text():
    seq = canvas([1, None, None, None, None], presence_penalty=1.0)
    seq.finalize(1)
    seq.fill([1, 2, 3], [5, 63, 6], "decided")
    assert seq.known == 1 and not seq.done and seq.output == [] and seq.first_blank == 4
    seq.edit([(2, 7)])
    assert seq.tokens.tolist() == [1, 5, 7, 6, BLANK]
    event = seq.trace.events[-1]
    assert (event.reason, event.positions, event.tokens, event.rejected) == (
        "edited",
        [2],
        [7],
        [63],
    )
    assert (
        seq.history.in_output_V[63] == 0
        and seq.history.in_output_V[7] == 1
        and seq.history.generated == 3
    )
    seq.finalize(4)
    assert seq.known == 4 and seq.output == [5, 7, 6] and not seq.done
    seq.fill([4], [63], "decided")
    assert not seq.done
    seq.finalize(5)
    assert seq.finish_reason == "stop"
    with pytest.raises(AssertionError, match="is not editable"):
        seq.edit([(2, 9)])


@pytest.mark.parametrize("method", ["block", "s2d2"])
def test_editing_changes_decided_tokens_of_the_block_only_and_streams_nothing_that_it_changes(
    method,
):
    m = fresh("block", torch.float64)
    how = dict(
        method=method,
        edit=0.0,
        post_edits=2,
        max_tokens=20,
        ignore_eos=True,
        temperature=1.0,
        seed=2,
    )
    result = m.generate(list(range(12)), **how)
    edits = [e for e in result.trace if e.reason == "edited"]
    assert edits and len(result.token_ids) == 20
    blocks = [{p // 8 for p in e.positions} for e in edits]
    assert all(len(own) == 1 for own in blocks) and [min(b) for b in blocks] == sorted(
        min(b) for b in blocks
    )
    assert all(p >= 12 for e in edits for p in e.positions)  # the prompt is not ours to edit
    board = {}
    for event in result.trace:
        if event.reason == "edited":
            assert (
                event.rejected == [board[p] for p in event.positions]
                and event.rejected != event.tokens
            )
        board |= dict(zip(event.positions, event.tokens))
    assert [board[p] for p in sorted(board)] == result.token_ids
    pieces = "".join(m.stream(list(range(12)), **how))
    assert pieces == result.text


def test_an_edit_is_no_token_more_in_a_traces_summary():
    from forerun.cli.trace import read_commit, summary
    from forerun.requests.traces import trace_lines

    m = fresh("block", torch.float64)
    result = m.generate(
        list(range(12)),
        method="block",
        edit=0.0,
        post_edits=1,
        max_tokens=20,
        ignore_eos=True,
        temperature=1.0,
        seed=2,
    )
    facts = summary([read_commit(line) for line in trace_lines(result, 0, m.decode)])
    assert facts["tokens"] == 20 and facts["reasons"]["edited"] > 0 and facts["rejected"] == 0
    assert result.stats.acceptance_length is None


def test_a_threshold_nobody_reaches_edits_nothing_and_costs_a_look_per_block():
    m = model("block", torch.float64)
    how = dict(method="block", threshold=0.5, max_tokens=16, ignore_eos=True)
    plain, careful = m.generate(list(range(8)), **how), m.generate(list(range(8)), edit=1.0, **how)
    assert (
        careful.token_ids == plain.token_ids and careful.stats.forwards == plain.stats.forwards + 2
    )
    none = m.generate(list(range(8)), edit=1.0, post_edits=0, **how)
    assert none.stats.forwards == plain.stats.forwards


def test_editing_goes_with_log_probabilities_stop_strings_and_end_tokens():
    m = fresh("block", torch.float64)
    how = dict(
        method="block",
        edit=0.0,
        post_edits=1,
        max_tokens=20,
        temperature=1.0,
        seed=2,
        ignore_eos=True,
    )
    plain = m.generate(list(range(12)), logprobs=1, **how)
    assert any(e.reason == "edited" for e in plain.trace)
    assert [entry["token"] for entry in plain.logprobs] == plain.token_ids
    end = plain.token_ids[6]
    stopped = m.generate(list(range(12)), stop_token_ids=[end], **how)
    assert (
        stopped.token_ids == plain.token_ids[: plain.token_ids.index(end) + 1]
        and stopped.finish_reason == "stop"
    )
    said = m.decode(plain.token_ids[4:6])
    cut = m.generate(list(range(12)), stop=[said], **how)
    assert cut.finish_reason == "stop" and said not in cut.text and plain.text.startswith(cut.text)


def test_batched_editing_equals_editing_alone():
    m = model("block", torch.float64)
    how = dict(method="s2d2", router="score", edit=0.01, max_tokens=15, temperature=0.9, seed=4)
    assert [r.token_ids for r in m.generate(PROMPTS, **how)] == [
        m.generate([p], **how)[0].token_ids for p in PROMPTS
    ]


def test_a_block_larger_than_the_model_was_trained_for_runs_with_one_warning():
    m = model("block", torch.float64)
    for method in ("block-stepwise", "block", "block-ssd", "s2d2"):
        with pytest.warns(UserWarning, match=r"block=16 is larger than the 8 tokens") as said:
            result = m.generate([5, 6, 7], method=method, block=16, max_tokens=20, ignore_eos=True)
        assert len(result.token_ids) == 20
        assert len([one for one in said if "larger than" in str(one.message)]) == 1


@pytest.mark.filterwarnings("ignore:block=")
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_papers_configurations_run_by_name(name):
    m = model("block")
    options = dict(CONFIGURATIONS[name])
    how = dict(method="s2d2", max_tokens=12, ignore_eos=True, temperature=1.0, seed=3)
    named = m.generate([5, 6, 7], config=name, **how)
    assert named.token_ids == m.generate([5, 6, 7], **options, **how).token_ids
    assert named.guarantee == "approximate"


def test_the_authors_acceptance_is_random_at_temperature_0_and_says_so():
    m = model("block", torch.float64)
    how = dict(method="s2d2", max_tokens=16, ignore_eos=True)
    greedy = [m.generate([5, 6, 7], seed=seed, **how).token_ids for seed in range(4)]
    assert len(set(map(tuple, greedy))) == 1
    drawn = [m.generate([5, 6, 7], seed=seed, accept="published", **how) for seed in range(4)]
    assert len({tuple(result.token_ids) for result in drawn}) > 1
    assert "accept=published" in drawn[0].reason
    warm = dict(how, temperature=1.0, seed=2)
    same = [
        m.generate([5, 6, 7], accept=accept, **warm).token_ids for accept in ("law", "published")
    ]
    assert same[0] == same[1]
    hard, soft = (
        m.generate([5, 6, 7], accept="published", ratio_power=power, **how).stats
        for power in (8.0, 0.01)
    )
    assert soft.forwards < hard.forwards


def test_hysteresis_turns_on_and_off():
    m = forerun.load("zoo:block", lanes=1)
    result = m.generate(
        "import os\n\n\ndef main(args):\n    ",
        method="s2d2",
        block=16,
        router="hysteresis",
        max_tokens=32,
        ignore_eos=True,
    )
    verified = [bool(event.drafted) for event in result.trace if event.reason != "resampled"]
    changes = sum(a != b for a, b in pairwise(verified))
    assert changes >= 2
