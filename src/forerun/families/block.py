"""Block diffusion models: text in blocks, each of which sees itself whole and all before it; a
mask's row says what could stand there.

Blocks are counted from the first token of the canvas, whatever was given. In blocks of one token
the same network goes from left to right: decided tokens are then plain causal rows, and a mask at
the place of each token of a chain scores it, seeing what comes before and itself (equation 3 of Han
et al., 2026, the rows of it that are read). Nobody sees such a query, so any number of them ride in
one forward. In a `shifted` model a row speaks of the token after its own: there a chain's own rows
score it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from forerun.families.base import Family, SelfDrafter, family_settings
from forerun.probability.outcomes import Placement
from forerun.sequence.canvas import BLANK, Canvas
from forerun.sequence.question import BlankLaws, Branch
from forerun.sequence.rows import (
    HI,
    HORIZON,
    LO,
    POSITION,
    TOKEN,
    MaskedText,
    Plan,
    causal_rows,
)


@dataclass(frozen=True)
class BlockSpan:
    """The block of a canvas that is being filled, and how a block model reads what is decided
    before its first blank.

    Blocks of `size` see themselves whole. `causal` says what is read as if in blocks of one token
    instead: `nothing`, the `prefix` of this block (equation 4 of Han et al., 2026), or the `text`,
    all of it.
    """

    start: int
    end: int
    size: int
    causal: str = "nothing"


class BlockFiller(SelfDrafter):
    """A model that fills a block at a time: block diffusion.

    In blocks of one token it goes from left to right, and so it scores chains. Its marginals are of
    blanks that follow a text read that way.
    """

    does = "fills a block at a time"
    family: Block

    @property
    def block(self) -> int:
        """The largest block that the model was trained for."""
        return self.family.block

    @property
    def largest_block(self) -> int:
        """The largest block that there are slots for."""
        return self.family.QUERIES

    @property
    def shifted(self) -> bool:
        """Does the row before a token speak of it? Then the block before decides a block's first
        token."""
        return self.family.shifted

    async def blocks(
        self,
        seq: Canvas,
        positions: Sequence[Sequence[int]],
        placements: Sequence[Placement],
        span: BlockSpan,
    ) -> list[BlankLaws]:
        """For each canvas (the block with some blanks filled as its placement says) the laws of its
        `positions`. All in one forward."""
        plan = self.family.blocks(seq, positions, placements, span)
        return await self.ask_canvases(seq, plan, positions, placements)

    async def verdict(
        self, seq: Canvas, chain: Sequence[int], span: BlockSpan, own: bool = False
    ) -> Tensor:
        """The laws [len, V] of each token of a chain that fills the block's first blanks, given
        what is decided before them and the chain before it, in blocks of one token; the model's
        `own` laws, or under the sampling parameters."""
        positions = range(seq.first_blank, seq.first_blank + len(chain))
        plan = self.family.verdict(seq, chain, span)
        branch = Branch(chain, range(len(chain)), positions)
        if own:
            [laws] = await self.ask(seq, plan, [branch], with_model_law=True)
            return laws.model_law
        [law_NV] = await self.ask(seq, plan, [branch])
        return law_NV


class Block(Family):
    """A decoder with a mask token, trained in blocks of up to `block` tokens."""

    name = "block"
    handle = BlockFiller
    default_method = "s2d2"
    default_reason = (
        "the model fills a block and judges it in blocks of one token, so it drafts for itself, "
        "and its router decides in every step whether a verdict pays"
    )
    CANVASES = 10  # copies of a block that fit into a lane: a mixed tree of five drafts
    QUERIES = 320  # rows of a verdict with drafts, besides one per token of the chain

    def __init__(self, mask_token: int, block: int, shifted: bool = False):
        self.mask_token: int = mask_token
        self.block = block
        self.shifted = shifted
        self.impossible_tokens = (mask_token,)
        self.needs_prompt = shifted  # no row speaks of the very first token

    @classmethod
    def of(cls, config: Any) -> Block | None:
        settings = family_settings(config)
        if settings.get("family") != cls.name:
            return None
        return cls(settings["mask_token"], settings["block"], settings.get("shifted", False))

    def masked_as(self, token: int) -> Block:
        return Block(token, self.block, self.shifted)

    def slots(self, context: int) -> int:
        return 2 * context + max(self.CANVASES * self.block, self.QUERIES)

    def blocks(
        self,
        seq: Canvas,
        positions: Sequence[Sequence[int]],
        placements: Sequence[Placement],
        span: BlockSpan,
    ) -> Plan:
        """Rows that all canvases read alike come first. Then each canvas has the rest of the block
        for itself."""
        first = self._first_own_position(seq, span)
        speaking = [np.asarray(where, np.int64) - self.shifted for where in positions]
        # The row before a shifted block speaks of its first token: nothing of the block is needed.
        none_inside = all((rows < first).all() for rows in speaking)
        end = first if none_inside else span.end
        size = end - first
        board = np.where(seq.tokens[:end] == BLANK, self.mask_token, seq.tokens[:end])
        rows = np.zeros((5, first + len(placements) * size), np.int32)
        rows[:, :first] = self._text_rows(board[:first], span)
        reads = []
        for i, (where, placement) in enumerate(zip(speaking, placements, strict=True)):
            slot = first + i * size
            rows[:, slot : slot + size] = _canvas_rows(board[first:], first, slot, in_place=i == 0)
            for position, token in placement:
                rows[TOKEN, position - first + slot] = token
            reads.append(np.where(where < first, where, where - first + slot))
        return Plan(rows, reads, stored=end)

    @staticmethod
    def _first_own_position(seq: Canvas, span: BlockSpan) -> int:
        """The first position that a canvas has for itself: the block's start, or its first blank if
        what is decided before that is read causally."""
        blanks = np.flatnonzero(seq.tokens[span.start : span.end] == BLANK)
        if span.causal == "nothing" or not len(blanks):
            return span.start
        return span.start + int(blanks[0])

    def verdict(self, seq: Canvas, chain: Sequence[int], span: BlockSpan) -> Plan:
        text = self._text_rows(seq.tokens[: seq.first_blank], span)
        return self._score(text, chain, range(len(chain)), ())

    def conditionals(
        self, seq: Canvas, chains: Sequence[Sequence[int]], last_only: bool = False
    ) -> Plan:
        chain = self.one_chain(chains)
        asked = range(len(chain) if last_only else 0, _places(seq, len(chain) + 1))
        return self._score(causal_rows(seq.text), chain, asked, ())

    def marginals(self, seq: Canvas, positions: Sequence[int]) -> Plan:
        """Of blanks right after the text, read in blocks of one token: a draft of a block that
        begins there."""
        last = max(positions) + 1 - seq.known
        if len(positions) == last:  # all of them, as nearly always
            return MaskedText.of(seq.text, last, self.mask_token, self.shifted)
        plan = self._score(causal_rows(seq.text), (), (), [(0, last)])
        [reads] = plan.reads[1:]
        return Plan(plan.rows, [reads[np.asarray(positions) - seq.known]], plan.stored)

    def verdict_and_drafts(
        self, seq: Canvas, chain: Sequence[int], k: int, prefixes: Sequence[int]
    ) -> Plan:
        asked = range(_places(seq, len(chain) + 1))
        groups = [(n, min(k + 1, len(seq.tokens) - seq.known - n)) for n in prefixes]
        plan = self._score(causal_rows(seq.text), chain, asked, groups)
        verdict, *drafts = plan.reads
        return Plan(plan.rows, [verdict, *(reads[1:] for reads in drafts)], plan.stored)

    def _text_rows(self, tokens: np.ndarray, span: BlockSpan) -> np.ndarray:
        """Rows of what is decided: finished blocks see themselves whole, the beginning of this one
        is read token by token."""
        rows = causal_rows(tokens)
        if span.causal != "text":
            index = np.arange(min(span.start, len(tokens)))
            rows[HORIZON, : len(index)] = (index // span.size + 1) * span.size
        return rows

    def _score(
        self,
        text: np.ndarray,
        chain: Sequence[int],
        asked: Iterable[int],
        groups: Sequence[tuple[int, int]],
    ) -> Plan:
        """A text, a chain after it, and masks.

        Each token of the chain that is `asked` about, and the one after it, has a mask of its own.
        Groups (n, size) are masks that see the text, n tokens of the chain and each other. The plan
        reads the chain's laws, then every group's.
        """
        known = text.shape[1]
        asked = list(asked)
        seen = max([0, *asked, *(n for n, _ in groups)])  # tokens of the chain that a mask sees
        rows = causal_rows(np.concatenate([text[TOKEN], np.asarray(chain[:seen], np.int32)]))
        rows[:, :known] = text
        queries = [] if self.shifted else [(n, 1) for n in asked]
        parts = [rows]
        masks = []
        slot = rows.shape[1]
        for n, size in [*queries, *groups]:
            parts.append(self._mask_rows(known + n, size, slot))
            masks.append(np.arange(slot, slot + size))
            slot += size
        if self.shifted:
            # The row before speaks: of the chain, its own rows; of a group's first, the row that
            # stands before the group.
            verdict = [known + n - 1 for n in asked]
            starts = [[known + n - 1] for n, _ in groups]
            drafts = [np.concatenate([start, mask[:-1]]) for start, mask in zip(starts, masks)]
        else:
            verdict = [int(mask[0]) for mask in masks[: len(asked)]]
            drafts = masks[len(asked) :]
        reads = [np.array(verdict, np.int64), *drafts]
        return Plan(np.concatenate(parts, 1), reads, stored=rows.shape[1])

    def _mask_rows(self, first: int, size: int, slot: int) -> np.ndarray:
        """Masks at positions from `first` on that see all before them and each other, in slots from
        `slot` on."""
        rows = np.zeros((5, size), np.int32)
        rows[TOKEN] = self.mask_token
        rows[POSITION] = first + np.arange(size)
        rows[HORIZON] = first
        rows[LO] = slot
        rows[HI] = slot + size
        return rows


def _canvas_rows(tokens: np.ndarray, first: int, slot: int, in_place: bool) -> np.ndarray:
    """A block's rows from position `first` on. The first canvas is in place: a block of the text
    like any other, which may be kept. The others live in slots that only they see."""
    size = len(tokens)
    rows = np.zeros((5, size), np.int32)
    rows[TOKEN] = tokens
    rows[POSITION] = np.arange(first, first + size)
    if in_place:
        rows[HORIZON] = first + size
    else:
        rows[HORIZON] = first
        rows[LO] = slot
        rows[HI] = slot + size
    return rows


def _places(seq: Canvas, count: int) -> int:
    """At most `count`, and no more than the canvas has left."""
    return min(count, len(seq.tokens) - seq.known)
