"""Every exact method against laws that share no line with the package (`tests/reference.py`)."""

import ast
import subprocess
import sys

import numpy as np
import pytest

from forerun import registry
from forerun.backbones.table import TableBackbone
from forerun.certify.cases import deep_cases, standard_cases
from forerun.certify.enumeration import certify_case
from forerun.errors import BadOption, NotAble
from forerun.families.base import ChainScorer
from forerun.families.block import Block
from forerun.families.causal import Causal
from forerun.families.masked import Masked
from tests import reference
from tests.certify.definitions import EXACT, certify, certify_each, law, packaged_law
from tests.helpers import ROOT, model

TARGET = TableBackbone(vocab=3, seed=1)


def test_the_reference_imports_nothing_but_numpy_and_the_standard_library():
    tree = ast.parse((ROOT / "tests" / "reference.py").read_text())
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            imported.add(node.module)
    assert {name.partition(".")[0] for name in imported} <= {"numpy", *sys.stdlib_module_names}


@pytest.mark.parametrize("method", EXACT)
def test_exact_methods_have_the_law_of_the_definition(method):
    """Drafts of five tokens and more, texts of six and nine, penalties, bias, truncation, minimum
    length, stop tokens and ends, through the whole engine."""
    for certificate in certify_each(deep_cases(method)):
        assert certificate.holds, certificate


@pytest.mark.parametrize("method", EXACT)
def test_the_packages_own_reference_agrees_with_the_definition(method):
    """So `forerun certify` compares with the right law, in every standard case."""
    seen = set()
    for case in standard_cases(method):
        definition = law(*case.args, **case.keywords)
        if id(definition) not in seen:  # cases that differ in drafts only have one law
            seen.add(id(definition))
            theirs = packaged_law(*case.args, **case.keywords)
            assert reference.distance(theirs, definition) < 1e-12, case.keywords


PENALISED = dict(temperature=1.0, presence_penalty=0.8, repetition_penalty=1.5)


@pytest.mark.parametrize("causal", ["prefix", "text"])
@pytest.mark.parametrize("shifted", [False, True])
def test_blocks_whose_beginning_is_read_causally_have_the_law_of_their_definition(causal, shifted):
    options = {"block": 3, "causal": causal}
    certificate = certify(
        "block-stepwise",
        TARGET,
        [0, 1],
        family=Block(2, 4, shifted),
        mask=2,
        method_options=options,
        max_tokens=4,
        **PENALISED,
    )
    assert certificate.holds, certificate


@pytest.mark.parametrize("method", ["stepwise", "ssd"])
def test_masked_models_whose_rows_speak_of_the_next_place_have_the_law_of_theirs(method):
    for prompt in ([0, 1, None, None, None], [None, 0, None, None]):
        certificate = certify(
            method,
            TARGET,
            prompt,
            family=Masked(2, shifted=True),
            mask=2,
            method_options={"block": 2},
            **PENALISED,
        )
        assert certificate.holds, certificate


def asked(output=(), canvas=(), ends=(), **parameters):
    """A request whose prompt is token 3, and what is decided."""
    request = reference.Request(
        (3, *canvas), reference.Parameters(**parameters), frozenset(ends), frozenset()
    )
    return request, dict(enumerate(output, 1))


def logits(*weights):
    return np.log(np.array(weights, dtype=float))


def test_bias_comes_before_the_repetition_penalty_by_hand():
    request, decided = asked([0], logit_bias={0: 3.0}, repetition_penalty=2.0)
    edited = reference.edited(np.array([-1.0, 0.5, -0.5, 4.0]), request, decided, 1)
    assert edited.tolist() == [1.0, 0.5, -0.5, 2.0]  # (-1 + 3) / 2; and token 3 is in the prompt


def test_presence_and_frequency_count_the_output_alone_by_hand():
    request, decided = asked([0, 0, 1], presence_penalty=0.5, frequency_penalty=1.0)
    edited = reference.edited(np.zeros(4), request, decided, 3)
    assert edited.tolist() == [-2.5, -1.5, 0.0, 0.0]


def test_ends_are_impossible_before_the_minimum_length_by_hand():
    request, decided = asked([0], ends=[1], min_tokens=2)
    assert reference.edited(np.zeros(3), request, decided, 1)[1] == -np.inf
    assert reference.edited(np.zeros(3), request, decided, 2)[1] == 0


def test_top_p_keeps_the_token_that_crosses_it_and_min_p_comes_after_by_hand():
    request, _ = asked(temperature=1.0, top_p=0.55)
    law_V = reference.token_law(logits(0.5, 0.35, 0.15), request, {}, 0)
    assert law_V == pytest.approx([0.5 / 0.85, 0.35 / 0.85, 0])
    # With min-p first the likeliest token alone would have reached top-p.
    request, _ = asked(temperature=1.0, top_p=0.55, min_p=0.4)
    law_V = reference.token_law(logits(0.5, 0.35, 0.15), request, {}, 0)
    assert law_V == pytest.approx([0.5 / 0.85, 0.35 / 0.85, 0])


def test_top_k_and_temperature_by_hand():
    request, _ = asked(temperature=2.0, top_k=2)
    law_V = reference.token_law(logits(0.64, 0.16, 0.04), request, {}, 0)
    assert law_V == pytest.approx([2 / 3, 1 / 3, 0])
    request, _ = asked(temperature=0.0, top_k=2)
    law_V = reference.token_law(logits(0.2, 0.5, 0.3), request, {}, 0)
    assert law_V.tolist() == [0, 1, 0]


def test_the_surest_draw_is_decided_by_hand():
    """Blank 0 draws 0 or 1 with confidence 0.6 or 0.4; blank 1 is sure of its 0.5."""
    laws = np.array([[0.5, 0.5], [1.0, 0.0]])
    own = np.array([[0.6, 0.4], [0.5, 0.5]])
    assert reference.decision(laws, own).tolist() == [[0.5, 0.0], [0.5, 0.0]]
    # Of equals the first.
    assert reference.decision(laws, np.full((2, 2), 0.5)).tolist() == [[0.5, 0.5], [0.0, 0.0]]


def test_text_ends_only_with_everything_before_it_decided():
    request, _ = asked(canvas=(None, None, None), ends=[1])
    assert reference.finished_output(request, [1, 2, 3], {2: 1, 3: 0}) is None
    assert reference.finished_output(request, [1, 2, 3], {1: 0, 2: 1}) == (0, 1)
    assert reference.finished_output(request, [1, 2, 3], {1: 0, 2: 2, 3: 2}) == (0, 2, 2)


def test_the_table_of_what_exact_covers_is_what_the_cases_cover():
    command = [sys.executable, "tools/exact.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_backbone_that_is_no_table_is_refused_by_name():
    real = model("llama").backbone
    with pytest.raises(BadOption, match=r"target=.* must be a TableBackbone.*testing.certify"):
        certify_case("ar", real, [0], max_tokens=2)
    with pytest.raises(BadOption, match=r"draft=.* must be a TableBackbone"):
        certify_case("speculative", TARGET, [0], draft=real, max_tokens=2)


class EverythingScorer(ChainScorer):
    does = "says everything"


class OutsideFamily(Causal):
    name = "outside"
    handle = EverythingScorer


@registry.method("outside", guarantee="exact", reference="ar")
async def outside(seq, target: EverythingScorer, options: registry.NoOptions) -> None:
    await registry.method_named("ar").run(seq, target, options)


def test_a_method_with_a_question_of_its_own_is_told_to_bring_its_family(monkeypatch):
    monkeypatch.setitem(registry.BUILT_IN["methods"], "outside", f"{__name__}:outside")
    with pytest.raises(NotAble, match=r"says everything.*call certify_case with family="):
        certify_case("outside", TARGET, [0], max_tokens=2)
    with pytest.raises(NotAble, match=r"says everything.*family="):
        standard_cases("outside")
    how = dict(family=OutsideFamily(), max_tokens=3, temperature=1.0)
    assert certify_case("outside", TARGET, [0], **how).holds


def test_a_law_of_ones_own_can_be_compared_with():
    right = law("ar", TARGET, [0], max_tokens=2, temperature=1.0)
    wrong = law("ar", TARGET, [0], max_tokens=2, temperature=1.1)
    how = dict(max_tokens=2, temperature=1.0)
    assert certify_case("ar", TARGET, [0], reference=right, **how).holds
    assert not certify_case("ar", TARGET, [0], reference=wrong, **how).holds


def test_a_guarantee_that_nothing_gives_is_refused():
    with pytest.raises(BadOption, match="'exact' or 'approximate'"):
        registry.method("x", guarantee="greedy-exact", reference="ar")
