"""What the engine asks of a network. Read this file before you write a backbone or a kernel.

A backbone runs rows. A row is a token at a position; its keys and values live in one slot, and it
attends to the slots [0, horizon) and [lo, hi) of its lane (`sequence/rows.py`).

What a forward is given. A `Batch` lays the rows of all sequences end to end, without padding:

- `tokens_T`, `positions_T`: the token and the position of each of the T rows.
- `slots_T`: where each row lives. The forward writes the row's keys and values there, in every
  layer, before any row attends. Padding rows have the scratch slot.
- `reads_R`: the indices of the R rows whose logits are wanted, in the order of the answer.
- `segments`: which rows belong to which sequence, for code that runs on the host.
- `tiles`: None, or the same rows as attention kernels take them (`engine/pack.py`).

What a forward gives back: logits [R, vocab] of the rows in `reads_R`, on `device`. It must not
remember anything between calls except what it wrote to the slots.

How slots are addressed. One lane per sequence, of up to `context` slots, which come in pages.
`Slots.flat(layer)` is a layer's keys and values, [slots, key_heads, head_dim]; the last entry is
the scratch slot. `batch.span(i)` says where the slots of a segment live, as a slice or an index.
On a device, slot s of a lane lives at `table.on_device[lane * per_lane + s // size] + s % size`,
with `table = slots.table`. A slot may hold garbage; a row never sees such a slot.

What `fold` means. `heads // key_heads` query heads share one key head. Attention folds them into
the row axis: `fold` heads of one row become `fold` rows of one key head, so that keys are read
once and never copied. `heads` counts query heads, and both count only this process's share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from forerun.engine.cache import Slots, SlotShape
from forerun.engine.flag import Flag
from forerun.engine.pack import Batch
from forerun.engine.pages import PageShape, PageTable


class Storage(Protocol):
    """What a backbone keeps per slot: `Slots` for a network, numbers for a table of laws."""

    @property
    def table(self) -> PageTable: ...

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy so many slots to others."""


SlotStorage = TypeVar("SlotStorage", bound=Storage)


class Backbone(Protocol[SlotStorage]):
    """A network that runs rows."""

    vocab: int
    context: int  # the most positions that it was made for
    cost: float  # of one forward, in any unit: the engine serves cheaper models first
    device: torch.device
    dtype: torch.dtype
    layers: int
    heads: int
    key_heads: int
    head_dim: int
    # Can its forward be captured as a CUDA graph? Then it reads only the tensors and `tiles` of a
    # batch, never `segments`; it launches the same kernels for every batch of a size; it does not
    # wait for the device; and its storage is `Slots`.
    capturable: bool
    # Has it kernels that give a row's logits the same bits whatever runs beside it? And are those
    # to be used, even where others are faster?
    has_fixed_kernels: bool
    deterministic: bool
    # It may also have `step_costs`, seconds of a step by rows: then they are not measured. And
    # `moves_rows`, if its forward takes `MovingRows` and it has `write_likeliest` and `go_on`: then
    # it writes several tokens in one step, and drafts and judges several times. A drafter that
    # looks into its target may have `drafts_in_rounds`, if it takes part in that.

    def bytes_per_lane(self, context: int) -> int:
        """How much memory one lane of `context` slots takes."""

    def make_slots(self, lanes: int, context: int, pages: PageShape | None = None) -> SlotStorage:
        """Storage for `lanes` sequences of up to `context` slots each, in so many pages."""

    def forward(self, batch: Batch, slots: SlotStorage) -> Tensor:
        """Logits [R, V] of the rows that are read."""


class LikeliestText(NamedTuple):
    """Some texts that are to go on with their likeliest tokens."""

    first_BV: Tensor  # logits of the first
    wanted: Sequence[int]  # tokens of each
    ends: Sequence[Collection[int]]  # tokens that end each
    impossible: Sequence[int]
    keeps_logits: bool
    stop: Flag | None = None  # once it is set, no token follows the one at work


class WrittenText(NamedTuple):
    """What was written: a token is -1 where none was possible."""

    tokens_kB: np.ndarray
    logits_kBV: Tensor  # of all steps, or of the last


class DraftingText(NamedTuple):
    """A text that goes on by drafts and verdicts on them."""

    tokens: np.ndarray
    lane: int
    wanted: int  # tokens that it has when it is full
    room: int  # slots that may be written to
    most: int  # tokens of a draft
    ends: Collection[int]  # tokens that end it
    run: int  # of last tokens that are looked up for a copy; 0: a model drafts
    # Tokens of the next copy; afterwards twice what is accepted and one more. None: any number.
    reach: int | None
    held: int  # leading tokens that the model which drafts has run
    draft_room: int = 0  # slots that this one may write to
    mask: int | None = None  # if that one fills blanks: what stands for them
    shifted: bool = False  # does a row of it speak of the token after its own?
    block: int = 0  # if it looks into its target: rows of a block

    @property
    def rows(self) -> int:
        """The most rows that a forward has for it: a verdict's, or those of a draft of blanks,
        behind what is not run yet."""
        return 1 + self.most * (1 if self.mask is None else 2) + self.block


class RoundsAsked(NamedTuple):
    """Some texts that are to go on together, by likeliest tokens."""

    texts: Sequence[DraftingText]
    rounds: int
    seconds: float  # that they should take at most
    first_ends: bool  # is it over for all once one text has ended?
    impossible: Sequence[int]
    never_drafted: Sequence[int]
    stop: Flag  # once it is set, no round follows the one at work


class Forwards(NamedTuple):
    """What a model was made to do meanwhile."""

    by_rows: Sequence[int]  # forwards of so many rows
    seconds: Sequence[float]  # that these took
    pairs: int  # (row, slot) pairs looked at
    slots: int

    @property
    def total(self) -> int:
        return sum(self.by_rows)

    @property
    def rows(self) -> int:
        return sum(rows * count for rows, count in enumerate(self.by_rows))


class TextRound(NamedTuple):
    """A draft, how much of it is accepted, and the token behind that."""

    drafted: list[int]
    accepted: int
    token: int


class RoundsMade(NamedTuple):
    """What came of it."""

    rounds: Sequence[Sequence[TextRound]]  # of each text
    texts: Sequence[np.ndarray]  # as they are now
    held: Sequence[int]  # leading tokens of each that the model which drafts has run
    forwards: Forwards
    drafting: Forwards | None  # of the model that drafts, if one does


class SlottedBackbone(ABC):
    """A backbone that keeps keys and values in `Slots`. A subclass sets all attributes."""

    vocab: int
    context: int
    cost: float
    device: torch.device
    dtype: torch.dtype
    layers: int
    heads: int
    key_heads: int
    head_dim: int
    capturable: bool = False
    has_fixed_kernels: bool = False
    deterministic: bool = False
    gives_features: bool = False  # are hidden states left in slots that ask for them?
    hidden_size: int = 0  # of them

    def bytes_per_lane(self, context: int) -> int:
        return 2 * self.layers * context * self.key_heads * self.head_dim * self.dtype.itemsize

    def make_slots(self, lanes: int, context: int, pages: PageShape | None = None) -> Slots:
        heads = (self.key_heads, self.head_dim)
        shape = SlotShape(self.layers, lanes, context, *heads, pages=pages)
        return Slots(shape, self.dtype, self.device)

    @abstractmethod
    def forward(self, batch: Batch, slots: Slots) -> Tensor:
        """Logits [R, V] of the rows that are read."""
