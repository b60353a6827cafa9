"""Constrained decoding has the law of plain decoding under the same constraint: by enumeration,
against a definition that shares no line with the package."""

import pytest

from forerun import registry
from forerun.certify.cases import constrained_cases
from tests import reference
from tests.certify.definitions import EXACT, certify_each, law, packaged_law

pytest.importorskip("llguidance")

ORDERED = [name for name in EXACT if registry.method_named(name).left_to_right]


def test_all_methods_that_go_from_left_to_right_are_here():
    assert set(ORDERED) == {
        "ar",
        "auto",
        "speculative",
        "lookup",
        "predicted",
        "sequential",
        "assd",
        "specdiff",
        "jacobi",
        "multiblock",
        "lookahead",
        "s2d2-exact",
    }


@pytest.mark.parametrize("method", ORDERED)
def test_methods_have_the_law_of_the_definition(method):
    for certificate in certify_each(constrained_cases(method)):
        assert certificate.holds, certificate


@pytest.mark.parametrize("method", ["ar", "lookup", "speculative", "lookahead"])
def test_so_they_have_with_the_other_engine(method):
    pytest.importorskip("xgrammar")
    for certificate in certify_each(constrained_cases(method, grammar_engine="xgrammar")):
        assert certificate.holds, certificate


@pytest.mark.parametrize("method", ORDERED)
def test_the_packages_own_reference_agrees_with_the_definition(method):
    for case in constrained_cases(method):
        theirs = packaged_law(*case.args, **case.keywords)
        assert reference.distance(theirs, law(*case.args, **case.keywords)) < 1e-12, case
