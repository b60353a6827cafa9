"""Masked diffusion models: every row sees the whole canvas, and a mask's row says what could stand there.

Several canvases that differ in a few tokens ride in one forward. What a cache policy trusts comes first among the rows and is
shared by all of them; what it computes anew, each canvas has for itself, in slots that only its own rows see. Rows keep the
positions of the text, so their order among themselves does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from forerun.core import BLANK, Canvas, Canvases, Marginal, Placement, Scope
from forerun.families import Family
from forerun.rows import HI, HORIZON, LO, POSITION, TOKEN, Plan


class Masked(Family):
    """A bidirectional decoder with a mask token. In a `shifted` one a row speaks of the position after its own."""

    name = "masked"
    answers = (Marginal, Canvases)
    needs_prompt = False
    default = "stepwise"
    CANVASES = 10  # whole canvases that fit into a lane: a mixed tree of five drafts, the canvas as it is among them

    def __init__(self, mask_token: int, shifted: bool = False):
        self.mask_token, self.shifted, self.never = mask_token, shifted, (mask_token,)

    @classmethod
    def of(cls, config: Any) -> Masked | None:
        marks = getattr(config, "forerun", None) or {}
        return cls(marks["mask_token"], marks.get("shifted", False)) if marks.get("family") == cls.name else None

    def masked_as(self, token: int) -> Masked:
        """The same kind of model with another number for its mask."""
        return Masked(token, self.shifted)

    def slots(self, context: int) -> int:
        return self.CANVASES * context

    def marginals(self, seq: Canvas, positions: Sequence[int]) -> Plan:
        """A draft looks at the canvas up to its last blank: blanks behind it would only be more masks."""
        last = max([*positions, *seq.given[-1:]])
        return self.canvases(seq, [positions], [()], Scope(length=int(last) + 1))

    def canvases(self, seq: Canvas, positions: Sequence[Sequence[int]], placed: Sequence[Placement], scope: Scope) -> Plan:
        length = scope.length or len(seq.canvas)
        trusted, own = self._split(length, scope)
        order = np.concatenate([trusted, own])
        row_at = np.empty(length, np.int64)  # of the first canvas, where each position's row is
        row_at[order] = np.arange(length)
        board = np.where(seq.canvas == BLANK, self.mask_token, seq.canvas)[:length]
        rows = np.zeros((5, length + (len(placed) - 1) * len(own)), np.int32)
        rows[TOKEN, :length], rows[POSITION, :length], rows[HORIZON, :length] = board[order], order, length
        reads = []
        for i, (at, done) in enumerate(zip(positions, placed, strict=True)):
            first = length + (i - 1) * len(own) if i else len(trusted)
            shift = first - len(trusted)
            if i:
                here = slice(first, first + len(own))
                rows[TOKEN, here], rows[POSITION, here], rows[HORIZON, here] = board[own], own, len(trusted)
                rows[LO, here], rows[HI, here] = first, first + len(own)
            for position, token in done:
                rows[TOKEN, row_at[position] + shift] = token
            speaks = np.maximum(np.asarray(at, np.int64) - self.shifted, 0)
            reads.append(row_at[speaks] + shift)
        keep = 0 if scope.fresh or scope.policy == "none" else len(trusted)
        return Plan(rows, reads, stored=length, trusted=keep)

    def _split(self, length: int, scope: Scope) -> tuple[np.ndarray, np.ndarray]:
        """Positions that the policy trusts, and those that every canvas computes for itself. The row that speaks of the block's
        first position belongs to the block."""
        everywhere = np.arange(length)
        first = max(scope.start - self.shifted, 0)
        inside = {
            "none": everywhere >= 0,
            "prefix": everywhere >= first,
            "dual": (everywhere >= first) & (everywhere < scope.end),
        }[scope.policy]
        return everywhere[~inside], everywhere[inside]
