"""Planted mistakes in constrained decoding, each of which certification must notice."""

import numpy as np
import pytest
import torch

from forerun.certify.cases import constrained_cases
from forerun.constraints.left_to_right import LeftToRight, Writable
from forerun.constraints.matching import MatcherLanguage
from forerun.drafters import autoregressive
from forerun.drafters.base import Draft
from forerun.engine.engine import NoOutcome
from forerun.methods import speculative
from forerun.probability import logits
from forerun.sequence.canvas import Canvas
from tests.certify.definitions import certify_each

pytest.importorskip("llguidance")


def is_caught(method):
    """Does some case notice: by another law, or because nothing can be written?"""
    try:
        return not all(certificate.holds for certificate in certify_each(constrained_cases(method)))
    except (NoOutcome, AssertionError):
        return True


def shifted_masks(shift):
    """Masks of other rows than their own."""
    original = LeftToRight.masks

    def masks(self, chain, places, prefixes, positions):
        rows = original(self, chain, places, prefixes, positions)
        order = np.clip(np.arange(len(rows)) + shift, 0, len(rows) - 1)
        return rows[order]

    return masks


@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize("method", ["speculative", "jacobi", "multiblock"])
def test_the_mask_of_the_wrong_row_is_caught(monkeypatch, method, shift):
    monkeypatch.setattr(LeftToRight, "masks", shifted_masks(shift))
    assert is_caught(method)


def test_a_mask_that_ignores_the_chain_is_caught(monkeypatch):
    def states(self, chain, longest):
        return [] if self._state is None else [self._state] * (longest + 1)

    monkeypatch.setattr(LeftToRight, "_states", states)
    assert is_caught("jacobi")


@pytest.mark.parametrize("method", ["lookup", "lookahead", "speculative"])
def test_no_rollback_after_a_rejection_is_caught(monkeypatch, method):
    original = MatcherLanguage.move_to

    def move_to(self, state):
        rollback = self.matcher.rollback
        self.matcher.rollback = lambda count: None
        original(self, state)
        self.matcher.rollback = rollback

    monkeypatch.setattr(MatcherLanguage, "move_to", move_to)
    assert is_caught(method)


def test_drafts_drawn_under_the_mask_and_judged_without_it_are_caught(monkeypatch):
    class Mutant(autoregressive.ModelDrafter):
        async def propose(self, seq, k):
            draft = await autoregressive.ModelDrafter.propose(self, seq, k)
            if draft.q is None:
                return draft
            free = torch.full_like(draft.q, 1 / draft.q.shape[-1])  # as if nothing were masked
            return Draft(draft.positions, draft.tokens, (draft.q + free) / 2)

    monkeypatch.setattr("forerun.requests.request.drafter_class_of", lambda *_: Mutant)
    assert is_caught("speculative")


@pytest.mark.parametrize("method", ["ar", "jacobi"])
def test_a_forced_token_that_penalties_do_not_count_is_caught(monkeypatch, method):
    def goes_on(self):
        constraint = self.history.constraint
        while not self.done and (token := constraint.forced()) is not None:
            self.fill(self.next(1), [token], "forced")
            if self.history.sampling.penalised:
                self.history.in_output_V[token] -= 1
        return not self.done

    monkeypatch.setattr(Canvas, "goes_on", goes_on)
    assert is_caught(method)


def test_a_drawn_draft_that_is_cut_before_the_token_that_is_not_allowed_is_caught(monkeypatch):
    """The token after it would be drawn from the whole law, though part of it was refused."""

    def cut(seq, draft):
        count = seq.history.constraint.usable(draft.tokens)
        q = None if draft.q is None else draft.q[:count]
        return Draft(draft.positions[:count], draft.tokens[:count], q)

    monkeypatch.setattr(speculative, "without_waste", cut)
    assert is_caught("specdiff")


def test_an_end_where_the_text_is_no_word_is_caught(monkeypatch):
    original = Writable.known

    def known(self, masks_NW, accepts):
        found = original(self, masks_NW, [True] * len(accepts))
        return [each._replace(accepts=own) for each, own in zip(found, accepts)]

    monkeypatch.setattr(Writable, "known", known)
    assert is_caught("ar")


def test_the_mask_of_another_text_of_the_batch_is_caught(monkeypatch):
    original = logits.masks_found_together

    def another(asked):
        found = original(asked)
        return None if found is None else np.roll(found, 1, 0)

    monkeypatch.setattr(logits, "masks_found_together", another)
    assert is_caught("ar")


def test_a_constraint_that_hears_of_no_decision_is_caught(monkeypatch):
    def add(self, position, token):
        self.next += 1

    monkeypatch.setattr(LeftToRight, "add", add)
    assert is_caught("ar")


@pytest.mark.parametrize("method", ["ar", "jacobi", "speculative", "specdiff", "lookahead"])
def test_without_a_mistake_nothing_is_caught(method):
    assert not is_caught(method)
