"""Block diffusion models: text in blocks, each of which sees itself whole and all before it; a mask's row says what could stand
there.

Blocks are counted from the first token of the canvas, whatever was given. In blocks of one token the same network goes from left
to right: decided tokens are then plain causal rows, and a chain is scored by a mask at the place of its every token that sees
what comes before it and itself (equation 3 of Han et al., 2026, the rows of it that are read). Nobody sees such a query, so any
number of them ride in one forward. In a `shifted` model a row speaks of the token after its own: there a chain's own rows score
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from forerun.core import BLANK, BlockWise, Canvas, Conditional, Frame, Marginal, Placement
from forerun.errors import NotAble
from forerun.families import Family
from forerun.rows import HI, HORIZON, LO, POSITION, TOKEN, Plan, causal_rows


class Block(Family):
    """A decoder with a mask token, trained in blocks of up to `block` tokens."""

    name = "block"
    answers = (Conditional, Marginal, BlockWise)
    default = "s2d2"
    CANVASES = 10  # copies of a block that fit into a lane: a mixed tree of five drafts
    QUERIES = 320  # rows, besides one per token of a chain, that an outlook may take

    def __init__(self, mask_token: int, block: int, shifted: bool = False):
        self.mask_token, self.block, self.shifted, self.never = mask_token, block, shifted, (mask_token,)
        self.needs_prompt = shifted  # no row speaks of the very first token

    @classmethod
    def of(cls, config: Any) -> Block | None:
        marks = getattr(config, "forerun", None) or {}
        return cls(marks["mask_token"], marks["block"], marks.get("shifted", False)) if marks.get("family") == cls.name else None

    def masked_as(self, token: int) -> Block:
        """The same kind of model with another number for its mask."""
        return Block(token, self.block, self.shifted)

    def slots(self, context: int) -> int:
        return 2 * context + max(self.CANVASES * self.block, self.QUERIES)

    def blocks(self, seq: Canvas, positions: Sequence[Sequence[int]], placed: Sequence[Placement], frame: Frame) -> Plan:
        """What is read one way by all canvases comes first; then each canvas has the rest of the block for itself."""
        blank = np.flatnonzero(seq.canvas[frame.start : frame.end] == BLANK)
        own = frame.start if frame.causal == "nothing" or not len(blank) else frame.start + int(blank[0])
        speaks = [np.asarray(at, np.int64) - self.shifted for at in positions]
        end = own if all((at < own).all() for at in speaks) else frame.end  # a shifted block's first token needs nothing of it
        size = end - own
        board = np.where(seq.canvas[:end] == BLANK, self.mask_token, seq.canvas[:end])
        rows = np.zeros((5, own + len(placed) * size), np.int32)
        rows[:, :own] = self._text(board[:own], frame)
        reads = []
        for i, (at, done) in enumerate(zip(speaks, placed, strict=True)):
            first = own + i * size
            here = slice(first, first + size)
            rows[TOKEN, here], rows[POSITION, here] = board[own:], np.arange(own, end)
            rows[HORIZON, here], rows[LO, here], rows[HI, here] = own, first, first + size
            if i == 0:  # in place, so that it is a block of the text like any other, and may be kept
                rows[HORIZON, here], rows[LO, here], rows[HI, here] = end, 0, 0
            for position, token in done:
                rows[TOKEN, position - own + first] = token
            reads.append(np.where(at < own, at, at - own + first))
        return Plan(rows, reads, stored=end)

    def verdict(self, seq: Canvas, chain: Sequence[int], frame: Frame) -> Plan:
        known = seq.first_blank
        return self._scored(self._text(seq.canvas[:known], frame), chain, range(len(chain)), ())

    def conditionals(self, seq: Canvas, chains: Sequence[Sequence[int]], last_only: bool = False) -> Plan:
        if len(chains) > 1:
            raise NotAble(f"a model of the family '{self.name}' scores one chain per question, not {len(chains)}.")
        [chain] = chains
        asked = range(len(chain) if last_only else 0, self._places(seq, len(chain) + 1))
        return self._scored(causal_rows(seq.text), chain, asked, ())

    def marginals(self, seq: Canvas, positions: Sequence[int]) -> Plan:
        """Of blanks right after the text, read in blocks of one token: a draft of a block that begins there."""
        last = max(positions) + 1 - seq.known
        plan = self._scored(causal_rows(seq.text), (), (), [(0, last)])
        [laws] = plan.reads[1:]
        return Plan(plan.rows, [laws[np.asarray(positions) - seq.known]], plan.stored)

    def outlook(self, seq: Canvas, chain: Sequence[int], k: int, prefixes: Sequence[int]) -> Plan:
        asked = range(self._places(seq, len(chain) + 1))
        groups = [(n, min(k + 1, len(seq.canvas) - seq.known - n)) for n in prefixes]
        plan = self._scored(causal_rows(seq.text), chain, asked, groups)
        return Plan(plan.rows, [plan.reads[0], *(laws[1:] for laws in plan.reads[1:])], plan.stored)

    @staticmethod
    def _places(seq: Canvas, count: int) -> int:
        return min(count, len(seq.canvas) - seq.known)

    def _text(self, tokens: np.ndarray, frame: Frame) -> np.ndarray:
        """Rows of what is decided: finished blocks see themselves whole, the beginning of this one is read token by token."""
        rows = causal_rows(tokens)
        if frame.causal != "text":
            index = np.arange(min(frame.start, len(tokens)))
            rows[HORIZON, : len(index)] = (index // frame.size + 1) * frame.size
        return rows

    def _scored(self, text: np.ndarray, chain: Sequence[int], asked: Iterable[int], groups: Sequence[tuple[int, int]]) -> Plan:
        """A text, a chain after it, and masks: of each token of the chain that is `asked` about (and of the one after it), a mask
        of its own; and groups (n, size) of masks that see the text, n tokens of the chain and each other. The plan reads the
        chain's laws, then every group's."""
        known, asked = text.shape[1], list(asked)
        needed = max([0, *asked, *(n for n, _ in groups)])  # tokens of the chain that somebody sees
        rows = causal_rows(np.concatenate([text[TOKEN], np.asarray(chain[:needed], np.int32)]))
        rows[:, :known] = text
        masks = [*groups] if self.shifted else [*((n, 1) for n in asked), *groups]
        parts, own, at = [rows], [], rows.shape[1]
        for n, size in masks:
            parts.append(self._masks(known + n, size, at))
            own.append(np.arange(at, at + size))
            at += size
        if self.shifted:  # the row before speaks: of the chain, its own rows; of a group's first, what stands before the group
            verdict = [known + n - 1 for n in asked]
            laws = [np.concatenate([[known + n - 1], group[:-1]]) for (n, _), group in zip(groups, own)]
        else:
            verdict, laws = [int(query[0]) for query in own[: len(asked)]], own[len(asked) :]
        return Plan(np.concatenate(parts, 1), [np.array(verdict, np.int64), *laws], stored=rows.shape[1])

    def _masks(self, first: int, size: int, slot: int) -> np.ndarray:
        """Masks at positions from `first` on that see all before them and each other, in slots from `slot` on."""
        rows = np.zeros((5, size), np.int32)
        rows[TOKEN], rows[POSITION], rows[HORIZON] = self.mask_token, first + np.arange(size), first
        rows[LO], rows[HI] = slot, slot + size
        return rows
