"""Masked diffusion: what a canvas says, every way to decide blanks, caches, SSD, and drafts."""

from types import SimpleNamespace

import pytest
import torch

import forerun
from forerun.checkpoints import tiny
from forerun.errors import BadOption, NotAble
from forerun.families.masked import CacheScope, Masked
from forerun.sequence.canvas import BLANK
from tests.helpers import ask, every_pair, model

KINDS = tiny.MASKED
METHODS = {
    "stepwise": {},
    "steps": {"steps": 3},
    "threshold": {"threshold": 0.05},
    "entropy-bounded": {"bound": 6.0},
    "ancestral": {"steps": 6},
    "ssd": {"drafts": 3},
}
PROMPTS = [[5, 6, 7], list(range(40, 47)), list(range(8)), list(range(30, 39))]
kinds = pytest.mark.parametrize("kind", KINDS)
CACHES = ["none", "prefix", "dual"]


def straightforward(kind, canvas):
    """Logits of every position from one bidirectional forward of the library's model, mask
    forbidden."""
    net = tiny.build(kind, 0, torch.float64)
    ids = torch.tensor([[tiny.VOCAB if t is None else t for t in canvas]])
    n = ids.shape[1]
    with torch.no_grad():
        logits = net(
            ids, attention_mask=torch.ones(1, 1, n, n, dtype=torch.bool), use_cache=False
        ).logits[0, :, : tiny.VOCAB]
    return torch.cat([logits[:1], logits[:-1]]) if kind == "masked-shifted" else logits


@kinds
def test_a_canvas_says_what_one_bidirectional_forward_says(kind):
    canvas = [None, 4, None, 9, 30, None]
    at = [0, 2, 5]
    [(law, own)] = ask(
        model(kind, torch.float64),
        canvas,
        lambda target, seq: target.canvases(seq, [at], [()], CacheScope()),
    )
    expected = straightforward(kind, canvas)[at].softmax(-1)
    assert torch.allclose(own, expected, atol=1e-6) and torch.allclose(law, expected, atol=1e-6)


@kinds
def test_several_canvases_in_one_forward_are_each_as_if_alone(kind):
    canvas, placed = [None, 4, None, None, 30, None], [(), [(2, 11)], [(2, 11), (5, 12)]]
    open_at = [[0, 2, 3, 5], [0, 3, 5], [0, 3]]
    together = ask(
        model(kind, torch.float64),
        canvas,
        lambda t, s: t.canvases(s, open_at, placed, CacheScope()),
    )
    for at, done, (_, own) in zip(open_at, placed, together, strict=True):
        filled = list(canvas)
        for position, token in done:
            filled[position] = token
        assert torch.allclose(own, straightforward(kind, filled)[at].softmax(-1), atol=1e-6)


TREES = [
    dict(drafts=0),
    dict(drafts=1),
    dict(drafts=3, tree="chain"),
    dict(drafts=3),
    dict(drafts=5),
    dict(drafts=4, worth=0.01),
]


@every_pair(kind=KINDS, cache=CACHES, block=[1, 3, 8, 16], dtype=[torch.float32, torch.float64])
def test_ssd_writes_what_stepwise_writes_in_no_more_forwards(kind, cache, block, dtype):
    m = model(kind, dtype)
    how = dict(max_tokens=9, block=block, cache=cache, refresh=4, ignore_eos=True)
    slow = m.generate(PROMPTS, method="stepwise", **how)
    for tree in TREES:
        fast = m.generate(PROMPTS, method="ssd", **tree, **how)
        assert [r.token_ids for r in fast] == [r.token_ids for r in slow]
        assert all(a.stats.forwards <= b.stats.forwards for a, b in zip(fast, slow))


def test_ssd_saves_forwards_on_a_trained_model():
    m = forerun.load("zoo:masked", lanes=1)
    slow = m.generate("import os\n\n\ndef main():", method="stepwise", block=8, max_tokens=24)
    fast = m.generate("import os\n\n\ndef main():", method="ssd", block=8, max_tokens=24)
    assert fast.token_ids == slow.token_ids and fast.stats.forwards < 0.7 * slow.stats.forwards


@every_pair(kind=KINDS, cache=CACHES, method=[m for m in METHODS if m != "ancestral"])
def test_batched_equals_alone(kind, cache, method):
    m = model(kind, torch.float64)
    for temperature in (0.0, 0.8):
        how = dict(
            method=method,
            max_tokens=7,
            block=4,
            cache=cache,
            temperature=temperature,
            seed=3,
            **METHODS[method],
        )
        together = [r.token_ids for r in m.generate(PROMPTS, **how)]
        assert together == [m.generate([p], **how)[0].token_ids for p in PROMPTS]


@kinds
def test_an_empty_prompt_works(kind):
    """On a canvas of masks alone all blanks are alike, so which comes first hangs on rounding; that
    all are filled does not."""
    for method in METHODS:
        assert (
            len(
                model(kind)
                .generate("", method=method, max_tokens=6, ignore_eos=True, **METHODS[method])
                .token_ids
            )
            == 6
        )


@kinds
def test_a_cache_that_is_always_refreshed_is_no_cache(kind):
    m = model(kind, torch.float64)
    how = dict(method="stepwise", max_tokens=12, block=4, ignore_eos=True)
    exact = m.generate(PROMPTS, cache="none", **how)
    for cache in ("prefix", "dual"):
        assert [r.token_ids for r in m.generate(PROMPTS, cache=cache, refresh=1, **how)] == [
            r.token_ids for r in exact
        ]


@pytest.mark.parametrize("cache, rows", [("prefix", 24), ("dual", 4)])
def test_a_cache_runs_only_what_its_policy_says(cache, rows):
    m = model("masked")
    ran = []
    original = type(m.backbone).forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(m.backbone),
            "forward",
            lambda self, b, s: ran.append(len(b.tokens_T)) or original(self, b, s),
        )
        m.generate(
            list(range(20)),
            method="stepwise",
            max_tokens=24,
            block=4,
            cache=cache,
            refresh=100,
            ignore_eos=True,
        )
    # a block begins with everything computed anew
    assert ran[:4] == [44, rows, rows, rows] and ran[4] == 44


@kinds
@pytest.mark.parametrize("method", METHODS)
def test_every_method_fills_every_blank_and_never_with_a_mask(kind, method):
    m = model(kind)
    for temperature in (0.0, 2.0):
        result = m.infill(
            token_ids=[3, None, None, 9, *[None] * 6, 4],
            method=method,
            temperature=temperature,
            **METHODS[method],
        )
        assert (
            result.stats.tokens == 8
            and tiny.VOCAB not in result.token_ids
            and BLANK not in result.token_ids
        )


def test_the_fast_ways_take_fewer_forwards_and_say_that_they_are_approximate():
    m = model("masked")
    for method in ("steps", "threshold", "entropy-bounded", "ancestral"):
        result = m.generate(
            [5, 6], method=method, max_tokens=12, ignore_eos=True, **METHODS[method]
        )
        assert result.stats.forwards < 12 and result.guarantee == "approximate"
    one = m.generate([5, 6], method="threshold", threshold=1.0, max_tokens=8, ignore_eos=True)
    zero = m.generate(
        [5, 6], method="threshold", threshold=0.0, max_tokens=8, block=8, ignore_eos=True
    )
    assert (
        one.token_ids == m.generate([5, 6], max_tokens=8, ignore_eos=True).token_ids
        and zero.stats.forwards == 1
    )


def test_blocks_are_finished_from_left_to_right():
    result = model("masked").generate(
        [5], method="stepwise", max_tokens=12, block=4, ignore_eos=True
    )
    order = [event.positions[0] for event in result.trace]
    assert [sorted(order[i : i + 4]) for i in (0, 4, 8)] == [
        [1, 2, 3, 4],
        [5, 6, 7, 8],
        [9, 10, 11, 12],
    ]
    assert order != sorted(order)  # within a block the most_confident first


def test_the_surest_blank_is_decided_first():
    m = model("masked", torch.float64)
    canvas = [3, None, None, None, 7]
    own = straightforward("masked", canvas)[[1, 2, 3]].softmax(-1)
    first = m.infill(token_ids=canvas, method="stepwise").trace[0]
    best = int(own.amax(-1).argmax())
    assert (first.positions, first.tokens) == ([best + 1], [int(own[best].argmax())])


def test_text_ends_at_the_first_end_token_with_everything_before_it_decided():
    m = model("masked", torch.float64)
    whole = m.generate(
        [5, 6], method="stepwise", max_tokens=10, block=10, ignore_eos=True
    ).token_ids
    for method in ("stepwise", "ssd"):
        result = m.generate(
            [5, 6],
            method=method,
            max_tokens=10,
            block=10,
            ignore_eos=True,
            stop_token_ids=[whole[4]],
        )
        assert (
            result.token_ids == whole[: whole.index(whole[4]) + 1]
            and result.finish_reason == "stop"
        )


def test_parameters_hold_for_canvases():
    m = model("masked")
    for method in METHODS:
        how = dict(method=method, max_tokens=8, **METHODS[method])
        assert set(m.generate([5], allowed_tokens=[60, 61], **how).token_ids) <= {60, 61}
        assert (
            m.generate([5], temperature=1.0, seed=1, **how).token_ids
            == m.generate([5], temperature=1.0, seed=1, **how).token_ids
        )
    [end] = m.eos
    biased = m.generate([5], max_tokens=6, min_tokens=4, logit_bias={end: 1e5})
    assert len(biased.token_ids) == 5 and end not in biased.token_ids[:4]
    assert (
        len(set(m.generate([5], max_tokens=12, ignore_eos=True, presence_penalty=1e5).token_ids))
        == 12
    )


def test_logprobs_are_those_of_the_moment_of_decision():
    m = model("masked", torch.float64)
    slow = m.infill(token_ids=[3, None, None, None, 7], method="stepwise", logprobs=1)
    fast = m.infill(token_ids=[3, None, None, None, 7], method="ssd", logprobs=1)
    first = slow.trace[0].positions[0]
    own = straightforward("masked", [3, None, None, None, 7])[first].log_softmax(-1)
    assert slow.logprobs[first - 1]["logprob"] == pytest.approx(float(own.max()), abs=1e-6)
    assert [e["token"] for e in fast.logprobs] == [e["token"] for e in slow.logprobs]
    assert [e["logprob"] for e in fast.logprobs] == pytest.approx(
        [e["logprob"] for e in slow.logprobs], abs=1e-9
    )


@pytest.mark.parametrize("draft", [*KINDS, "any-subset", "xlnet"])
@pytest.mark.parametrize(
    "options", [dict(k=4), dict(k=5, steps=2), dict(k=5, steps=5, keep=False)], ids=str
)
def test_specdiff_writes_what_its_target_writes(draft, options):
    target, small = model("llama", torch.float64), model(draft, torch.float64)
    plain = target.generate(PROMPTS[:4], max_tokens=16, ignore_eos=True)
    fast = target.generate(
        PROMPTS[:4], method="specdiff", draft=small, max_tokens=16, ignore_eos=True, **options
    )
    assert [r.token_ids for r in fast] == [r.token_ids for r in plain]
    assert all(r.stats.draft_forwards > 0 and r.guarantee == "exact" for r in fast)


def test_a_draft_in_order_of_confidence_is_approximate_and_greedy_exact():
    target, small = model("llama", torch.float64), model("masked", torch.float64)
    how = dict(method="specdiff-confidence", draft=small, max_tokens=12, ignore_eos=True)
    fast = target.generate(PROMPTS[:3], **how)
    assert [r.token_ids for r in fast] == [
        r.token_ids for r in target.generate(PROMPTS[:3], max_tokens=12, ignore_eos=True)
    ]
    assert fast[0].guarantee == "approximate"


def test_every_block_takes_its_steps():
    """As LLaDA counts them: of the blanks of each block, the first forwards decide one more."""
    m = model("masked")
    for length, block, steps, forwards in ((16, 8, 3, 6), (20, 16, 4, 8), (12, 5, 9, 12)):
        how = dict(method="steps", block=block, steps=steps, max_tokens=length, ignore_eos=True)
        assert m.generate([1, 2, 3], **how).stats.forwards == forwards
    found = m.generate([1, 2, 3], method="steps", block=8, steps=3, max_tokens=8, ignore_eos=True)
    assert [len(event.tokens) for event in found.trace] == [3, 3, 2]


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(method="stepwise", block=0), "block"),
        (dict(method="stepwise", cache="dul"), "'dual'"),
        (dict(method="stepwise", refresh=0), "refresh"),
        (dict(method="ssd", drafts=9), "drafts"),
        (dict(method="threshold", threshold=2), "threshold"),
        (dict(method="steps", steps=0), "steps"),
        (dict(method="entropy-bounded", bound=-1), "bound"),
        (dict(method="ancestral", steps=0), "steps"),
    ],
    ids=str,
)
def test_options_that_mean_nothing_are_refused(options, said):
    with pytest.raises(BadOption, match=said):
        model("masked").generate([1], max_tokens=2, **options)


def test_models_of_another_family_are_refused():
    with pytest.raises(NotAble, match=r"'ssd' needs a model that looks at a whole canvas.*'ar'"):
        model("llama").generate([1], method="ssd")
    with pytest.raises(NotAble, match=r"'ar' needs a model that scores chains.*'stepwise'"):
        model("masked").generate([1], method="ar")
    with pytest.raises(BadOption, match="draft="):
        model("llama").generate([1], method="specdiff")
    with pytest.raises(NotAble, match=r"fills blanks.*'speculative'"):
        model("llama").generate([1], method="specdiff", draft=model("llama", seed=1))
    with pytest.raises(NotAble, match=r"scores chains.*'specdiff'"):
        model("llama").generate([1], method="speculative", draft=model("masked"))


def test_certify_and_compare_know_what_a_masked_model_cannot_say():
    from forerun.certify.testing import certify
    from forerun.evaluate.compare import ComparisonSettings, Contestant, compare

    m = model("masked", torch.float64)
    found = certify(m, "ssd", temperature=0.0, max_tokens=8, prompts=PROMPTS, cache="dual", block=4)
    assert found.verdict == "holds" and found.reference.startswith("stepwise; identical to")
    with pytest.raises(NotAble, match="enumerate"):
        certify(m, "ssd", temperature=1.0)
    contestants = [Contestant(m, name, {"block": 4}) for name in ("stepwise", "ssd")]
    settings = ComparisonSettings(rounds=1, max_tokens=6, temperature=0.0)
    assert compare(contestants, PROMPTS[:2], settings)[1].equals_reference == 1.0
    settings = ComparisonSettings(rounds=1, max_tokens=6, temperature=1.0)
    assert compare(contestants, PROMPTS[:2], settings)[0].p_value is None


def test_a_checkpoint_says_which_mask_it_has_and_whether_it_is_shifted():
    def of(**settings):
        return Masked.of(SimpleNamespace(forerun=settings))

    assert of(family="block", mask_token=7) is None and Masked.of(SimpleNamespace()) is None
    plain = of(family="masked", mask_token=7)
    assert (plain.mask_token, plain.shifted, plain.impossible_tokens) == (7, False, (7,))
    assert of(family="masked", mask_token=7, shifted=True).shifted
    renamed = of(family="masked", mask_token=7, shifted=True).masked_as(9)
    assert (renamed.mask_token, renamed.shifted) == (9, True)
