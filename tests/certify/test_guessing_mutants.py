"""Planted mistakes in guessing and recycling, each of which the certification must catch."""

from dataclasses import replace

import pytest
import torch

import forerun.drafters.recycled as recycled
import forerun.families.causal as causal_file
import forerun.methods.jacobi as jacobi_file
import forerun.methods.multiblock as multiblock_file
import forerun.probability.acceptance
from forerun.backbones.table import TableBackbone
from forerun.certify.enumeration import certify_case
from forerun.engine.engine import NoOutcome
from forerun.families.causal import Causal
from forerun.probability.acceptance import descend_tree, jacobi_step, matching
from forerun.probability.outcomes import Verdict
from forerun.sequence.rows import HI, HORIZON, LO, Plan
from tests.helpers import caught

TARGET = TableBackbone(vocab=3, seed=1)
RECYCLING = {"block": 3, "blocks": 2, "spawn": 0.0, "candidates": 3}


RUNS = [(2, 0, 1), (0, 2, 2), (0, 0), (1, 1)]


@pytest.fixture(autouse=True)
def something_to_recycle(monkeypatch):
    """In so short texts little is recycled: let there always be something."""
    monkeypatch.setattr(recycled.RunPool, "after", lambda pool, token: RUNS)


def certificate(method="multiblock"):
    own = {
        "multiblock": RECYCLING,
        "jacobi": {"block": 2},
        "lookahead": {"window": 2, "ngram": 3, "guesses": 3},
    }[method]
    return certify_case(
        method, TARGET, [0, 1, 0], eos=(1,), method_options=own, max_tokens=4, temperature=1.0
    )


def refused():
    """By the certificate, or already by the engine, which draws from no law without mass."""
    try:
        return caught(certificate())
    except NoOutcome:
        return True


def test_without_a_mutant_the_checks_pass():
    assert certificate().holds and certificate("jacobi").holds and certificate("lookahead").holds


def test_a_token_that_may_be_one_of_the_tree_again_is_caught(monkeypatch):
    monkeypatch.setattr(forerun.probability.acceptance, "residual", lambda p, q: p)
    assert caught(certificate()) and caught(certificate("lookahead"))


def test_a_second_draw_behind_what_was_foreseen_is_caught(monkeypatch):
    def wrong(x, p, sample):
        n = matching(x, p, sample).accepted
        return Verdict(n, sample(p[torch.arange(len(n)), n]))

    monkeypatch.setattr(forerun.probability.acceptance, "matching", wrong)
    assert caught(certificate("jacobi"))


def test_leaving_the_tree_as_if_nothing_led_on_is_caught(monkeypatch):
    def wrong(x, parent, p, sample):
        return descend_tree(x, torch.zeros_like(parent), p, sample)

    monkeypatch.setattr(causal_file, "descend_tree", wrong)
    assert caught(certificate())


def test_brothers_that_are_alike_are_caught(monkeypatch):
    """Two tails that begin with the same token count its probability twice."""

    def doubled(chain, runs, count, longest):
        found = tails_of(chain, runs, count, longest)
        return [*found, *found]

    tails_of = recycled.tails_of
    monkeypatch.setattr(multiblock_file, "tails_of", doubled)
    assert caught(certificate())


def spoil_tails(monkeypatch, change):
    """Let `change(rows of the tails, where they begin)` alter every plan that has tails; what it
    returns is remembered besides."""
    original = Causal.branches

    def wrong(family, seq, chain, tails):
        plan = original(family, seq, chain, tails)
        rows, n = plan.rows.copy(), len(seq.text) + len(chain)
        return Plan(rows, plan.reads, plan.stored + (change(rows[:, n:], n) or 0))

    monkeypatch.setattr(Causal, "branches", wrong)


def test_a_tail_that_sees_the_whole_chain_is_caught(monkeypatch):
    def wrong(rows, n):
        rows[HORIZON] = n

    spoil_tails(monkeypatch, wrong)
    assert caught(certificate())


def test_a_tail_that_does_not_see_itself_is_caught(monkeypatch):
    def wrong(rows, n):
        rows[LO] = rows[HI]

    spoil_tails(monkeypatch, wrong)
    assert caught(certificate()) and caught(certificate("lookahead"))


def test_tails_that_are_remembered_as_text_are_caught(monkeypatch):
    def wrong(rows, n):
        rows[HORIZON], rows[LO], rows[HI] = range(n + 1, n + 1 + rows.shape[1]), 0, 0
        return rows.shape[1]

    spoil_tails(monkeypatch, wrong)
    assert caught(certificate())


@pytest.mark.parametrize("shift", [1, -1])
def test_laws_of_other_nodes_are_caught(monkeypatch, shift):
    monkeypatch.setattr(
        causal_file,
        "descend_tree",
        lambda x, up, p, sample: descend_tree(x, up, p.roll(shift, 1), sample),
    )
    assert refused()


def test_a_guess_that_is_drawn_is_caught(monkeypatch):
    """A guess may look at nothing that is drawn with what judges it: here a token that was drawn is
    guessed and taken unseen."""

    def wrong(x, p, sample):
        step = jacobi_step(x, p, sample)
        return replace(step, accepted=torch.full_like(step.accepted, x.shape[1]))

    monkeypatch.setattr(jacobi_file, "jacobi_step", wrong)
    assert caught(certificate("jacobi"))
