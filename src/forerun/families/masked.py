"""Masked diffusion models: every row sees the whole canvas, and a mask's row says what could stand
there.

Several canvases that differ in a few tokens ride in one forward. The rows that a cache policy
trusts come first, and all canvases share them. The other rows each canvas has for itself, in slots
that only its own rows see. Rows keep the positions of the text, so their order does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun.families.base import BlankFiller, Family, family_settings
from forerun.probability.outcomes import Placement
from forerun.sequence.canvas import BLANK, Canvas
from forerun.sequence.question import BlankLaws
from forerun.sequence.rows import HI, HORIZON, LO, POSITION, TOKEN, Plan


@dataclass(frozen=True)
class CacheScope:
    """Which rows of a canvas are computed anew, and which are taken from slots as they were: a
    cache policy at one moment.

    `none` computes everything. `prefix` trusts what lies before the block, `dual` all that lies
    outside it, unless `fresh`.
    """

    policy: str = "none"
    start: int = 0
    end: int = 0
    fresh: bool = True
    length: int | None = None  # the canvas ends here for this question


WHOLE_CANVAS = CacheScope()


class CanvasFiller(BlankFiller):
    """A model that looks at a whole canvas at once: masked diffusion."""

    does = "looks at a whole canvas at once"
    family: Masked

    async def canvases(
        self,
        seq: Canvas,
        positions: Sequence[Sequence[int]],
        placements: Sequence[Placement],
        scope: CacheScope = WHOLE_CANVAS,
    ) -> list[BlankLaws]:
        """For each canvas (the sequence with some blanks filled as its placement says) the laws of
        the blanks at its `positions`. All in one forward."""
        plan = self.family.canvases(seq, positions, placements, scope)
        return await self.ask_canvases(seq, plan, positions, placements)


class Masked(Family):
    """A bidirectional decoder with a mask token. In a `shifted` one a row speaks of the position
    after its own."""

    name = "masked"
    handle = CanvasFiller
    default_method = "stepwise"
    default_reason = (
        "models of masked diffusion have no law of their own to be exact to, and methods that go "
        "faster change the text; stepwise is what the others are compared with"
    )
    needs_prompt = False
    CANVASES = 10  # that fit into a lane: a mixed tree of five drafts, and the canvas as it is

    def __init__(self, mask_token: int, shifted: bool = False):
        self.mask_token: int = mask_token
        self.shifted = shifted
        self.impossible_tokens = (mask_token,)

    @classmethod
    def of(cls, config: Any) -> Masked | None:
        settings = family_settings(config)
        if settings.get("family") != cls.name:
            return None
        return cls(settings["mask_token"], settings.get("shifted", False))

    def masked_as(self, token: int) -> Masked:
        return Masked(token, self.shifted)

    def slots(self, context: int) -> int:
        return self.CANVASES * context

    def marginals(self, seq: Canvas, positions: Sequence[int]) -> Plan:
        """A draft looks at the canvas up to its last blank: blanks behind it would only be more
        masks."""
        last = max([*positions, *seq.given[-1:]])
        return self.canvases(seq, [positions], [()], CacheScope(length=int(last) + 1))

    def canvases(
        self,
        seq: Canvas,
        positions: Sequence[Sequence[int]],
        placements: Sequence[Placement],
        scope: CacheScope,
    ) -> Plan:
        length = scope.length or len(seq.tokens)
        trusted, computed = self._split(length, scope)
        order = np.concatenate([trusted, computed])
        row_at = np.empty(length, np.int64)  # where each position's row is, in the first canvas
        row_at[order] = np.arange(length)
        board = np.where(seq.tokens == BLANK, self.mask_token, seq.tokens)[:length]
        rows = np.zeros((5, length + (len(placements) - 1) * len(computed)), np.int32)
        rows[TOKEN, :length] = board[order]
        rows[POSITION, :length] = order
        rows[HORIZON, :length] = length
        keep = 0 if scope.fresh or scope.policy == "none" else len(trusted)
        reads = []
        for i, (where, placement) in enumerate(zip(positions, placements, strict=True)):
            first = length + (i - 1) * len(computed) if i else len(trusted)
            if i:
                self._copy(rows, first, board, computed, len(trusted))
            shift = first - len(trusted)
            for position, token in placement:
                rows[TOKEN, row_at[position] + shift] = token
            speaking = np.maximum(np.asarray(where, np.int64) - self.shifted, 0)
            read = row_at[speaking] + shift
            unrun = row_at[speaking] < (len(trusted) if i else keep)
            if unrun.any():
                read[unrun] = np.arange(rows.shape[1], rows.shape[1] + unrun.sum())
                rows = self._look_beyond(rows, read[~unrun], board, speaking[unrun])
            reads.append(read)
        relied_on = scope.policy != "none"
        return Plan(rows, reads, stored=length, trusted=keep, relied_on=relied_on)

    @staticmethod
    def _look_beyond(
        rows: np.ndarray, inside: np.ndarray, board: np.ndarray, positions: np.ndarray
    ) -> np.ndarray:
        """Rows more for positions that the policy does not compute. They see what the rows of their
        canvas see, and no row sees them."""
        more = np.zeros((5, len(positions)), np.int32)
        more[TOKEN] = board[positions]
        more[POSITION] = positions
        more[HORIZON:] = rows[HORIZON:, inside[:1]]
        return np.concatenate([rows, more], 1)

    @staticmethod
    def _copy(
        rows: np.ndarray, first: int, board: np.ndarray, positions: np.ndarray, trusted: int
    ) -> None:
        """Write another canvas's rows, in slots from `first` on. They see the trusted rows and each
        other."""
        end = first + len(positions)
        rows[TOKEN, first:end] = board[positions]
        rows[POSITION, first:end] = positions
        rows[HORIZON, first:end] = trusted
        rows[LO, first:end] = first
        rows[HI, first:end] = end

    def _split(self, length: int, scope: CacheScope) -> tuple[np.ndarray, np.ndarray]:
        """Positions that the policy trusts, and those that every canvas computes for itself. The
        row that speaks of the block's first position belongs to the block."""
        everywhere = np.arange(length)
        first = max(scope.start - self.shifted, 0)
        inside = {
            "none": everywhere >= 0,
            "prefix": everywhere >= first,
            "dual": (everywhere >= first) & (everywhere < scope.end),
        }[scope.policy]
        return everywhere[~inside], everywhere[inside]
