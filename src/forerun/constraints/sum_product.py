"""Marginals of blanks, each on its own, conditioned on the language that all of them must spell.

Given the language, the product of independent laws is a chain of states: messages forward and
backward through the automaton give every blank's law under it, exactly (sum-product). With the
largest in place of the sum, the likeliest tokens are those of the likeliest text (max-product).

L rows, V vocabulary, C classes of tokens, S states (state S is dead).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from forerun.constraints.automaton import TokenAutomaton
from forerun.constraints.canvas import OPEN, Walk


@dataclass(frozen=True)
class Ring:
    """How ways that come together are counted: all of them, or the best."""

    best: bool

    def gather(self, value_N: Tensor, target_N: Tensor, size: int) -> Tensor:
        """Values added up where they belong."""
        zeros = value_N.new_zeros(size)
        if self.best:
            return zeros.scatter_reduce_(0, target_N, value_N, "amax")
        return zeros.index_add_(0, target_N, value_N)

    def over(self, value: Tensor, dim: int) -> Tensor:
        return value.amax(dim) if self.best else value.sum(dim)


def conditioned(
    logits_LV: Tensor, walk: Walk, rows: Mapping[int, int], fixed: Sequence[int], temperature: float
) -> Tensor:
    """Logits whose laws, at this temperature, are those of the rows' blanks given the language.

    `rows` maps a place of the walk to its row of logits. Rows that are `fixed` are laws already:
    they count for the others, and stay as they are. At temperature 0 the best text counts.
    """
    ring = Ring(best=temperature == 0)
    scale = temperature or 1.0
    law_LV = (logits_LV.double() / scale).softmax(-1)
    places = range(min(rows), max(rows) + 1)
    steps = [_Step.at(walk, place, law_LV, rows.get(place), ring) for place in places]
    reached = [_states(walk.reached_PS[places[0]], law_LV)]
    for step in steps[:-1]:
        reached.append(_scaled(step.forward(reached[-1], ring)))
    ending = [_states(walk.ending_PS[places[-1] + 1], law_LV)]
    for step in reversed(steps[1:]):
        ending.append(_scaled(step.backward(ending[-1], ring)))
    out_LV = logits_LV.clone()
    for place, step, before_S, after_S in zip(places, steps, reached, reversed(ending)):
        row = rows.get(place)
        if row is None or row in fixed:
            continue
        weight_V = step.weights(before_S, after_S, ring)[step.class_V]
        if (weight_V * law_LV[row]).any():  # else the other rows leave nothing: they are wrong
            out_LV[row] += (weight_V.log() * scale).to(out_LV.dtype)
    return out_LV


@dataclass(frozen=True)
class _Step:
    """One place of a walk: where each class of tokens leads, and how much of it there is."""

    next_SC: Tensor
    class_V: Tensor
    mass_C: Tensor

    @classmethod
    def at(cls, walk: Walk, place: int, law_LV: Tensor, row: int | None, ring: Ring) -> _Step:
        next_SC, class_V = _tables(walk.stretch.at(place), law_LV.device)
        classes = next_SC.shape[1]
        token = int(walk.token_P[place])
        if row is not None:
            mass_C = ring.gather(law_LV[row], class_V, classes)
        elif token != OPEN:
            mass_C = law_LV.new_zeros(classes)
            mass_C[class_V[token]] = 1
        else:  # nobody says what it might be
            mass_C = law_LV.new_ones(classes)
        return cls(next_SC, class_V, mass_C)

    def forward(self, before_S: Tensor, ring: Ring) -> Tensor:
        flow_SC = before_S[:-1, None] * self.mass_C
        after_S = ring.gather(flow_SC.flatten(), self.next_SC.flatten(), len(before_S))
        after_S[-1] = 0
        return after_S

    def backward(self, after_S: Tensor, ring: Ring) -> Tensor:
        before_S = torch.zeros_like(after_S)
        before_S[:-1] = ring.over(after_S[self.next_SC] * self.mass_C, 1)
        return before_S

    def weights(self, before_S: Tensor, after_S: Tensor, ring: Ring) -> Tensor:
        """How well each class fits between what comes before and what comes after."""
        return ring.over(before_S[:-1, None] * after_S[self.next_SC], 0)


@lru_cache(maxsize=32)
def _tables(automaton: TokenAutomaton, device: torch.device) -> tuple[Tensor, Tensor]:
    """An automaton on a device: where classes lead, and the class of every token."""
    next_SC = torch.from_numpy(automaton.next_SC).long().to(device)
    return next_SC, torch.from_numpy(automaton.class_V).long().to(device)


def _states(flags_S: object, like: Tensor) -> Tensor:
    return torch.as_tensor(flags_S, dtype=like.dtype, device=like.device)


def _scaled(message_S: Tensor) -> Tensor:
    """A message counts up to a factor; as a product over many places it would vanish."""
    largest = message_S.max()
    return torch.where(largest > 0, message_S / largest, message_S)
