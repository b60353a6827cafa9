"""Any-subset models: one forward gives a whole chain, queries leave no trace, caches change
nothing, and ASSD keeps its bound."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import forerun
from forerun.checkpoints import tiny
from forerun.errors import BadOption, NotAble
from forerun.families.any_subset import AnySubset
from tests.helpers import ask, every_pair, model

KINDS = ("any-subset", "xlnet")
AHEAD = ("none", "bonus", "whole", "every")
HOLES = {
    "scattered": [None, 4, None, None, 9, None, 30, None, None, 8],
    "prefix": [3, 4, 5, 6, None, None, None, None],
    "suffix": [None, None, None, None, 5, 6],
    "one given": [None, None, None, 7, None, None],
    "dense": [1, 2, None, 4, 5, None, 7, 8, 9],
}
both = pytest.mark.parametrize("kind", KINDS)


@every_pair(kind=KINDS, dtype=[torch.float32, torch.float64], holes=HOLES)
def test_one_forward_gives_every_conditional_of_the_chain(kind, dtype, holes):
    close = 1e-5 if dtype is torch.float32 else 1e-12
    m = model(kind, dtype)
    chain = [11, 22, 33, 44, 55, 66][: holes.count(None)]
    [together] = ask(m, holes, lambda target, seq: target.conditionals(seq, chain))
    for i in range(len(together)):
        # The chain's first i tokens decided one after the other, each in a forward of its own.
        alone = ask(m, holes, lambda target, seq, i=i: target.next_law(seq, chain[:i]))
        assert torch.allclose(together[i], alone, atol=close), i


@both
def test_parallel_queries_do_not_influence_each_other(kind):
    m = model(kind, torch.float64)
    holes = HOLES["scattered"]
    blanks = [i for i, t in enumerate(holes) if t is None]
    together = ask(m, holes, lambda target, seq: target.marginals(seq, blanks))
    for i, p in enumerate(blanks):
        alone = ask(m, holes, lambda target, seq, p=p: target.marginals(seq, [p]))
        assert torch.allclose(together[i], alone[0], atol=1e-12)


@both
def test_the_first_marginal_is_the_first_conditional(kind):
    """Lemma 1: what was drawn from it needs no verdict."""
    m = model(kind, torch.float64)
    for holes in HOLES.values():
        first = holes.index(None)
        marginal = ask(m, holes, lambda target, seq, first=first: target.marginals(seq, [first]))
        [conditional] = ask(m, holes, lambda target, seq: target.conditionals(seq, [5]))
        assert torch.allclose(marginal[0], conditional[0], atol=1e-12)


@both
def test_the_outlook_is_the_marginals_after_each_prefix(kind):
    m = model(kind, torch.float64)
    holes, chain = HOLES["scattered"], [11, 22, 33]
    verdict, *ahead = ask(
        m, holes, lambda target, seq: target.verdict_and_drafts(seq, chain, 2, range(4))
    )
    [expected] = ask(m, holes, lambda target, seq: target.conditionals(seq, chain))
    assert torch.allclose(verdict, expected, atol=1e-12)
    blanks = [i for i, t in enumerate(holes) if t is None]
    for n, laws in enumerate(ahead):
        after = blanks[n + 1 : n + 3]
        assert len(laws) == len(after)
        # By definition: the tokens of the prefix fill their blanks, but as decided tokens, not as
        # given ones.
        for law, position in zip(laws, after):
            early = ask(
                m, holes, lambda t, s, n=n, p=position: decided_then_marginal(t, s, chain[:n], p)
            )
            assert torch.allclose(law, early, atol=1e-12)


async def decided_then_marginal(target, seq, tokens, position):
    seq.fill(seq.next(len(tokens)), tokens, "forced")
    return (await target.marginals(seq, [position]))[0]


@every_pair(kind=KINDS, ahead=[None, *AHEAD], temperature=[0.0, 0.9])
def test_batched_equals_alone_and_cached_equals_uncached(kind, ahead, temperature, monkeypatch):
    method, options = ("assd", {"ahead": ahead, "k": 3}) if ahead else ("sequential", {})
    m = model(kind, torch.float64)
    texts = list(HOLES.values())
    how = dict(method=method, temperature=temperature, seed=4, **options)
    batched = [r.token_ids for r in m.infill(token_ids=texts, **how)]
    assert batched == [m.infill(token_ids=text, **how).token_ids for text in texts]
    monkeypatch.setattr("forerun.engine.cache.reusable", lambda held, plan: 0)
    assert batched == [m.infill(token_ids=text, **how).token_ids for text in texts]


@every_pair(kind=KINDS, ahead=[None, *AHEAD], k=[1, 2, 5, 40])
def test_assd_writes_what_sequential_writes_at_temperature_0(kind, ahead, k):
    options = {"ahead": ahead, "k": k} if ahead else {"draft": "ngram", "k": k}
    m = model(kind, torch.float64)
    for text in HOLES.values():
        assert (
            m.infill(token_ids=text, method="assd", **options).token_ids
            == m.infill(token_ids=text, method="sequential").token_ids
        )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.one_of(st.none(), st.none(), st.integers(0, 200)), min_size=1, max_size=24).filter(
        lambda x: None in x
    ),
    st.integers(1, 12),
    st.sampled_from(AHEAD),
    st.sampled_from([0.0, 0.7, 1.5]),
    st.integers(0, 5),
)
def test_self_drafting_never_asks_more_often_than_there_are_tokens(
    holes, k, ahead, temperature, seed
):
    """Theorem 1."""
    result = model("any-subset").infill(
        token_ids=holes, method="assd", k=k, ahead=ahead, temperature=temperature, seed=seed
    )
    assert result.stats.forwards <= result.stats.tokens == holes.count(None)


def test_a_chain_that_is_accepted_is_not_run_again():
    m = model("any-subset")
    rows = []
    original = type(m.backbone).forward
    spy = lambda self, batch, slots: (
        rows.append(len(batch.tokens_T)) or original(self, batch, slots)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(m.backbone), "forward", spy)
        m.infill(token_ids=[7] * 40 + [None] * 8 + [9] * 40, method="sequential")
    # afterwards: the token just decided, and the next query
    assert rows[0] > 80 and max(rows[1:]) == 2


def test_perturbing_a_later_token_changes_nothing_earlier():
    """Decided rows are causal in decoding order: a chain's later tokens do not reach its earlier
    laws."""
    for kind in KINDS:
        m = model(kind, torch.float64)
        holes = HOLES["scattered"]
        [a] = ask(m, holes, lambda target, seq: target.conditionals(seq, [11, 22, 33, 44]))
        [b] = ask(m, holes, lambda target, seq: target.conditionals(seq, [11, 22, 99, 44]))
        assert torch.equal(a[:3], b[:3]) and not torch.allclose(a[3], b[3])


def test_given_tokens_see_each_other_whole():
    """A token given right of a hole changes the law left of it."""
    m = model("any-subset", torch.float64)
    a = ask(m, [None, 5, 6], lambda target, seq: target.marginals(seq, [0]))
    b = ask(m, [None, 5, 7], lambda target, seq: target.marginals(seq, [0]))
    assert not torch.allclose(a, b)


def test_the_library_agrees_with_our_xlnet():
    """perm_mask and target_mapping, spelt out, in one uncached forward of `transformers`' own
    XLNet."""
    net, m = tiny.build("xlnet"), model("xlnet")
    for holes in HOLES.values():
        filled = m.infill(token_ids=holes, method="assd", temperature=1.0, seed=2).token_ids
        shown = [i for i, t in enumerate(holes) if t is not None]
        blanks = [i for i, t in enumerate(holes) if t is None]
        rank = {p: i for i, p in enumerate([*shown, *blanks])}
        size = len(holes)
        banned = torch.ones(1, size, size)
        for i in range(size):
            for j in range(size):
                if (i in shown and j in shown) or rank[j] < rank[i]:
                    banned[0, i, j] = 0
        wanted = torch.nn.functional.one_hot(torch.tensor([blanks]), size).float()
        chain = [filled[p] for p in blanks]
        with torch.no_grad():
            logits = net(torch.tensor([filled]), perm_mask=banned, target_mapping=wanted).logits[
                0, :, : m.vocab
            ]
        [laws] = ask(m, holes, lambda target, seq, chain=chain: target.conditionals(seq, chain))
        assert torch.allclose(laws, logits.softmax(-1), atol=1e-5)


def test_xlnet_refuses_a_canvas_where_nothing_is_given():
    m = model("xlnet")
    with pytest.raises(BadOption, match="at least one token"):
        m.infill(token_ids=[None, None])
    with pytest.raises(BadOption, match="empty"):
        m.generate("", method="assd", max_tokens=3)
    with pytest.raises(NotAble, match="nothing is given"):
        ask(m, [None, None], lambda target, seq: target.marginals(seq, [0]))


def test_a_decoder_with_queries_starts_from_nothing():
    m = model("any-subset", torch.float64)
    assert m.infill(token_ids=[None, None, None], method="assd").stats.tokens == 3
    assert len(m.generate("", method="assd", max_tokens=5, ignore_eos=True).token_ids) == 5


@both
def test_generating_ends_at_the_end_token_in_the_middle_of_a_draft(kind):
    m = model(kind, torch.float64)
    for seed in range(6):
        whole = m.generate(
            [5, 6], method="sequential", max_tokens=12, temperature=0, ignore_eos=True, seed=seed
        ).token_ids
        stop = whole[5]
        for ahead in AHEAD:
            result = m.generate(
                [5, 6],
                method="assd",
                max_tokens=12,
                stop_token_ids=[stop],
                ahead=ahead,
                ignore_eos=True,
            )
            assert (
                result.token_ids == whole[: whole.index(stop) + 1]
                and result.finish_reason == "stop"
            )


def test_the_mask_is_never_written():
    net = tiny.build("any-subset")
    with torch.no_grad():
        # a network that wants nothing but masks
        net.lm_head.weight[tiny.VOCAB] = net.lm_head.weight.abs().max() * 50
    m = forerun.from_network(net, None, name="masks", lanes=2, max_context=64)
    for temperature in (0.0, 1.0):
        for method in ("sequential", "assd"):
            assert (
                tiny.VOCAB
                not in m.infill(
                    token_ids=[3, *[None] * 9], method=method, temperature=temperature
                ).token_ids
            )


def test_a_family_says_which_checkpoints_are_its_own():
    assert (
        model("any-subset").family.name == "any-subset" and model("llama").family.name == "causal"
    )
    assert AnySubset.of(tiny.build("llama").config) is None
    with pytest.raises(
        NotAble, match=r"'assd' needs a model that scores chains through blanks.*'ar'"
    ):
        model("llama").generate("hi", method="assd")
    with pytest.raises(NotAble, match="one chain"):
        ask(
            model("any-subset"),
            [1, None, None],
            lambda target, seq: target.conditionals(seq, [1], [2]),
        )


def test_logprobs_of_assd_are_those_of_sequential_decoding():
    m = model("any-subset", torch.float64)
    for ahead in AHEAD:
        fast = m.infill(
            token_ids=HOLES["scattered"], method="assd", ahead=ahead, logprobs=1, temperature=0
        )
        slow = m.infill(
            token_ids=HOLES["scattered"], method="sequential", logprobs=1, temperature=0
        )
        for a, b in zip(fast.logprobs, slow.logprobs, strict=True):
            assert a["token"] == b["token"] and a["logprob"] == pytest.approx(
                b["logprob"], abs=1e-9
            )
        assert fast.logprob == pytest.approx(sum(e["logprob"] for e in slow.logprobs), abs=1e-9)


def test_a_tolerance_accepts_more_and_says_that_it_is_approximate():
    m = model("any-subset")
    text = [7] * 5 + [None] * 60
    exact = [m.infill(token_ids=text, method="assd", temperature=1.0, seed=s) for s in range(4)]
    loose = [
        m.infill(token_ids=text, method="assd-tolerant", tolerance=0.9, temperature=1.0, seed=s)
        for s in range(4)
    ]
    assert loose[0].guarantee == "approximate" and exact[0].guarantee == "exact"
    assert sum(r.stats.forwards for r in loose) < sum(r.stats.forwards for r in exact)
    with pytest.raises(BadOption, match="tolerance"):
        m.infill(token_ids=text, method="assd-tolerant", tolerance=2)
    with pytest.raises(BadOption, match="'every'"):
        m.infill(token_ids=text, ahead="evry")


def test_xlnet_checkpoints_load_from_a_directory(tmp_path):
    tiny.build("xlnet", 4).save_pretrained(tmp_path)
    m = forerun.load(str(tmp_path), max_context=64)
    assert m.family.name == "any-subset" and m.family.needs_prompt
    same = forerun.from_network(tiny.build("xlnet", 4), None, name="same", max_context=64)
    holes = HOLES["scattered"]
    assert m.infill(token_ids=holes).token_ids == same.infill(token_ids=holes).token_ids
    # it knows only distances, so there is no limit of its own
    assert forerun.load(str(tmp_path)).context == 1024
