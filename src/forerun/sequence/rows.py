"""Attention as five integers per row: what one forward pass runs, for one sequence. Pure NumPy.

A row is a token at a position, living in the cache slot of its own index; it attends to the slots
[0, horizon) and [lo, hi).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

import numpy as np

TOKEN, POSITION, HORIZON, LO, HI = range(5)


@dataclass(eq=False)  # not frozen, which takes thrice as long to make: there are many
class Plan:
    """What one question costs for one sequence. Nobody changes one but who made it."""

    rows: np.ndarray  # [5, N] int32; row i lives in slot i
    reads: Sequence[np.ndarray]  # for each branch, the rows whose outputs are wanted
    stored: int  # how many leading rows may be remembered
    # Leading rows taken from slots if their tokens are the same, whatever they once saw. This is
    # approximate on purpose.
    trusted: int = 0
    # Will later plans trust these rows? Then what the slots hold cannot be computed again.
    relied_on: bool = False
    # Leading rows that are plain left-to-right text: comparing their tokens is enough.
    causal: int = 0
    first_read: int = -1  # the first row that is read; found here if nobody says
    length: int = field(init=False)  # how many rows there are

    def __post_init__(self) -> None:
        self.length = self.rows.shape[1]
        if self.first_read < 0:
            self.first_read = min((int(read.min()) for read in self.reads if len(read)), default=0)

    @cached_property
    def tokens(self) -> np.ndarray:
        return self.rows[TOKEN]

    @property
    def read_count(self) -> int:
        """How many rows are read, of all branches together."""
        return sum(map(len, self.reads))

    def rows_between(self, start: int, end: int) -> np.ndarray:
        """The five integers of some rows."""
        return self.rows[:, start:end]

    @property
    def is_plain_text(self) -> bool:
        """Is it left-to-right text, of which the last row is read?"""
        if not self.causal == self.stored == self.length:
            return False
        reads = self.reads
        return len(reads) == 1 and len(reads[0]) == 1 and int(reads[0][0]) == self.length - 1


class PlainText(Plan):
    """Left-to-right text that is read from one row to its end. All else follows from its tokens,
    and is made for who asks: nearly all look at the last rows only."""

    tail_contexts = tail_lengths = tail_slots = ()  # as of a text without tails

    @classmethod
    def of(cls, tokens: np.ndarray, first_read: int) -> PlainText:
        """A plan of these tokens, which stay as they are."""
        self = cls.__new__(cls)
        length = len(tokens)
        self.tokens = tokens
        self.first_read = first_read
        self.length = length
        self.stored = length
        self.causal = length
        return self

    @cached_property
    def rows(self) -> np.ndarray:  # type: ignore[override]
        return causal_rows(self.tokens)

    @cached_property
    def reads(self) -> Sequence[np.ndarray]:  # type: ignore[override]
        return [np.arange(self.first_read, self.length)]

    @property
    def read_count(self) -> int:
        return self.length - self.first_read

    def rows_between(self, start: int, end: int) -> np.ndarray:
        rows = causal_template(end, start).copy()
        rows[TOKEN] = self.tokens[start:end]
        return rows

    @property
    def is_plain_text(self) -> bool:
        return self.read_count == 1


class TailedText(Plan):
    """Left-to-right text, a chain after it, and tails that leave the chain: each sees the text, the
    chain up to there, and itself. All is read from the text's last token on. What every row sees
    is made for who asks: whoever runs many plans makes only the rows that run."""

    tail_contexts: list[int]  # tokens that the first one of each tail follows
    tail_lengths: list[int]
    tail_slots: list[int]  # where each tail begins, and where the last one ends

    @classmethod
    def of(
        cls, text: np.ndarray, chain: Sequence[int], tails: Sequence[tuple[int, Sequence[int]]]
    ) -> TailedText:
        """Of each tail, how many tokens of the chain it follows, and its own."""
        self = cls.__new__(cls)
        known = len(text)
        self.first_read = known - 1
        self.stored = self.causal = known + len(chain)
        self.tail_contexts = [known + depart for depart, _ in tails]
        self.tail_lengths = [len(tokens) for _, tokens in tails]
        self.tail_slots = [*accumulate(self.tail_lengths, initial=self.stored)]
        self.length = self.tail_slots[-1]
        behind = list(chain)
        for _, tokens in tails:
            behind += tokens
        self.tokens = text_and_chain(text, behind)
        return self

    @cached_property
    def rows(self) -> np.ndarray:  # type: ignore[override]
        spans = zip(self.tail_contexts, pairwise(self.tail_slots))
        tails = [(context, self.tokens[start:end].tolist()) for context, (start, end) in spans]
        text = self.tokens[: self.stored]
        return np.concatenate([causal_rows(text), tail_rows(tails, self.stored)], 1)

    @cached_property
    def reads(self) -> Sequence[np.ndarray]:  # type: ignore[override]
        main = np.arange(self.first_read, self.stored)
        return [main, *(np.arange(*each) for each in pairwise(self.tail_slots))]

    @property
    def read_count(self) -> int:
        return self.length - self.first_read

    is_plain_text = False


class MaskedText(Plan):
    """Left-to-right text, and masks behind it that see it and each other: what could stand there.
    Rows are made for who asks."""

    mask_token: int
    shifted: bool  # does a row speak of the token after its own?

    @classmethod
    def of(cls, text: np.ndarray, masks: int, mask_token: int, shifted: bool) -> MaskedText:
        """All blanks are read, in order."""
        self = cls.__new__(cls)
        self.mask_token = mask_token
        self.shifted = shifted
        self.tokens = text_and_chain(text, [mask_token] * masks)
        self.stored = self.causal = len(text)
        self.length = len(self.tokens)
        self.first_read = self.stored - shifted
        return self

    @property
    def masks(self) -> int:
        return self.length - self.stored

    @cached_property
    def rows(self) -> np.ndarray:  # type: ignore[override]
        return self.rows_between(0, self.length)

    @cached_property
    def reads(self) -> Sequence[np.ndarray]:  # type: ignore[override]
        return [np.arange(self.first_read, self.first_read + self.masks)]

    def rows_between(self, start: int, end: int) -> np.ndarray:
        rows = causal_template(end, start).copy()
        rows[TOKEN] = self.tokens[start:end]
        of_masks = rows[:, max(0, self.stored - start) :]
        of_masks[HORIZON] = of_masks[LO] = self.stored
        of_masks[HI] = self.length
        return rows


class BlockPlan(Plan):
    """Context of a drafter that looks into its target, and a block behind it. Rows are made for who
    asks: nearly all look at the last ones only."""

    context: np.ndarray  # tokens, which stay as they are
    context_from: int  # as tokens, those of context are written from here on
    block: Sequence[int]
    causal_block: bool  # does a row of the block see only those before it?

    @classmethod
    def of(
        cls,
        context: np.ndarray,
        context_from: int,
        block: Sequence[int],
        read: Sequence[int],
        causal_block: bool = False,
    ) -> BlockPlan:
        """`read` are rows of the block."""
        self = cls.__new__(cls)
        self.context = context
        self.context_from = context_from
        self.block = block
        self.causal_block = causal_block
        self.stored = len(context)
        self.length = self.stored + len(block)
        self.reads = [np.array(read) + self.stored]
        self.first_read = self.stored + read[0]
        return self

    @cached_property
    def rows(self) -> np.ndarray:  # type: ignore[override]
        return self.rows_between(0, self.length)

    def rows_between(self, start: int, end: int) -> np.ndarray:
        context = self.stored
        rows = np.zeros((5, end - start), np.int32)
        index = np.arange(start, end)
        rows[POSITION] = index
        before = max(0, min(context, end) - start)  # rows of context among them
        rows[TOKEN, :before] = self.context[start : start + before]
        rows[TOKEN, :before] += self.context_from
        rows[LO, :before] = index[:before]  # itself: a row must see something
        rows[HI, :before] = index[:before] + 1
        rows[TOKEN, before:] = self.block[max(0, start - context) : max(0, end - context)]
        rows[HORIZON:HI, before:] = context
        rows[HI, before:] = index[before:] + 1 if self.causal_block else self.length
        return rows

    def about(self, text: np.ndarray) -> BlockPlan:
        """The same of another text, whose last token the block begins with."""
        block = [int(text[-1]), *self.block[1:]]
        reads = (self.reads[0] - self.stored).tolist()
        return BlockPlan.of(text[:-1], self.context_from, block, reads, self.causal_block)


def causal_rows(tokens: np.ndarray, chain: Sequence[int] = ()) -> np.ndarray:
    """Rows of plain left-to-right text, and of a chain after it: each sees itself and all before
    it."""
    length = len(tokens) + len(chain)
    rows = causal_template(length).copy()
    rows[TOKEN, : len(tokens)] = tokens
    if len(chain):
        rows[TOKEN, len(tokens) :] = chain
    return rows


def causal_template(end: int, start: int = 0) -> np.ndarray:
    """Such rows but for their tokens: the same for every text, and nobody's to write to."""
    return _causal(1 << end.bit_length())[:, start:end]


@lru_cache
def _causal(length: int) -> np.ndarray:
    index = np.arange(length, dtype=np.int32)
    return np.stack([0 * index, index, index + 1, 0 * index, 0 * index])


def text_and_chain(text: np.ndarray, chain: Sequence[int]) -> np.ndarray:
    """The tokens of a text, and of a chain after it."""
    if not len(chain):
        return text
    length = len(text)
    tokens = np.empty(length + len(chain), np.int32)
    tokens[:length] = text
    tokens[length:] = chain
    return tokens


def next_token_plan(plan: Plan) -> PlainText | None:
    """The same question after one more token, which is still unknown (0 stands for it).

    Only plain text of which the last row is read has such a plan.
    """
    if not plan.is_plain_text:
        return None
    tokens = np.empty(plan.length + 1, np.int32)
    tokens[:-1] = plan.tokens
    tokens[-1] = 0
    return PlainText.of(tokens, plan.length)


def tail_rows(tails: Sequence[tuple[int, Sequence[int]]], start: int) -> np.ndarray:
    """Rows of chains, each of which continues its first so many rows, but lives in slots of its own
    and sees only itself there: the first in [start, ...), the others one behind the other."""
    contexts = [context for context, _ in tails]
    lengths = [len(tokens) for _, tokens in tails]
    *begins, total = accumulate(lengths, initial=0)
    begin, context = np.array([begins, contexts], np.int32).repeat(lengths, axis=1)
    index = np.arange(total, dtype=np.int32)
    rows = np.empty((5, total), np.int32)
    rows[TOKEN] = [token for _, tokens in tails for token in tokens]
    rows[POSITION] = context + index - begin
    rows[HORIZON] = context
    rows[LO] = start + begin
    rows[HI] = start + index + 1
    return rows


def reusable(held: np.ndarray, plan: Plan) -> int:
    """How many leading rows of the plan the slots already hold, so that they need not run again.

    Rows count from the first on while they equal what is held; at most the plan's `stored`; at most
    up to the first row that is read; and rows that see each other only whole, because a row's keys
    depend on everything it saw.
    """
    if plan.trusted:
        most = min(held.shape[1], plan.trusted, plan.first_read)
        same = (held[: POSITION + 1, :most] == plan.rows[: POSITION + 1, :most]).all(0)
        return most if same.all() else int(same.argmin())
    most = min(held.shape[1], plan.stored, plan.first_read)
    same = held[:, :most] == plan.rows[:, :most]
    kept = most if same.all() else int(same.all(0).argmin())
    sees = np.maximum(plan.rows[HORIZON, :kept], plan.rows[HI, :kept])
    if kept == 0 or sees.max() <= kept:
        return kept
    closed = np.maximum.accumulate(sees) <= np.arange(1, kept + 1)
    return int(np.flatnonzero(closed)[-1]) + 1 if closed.any() else 0
