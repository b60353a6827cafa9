"""Constrained decoding of canvases has the law of its reference under the same constraint: by
enumeration, against a definition that tries every way to fill a hole. Mistakes are planted."""

import itertools
import re
from functools import cache

import pytest

from forerun.backbones.table import TableBackbone
from forerun.certify.cases import canvas_cases
from forerun.certify.enumeration import certify_case, method_law
from forerun.constraints.canvas import OnCanvas, Walk
from forerun.engine.engine import NoOutcome
from forerun.families.block import Block
from forerun.probability.logits import MaskedLogits
from forerun.sequence.canvas import Canvas
from tests import reference
from tests.helpers import caught

pytest.importorskip("outlines_core")

SPELLED = (b"a", b"b", b"ab", b"?")  # the last one is the mask
MASK = 3
END = 2  # where texts may end
TARGET = TableBackbone(vocab=4, seed=1)
TABLE = reference.Table(4, 1)

# What hangs together across blanks, is forced, or has no text of some lengths.
EQUAL = "aa|bb|aba|bab"
LATE = "(a|b)*abb"
PAIRS = "(ab)+"
TAILS = "a?b{1,3}"


@cache
def words_of(regex, tokens):
    spelled = tuple(text.decode() for text in SPELLED)
    texts = ("".join(t) for n in range(2 * tokens + 1) for t in itertools.product("ab", repeat=n))
    return reference.Words(spelled, frozenset(t for t in texts if re.fullmatch(regex, t)))


def runs(prompt):
    """The holes of a prompt: runs of blanks."""
    found = []
    for blank, run in itertools.groupby(enumerate(prompt), lambda one: one[1] is None):
        if blank:
            found.append(tuple(i for i, _ in run))
    return found


def asked_of(prompt, regexes, sampling, eos=()):
    parameters = reference.Parameters(**sampling)
    request = reference.request(prompt, parameters, eos, MASK)
    if None in prompt:
        pairs = zip(runs(prompt), regexes, strict=True)
        holes = [reference.Hole(blanks, words_of(r, len(blanks))) for blanks, r in pairs if r]
    else:
        blanks = tuple(request.blanks)
        words = words_of(regexes[0], len(blanks))
        least = parameters.min_tokens
        holes = [reference.Hole(blanks, words, request.ends, least)]
    return reference.Request(**{**vars(request), "holes": tuple(holes)})


@cache
def law_of(kind, prompt, regexes, sampling, eos, options):
    asked = asked_of(prompt, regexes, dict(sampling), eos)
    options = dict(options)
    if kind == "any-subset":
        return reference.left_to_right(TABLE, reference.reads_any_subset(MASK), asked)
    block = options.get("block") or 8
    if kind == "masked":
        order = reference.blocks_of_blanks(asked.blanks, block)
        return reference.stepwise(TABLE, reference.reads_whole(MASK), asked, order)
    reading = reference.reads_in_blocks(MASK, options.get("block") or 4)
    return reference.stepwise(TABLE, reading, asked, reference.blocks_of_text(4))


def certify(method, kind, prompt, regexes, sampling, eos=(), **options):
    order = {key: value for key, value in options.items() if key == "block"}
    law = law_of(
        kind, tuple(prompt), tuple(regexes), tuple(sampling.items()), eos, tuple(order.items())
    )
    return certify_case(
        method,
        TARGET,
        prompt,
        mask=MASK,
        eos=eos,
        spelled=SPELLED,
        reference=law,
        method_options=options,
        **asks(prompt, regexes),
        **sampling,
    )


def asks(prompt, regexes):
    if None not in prompt:
        return {"regex": regexes[0]}
    return {"holes": [None if regex is None else {"regex": regex} for regex in regexes]}


WARM = {"temperature": 1.0}
HOLES = [
    ([None, None, None, 0], [LATE]),
    ([1, None, None], [EQUAL]),
    ([None, None, 1, None, None], [TAILS, PAIRS]),  # two holes, each its own
    ([None, None, 0, None], [EQUAL, None]),  # one of them is free
]
SAMPLINGS = [
    WARM,
    {"temperature": 0.0},
    {"temperature": 1.5, "top_p": 0.7},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "repetition_penalty": 1.8, "frequency_penalty": 0.7},
    {"temperature": 0.7, "allowed_tokens": (0, 1)},
]


def holes_and_samplings(most=9):
    """Of holes with at most so many blanks together: all outcomes are tried."""
    for prompt, regexes in HOLES:
        if prompt.count(None) <= most:
            yield prompt, regexes, WARM
    for sampling in SAMPLINGS[1:]:
        yield *HOLES[1], sampling
    if most > 3:
        yield *HOLES[0], SAMPLINGS[4]


ANY_SUBSET = [
    ("sequential", {}),
    ("assd", {"k": 1, "ahead": "none"}),
    ("assd", {"k": 3, "ahead": "whole"}),
    ("assd", {"k": 3, "ahead": "every"}),
]
MASKED = [
    ("stepwise", {"block": 2}),
    ("ssd", {"block": 9, "drafts": 3}),
    ("ssd", {"block": 1, "drafts": 2, "tree": "chain"}),
]


@pytest.mark.parametrize(("method", "options"), ANY_SUBSET, ids=str)
def test_any_subset_methods_have_the_constrained_law(method, options):
    for prompt, regexes, sampling in holes_and_samplings():
        certificate = certify(method, "any-subset", prompt, regexes, sampling, **options)
        assert certificate.holds, certificate


def test_a_drafter_that_knows_of_no_constraint_changes_nothing():
    law = law_of(
        "any-subset", tuple(HOLES[0][0]), tuple(HOLES[0][1]), (("temperature", 1.0),), (), ()
    )
    certificate = certify_case(
        "assd", TARGET, HOLES[0][0], mask=MASK, spelled=SPELLED, draft="ngram", reference=law,
        temperature=1.0, holes=[{"regex": LATE}],
    )  # fmt: skip
    assert certificate.holds, certificate


@pytest.mark.parametrize(("method", "options"), MASKED, ids=str)
def test_masked_methods_have_the_constrained_law(method, options):
    most = 4 if options["block"] < 9 else 3
    for prompt, regexes, sampling in holes_and_samplings(most):
        certificate = certify(method, "masked", prompt, regexes, sampling, **options)
        assert certificate.holds, certificate


GENERATED = [
    ({"temperature": 1.0, "max_tokens": 3}, (END,), "a*b*"),
    ({"temperature": 1.0, "max_tokens": 3, "min_tokens": 2}, (END,), "(ab)*"),
    ({"temperature": 0.0, "max_tokens": 4}, (END,), LATE),
    ({"temperature": 1.0, "max_tokens": 3}, (), LATE),  # nothing ends it: all places are filled
]


@pytest.mark.parametrize(
    ("method", "kind", "options"),
    [
        ("stepwise", "masked", {"block": 2}),
        ("ssd", "masked", {"drafts": 3}),
        ("block-stepwise", "block", {}),
        ("block-ssd", "block", {"drafts": 3}),
    ],
    ids=str,
)
def test_texts_that_end_have_the_constrained_law(method, kind, options):
    for sampling, eos, regex in GENERATED:
        certificate = certify(method, kind, [1, 0, 1], [regex], sampling, eos, **options)
        assert certificate.holds, certificate


ROUGH = [
    ("ancestral", {"steps": 1}),
    ("ancestral", {"steps": 2}),
    ("steps", {"steps": 1}),
    ("threshold", {"threshold": 0.0}),
    ("entropy-bounded", {"bound": 9.0}),
    ("assd-tolerant", {"tolerance": 0.3}),
]


@pytest.mark.parametrize(("method", "options"), ROUGH, ids=str)
def test_blanks_that_are_decided_at_once_never_come_to_a_dead_end(method, options):
    """All mass is on texts of the languages, and the method is approximate as before."""
    for prompt, regexes in HOLES[:2]:
        law = method_law(
            method, TARGET, prompt, mask=MASK, spelled=SPELLED, **WARM, **options,
            **asks(prompt, regexes),
        )  # fmt: skip
        asked = asked_of(prompt, regexes, WARM)
        # In `ancestral` the padding of a batch counts as a draw of its own.
        assert method == "ancestral" or abs(sum(law.values()) - 1) < 1e-9
        for tokens in law:
            output = dict(zip(asked.blanks, tokens, strict=True))
            for hole in asked.holes:
                assert hole.holds([output[i] for i in hole.blanks]), (tokens, hole)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("block", {"threshold": 0.0}),
        ("block", {"schedule": "static", "steps": 1}),
        ("s2d2", {"span": 1, "threshold": 0.0}),
        ("s2d2", {"span": 9, "threshold": 0.0}),
        ("s2d2-canvases", {"span": 2, "threshold": 0.0, "drafts": 1}),
    ],
    ids=str,
)
def test_blocks_that_are_decided_at_once_never_come_to_a_dead_end(method, options):
    for sampling, eos, regex in GENERATED[1:3]:
        law = method_law(
            method, TARGET, [0, 1], mask=MASK, eos=eos, spelled=SPELLED, regex=regex,
            family=Block(MASK, 4), **sampling, **options,
        )  # fmt: skip
        [hole] = asked_of([0, 1], [regex], sampling, eos).holes
        assert abs(sum(law.values()) - 1) < 1e-9
        for tokens in law:
            filled = [*tokens, *[0] * (len(hole.blanks) - len(tokens))]
            assert hole.holds(filled), tokens


# Planted mistakes.


def certified(method="stepwise", kind="masked", **options):
    return certify(method, kind, *HOLES[0], WARM, **options)


def test_certification_notices_a_mask_of_the_wrong_place(monkeypatch):
    right = OnCanvas.masks

    def of_the_next_place(self, chain, places, prefixes, positions):
        masks = right(self, chain, places, prefixes, positions)
        return masks[[*range(1, len(masks)), 0]] if len(masks) > 1 else masks

    monkeypatch.setattr(OnCanvas, "masks", of_the_next_place)
    monkeypatch.setattr(OnCanvas, "_with_token", forgiving(OnCanvas._with_token))
    assert caught(certified())


def forgiving(right):
    """A wrong decision goes on unseen, as it would without our own assertion."""

    def with_token(self, walks, position, token):
        return right(self, walks, position, token) or walks

    return with_token


def test_certification_notices_that_nobody_looks_back_from_the_end(monkeypatch):
    """Every state counts as one that leads to the end: the text goes on into dead ends."""

    def hopeful(self, place):
        after = self.ending_PS[place].copy()
        after[:-1] = True
        return after

    monkeypatch.setattr(Walk, "_backward", hopeful)
    monkeypatch.setattr(OnCanvas, "_with_token", forgiving(OnCanvas._with_token))
    with pytest.raises((NoOutcome, ValueError)):  # a law without mass
        certified("sequential", "any-subset")


def test_certification_notices_a_decision_that_is_not_passed_on(monkeypatch):
    monkeypatch.setattr(OnCanvas, "add", lambda self, position, token: None)
    assert caught(certified())


def test_certification_notices_a_placed_draft_that_is_not_passed_on(monkeypatch):
    right = OnCanvas.masks

    def of_the_text_alone(self, chain, places, prefixes, positions):
        return right(self, (), (), [0] * len(prefixes), positions)

    monkeypatch.setattr(OnCanvas, "masks", of_the_text_alone)
    monkeypatch.setattr(OnCanvas, "_with_token", forgiving(OnCanvas._with_token))
    assert caught(certified("ssd", drafts=3))


def test_certification_notices_a_draft_under_a_mask_and_a_verdict_without(monkeypatch):
    right = OnCanvas.masks

    def of_drafts_alone(self, chain, places, prefixes, positions):
        masks = right(self, chain, places, prefixes, positions)
        is_verdict = len(prefixes) > 1 and len(set(prefixes)) == len(prefixes)
        if is_verdict:
            masks[:] = -1
        return masks

    monkeypatch.setattr(OnCanvas, "masks", of_drafts_alone)
    monkeypatch.setattr(OnCanvas, "_with_token", forgiving(OnCanvas._with_token))
    assert caught(certified("assd", "any-subset", k=3))


def test_certification_notices_decisions_at_once_that_nobody_checked(monkeypatch):
    monkeypatch.setattr(Canvas, "compatible", lambda self, placement: placement)
    with pytest.raises(AssertionError, match="no completion"):
        method_law(
            "threshold", TARGET, [1, None, None], mask=MASK, spelled=SPELLED, threshold=0.0,
            holes=[{"regex": EQUAL}], **WARM,
        )  # fmt: skip


def test_certification_notices_confidence_that_ignores_the_constraint(monkeypatch):
    """Then other blanks are decided first."""

    def without_masks(logits, chains, edited):
        return MaskedLogits(logits)

    monkeypatch.setattr("forerun.engine.engine.own_logits", without_masks)
    certificate = certify("stepwise", "masked", *HOLES[0], {"temperature": 2.0}, block=9)
    assert caught(certificate)


@pytest.mark.parametrize("method", ["sequential", "stepwise", "block-stepwise"])
def test_the_command_line_certifies_canvases_too(method):
    cases = canvas_cases(method)
    assert len(cases) >= 3
    for case in cases[::3]:
        certificate = case()
        assert certificate.holds, certificate


def test_the_packages_own_reference_catches_a_mask_of_another_place(monkeypatch):
    real = Walk.allowed
    monkeypatch.setattr(
        Walk, "allowed", lambda self, position: real(self, max(position - 1, self.stretch.start))
    )
    assert any(_is_caught(case) for case in canvas_cases("sequential"))


def _is_caught(case):
    try:
        return caught(case())
    except (AssertionError, NoOutcome):  # a token that leaves no completion
        return True
