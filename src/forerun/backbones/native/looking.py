"""A drafter that looks into its target, in two calls of C++ (`forward.cpp`): hidden states become
keys and values (`look`), then blocks run over them as rows of any decoder do (`forward`).

T rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_void_p
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.backbones.native.rounds import Runner
from forerun.backbones.native.structures import (
    ContextFields,
    FusionFields,
    LookingDrafterFields,
    MatrixFields,
    pointer,
)
from forerun.engine.backbone import RoundsAsked
from forerun.engine.cache import Slots
from forerun.engine.pack import Batch
from forerun.engine.pages import PageTable
from forerun.sequence.rows import POSITION, TOKEN

if TYPE_CHECKING:
    from forerun.backbones.native import NativeForward, NativeProduct


class BlockRows(NamedTuple):
    """Some rows of a batch, as a forward takes them."""

    rows_5T: np.ndarray
    slots: np.ndarray
    lanes: np.ndarray
    reads: np.ndarray
    longest: int
    table: PageTable
    drawn_T: Tensor | None = None

    @classmethod
    def of(cls, batch: Batch, chosen_T: np.ndarray) -> BlockRows:
        """Those that are chosen. Where another row is read, nobody looks at what that gives."""
        places_T = np.maximum(np.cumsum(chosen_T) - 1, 0)
        return cls(
            batch.rows_5T[:, chosen_T],
            batch.slots[chosen_T],
            batch.lanes[chosen_T],
            places_T[batch.reads],
            batch.longest,
            batch.table,
        )


class BlockDrafts(NamedTuple):
    """What is drafted from a block: the likeliest tokens, each moved by the one before it."""

    mask_token: int
    tokens_N: Tensor | None  # that are ever drafted; None: all
    gathers: bool  # must their logits be picked out of those of all tokens?
    before_VR: Tensor | None  # of the token before; None: nothing moves logits
    after: NativeProduct | None  # what multiplies it


class NativeDrafter:
    """A few layers over the hidden states of some layers of a target."""

    def __init__(
        self,
        forward: NativeForward,
        fuse: NativeProduct,
        kept: Sequence[NativeProduct],  # keys and values of each layer
        norms: tuple[Tensor, Tensor | None],  # of what is fused, and of every hidden state
        target_layers: Sequence[int],
        drafts: BlockDrafts | None,  # None: it takes part in no rounds
    ):
        self.forward = forward
        self._drafts = drafts
        self._target_layers = target_layers
        self._alive = (fuse, kept, norms)  # what the structure points to
        matrices = (MatrixFields * len(kept))(*(product.matrix for product in kept))
        norm, of_states = norms
        self._fusion = FusionFields(
            len(target_layers), pointer(of_states), fuse.matrix, norm.data_ptr(), matrices
        )
        self._at = ctypes.addressof(self._fusion)
        self._states: tuple[Slots, ctypes.Array[c_void_p]] | None = None

    def __call__(self, batch: Batch, slots: Slots, source: Slots, embedded: int) -> Tensor:
        """Logits of the rows that are read. Tokens of context are behind all that are embedded."""
        assert batch.sources is not None, "a drafter is bound to its target's slots"
        is_context_T = batch.rows_5T[TOKEN] >= embedded
        if is_context_T.any():
            rows = (batch.rows_5T[POSITION], batch.slots, batch.sources)
            self._look([row[is_context_T] for row in rows], slots, source)
        if is_context_T.all():  # of a text that is read in parts
            return torch.empty(0, self.forward.vocab)
        return self.forward(BlockRows.of(batch, ~is_context_T), slots)

    def runner(
        self,
        places: tuple[Slots, Slots],  # its own, and the target's
        asked: RoundsAsked,
        target: Runner,
        threads: Sequence[int],  # by rows
        impossible: Sequence[int],  # among its logits
    ) -> Runner:
        """As it takes part in rounds of its target's."""
        slots, source = places
        how, forward = self._drafts, self.forward
        assert how is not None, "it takes part in no rounds"
        seen = max(text.draft_room for text in asked.texts)
        block = max(text.block for text in asked.texts)  # all have the drafter's own
        runner = forward.runner(slots, seen, threads, impossible)
        most = len(threads) - 1
        memory = torch.empty(forward.functions.look_memory(forward.address, self._at, most))
        tokens, before, after = how.tokens_N, how.before_VR, how.after
        rank = 0 if before is None else before.shape[1]
        drafted = forward.vocab if tokens is None else len(tokens)
        moved = torch.empty(len(asked.texts) * (drafted + 2 * rank))
        looking = LookingDrafterFields(
            self._at, self._states_in(source), target.rows, block, how.mask_token,
            drafted, pointer(tokens), how.gathers, rank, pointer(before),
            None if after is None else ctypes.addressof(after.matrix),
            moved.data_ptr(), memory.data_ptr(),
        )  # fmt: skip
        runner.look(ctypes.addressof(looking), (looking, moved, memory, target))
        return runner

    def _look(self, rows: Sequence[np.ndarray], slots: Slots, source: Slots) -> None:
        """Write keys and values of rows: their positions, their slots, those of the target."""
        count = len(rows[0])
        functions, model = self.forward.functions, self.forward.address
        numbers_3T = np.stack(rows).astype(np.int64)
        memory = torch.empty(functions.look_memory(model, self._at, count))
        context = ContextFields(
            count, torch.get_num_threads(), *(row.ctypes.data for row in numbers_3T),
            self._states_in(source), self.forward.kept_in(slots), memory.data_ptr(),
        )  # fmt: skip
        functions.look(model, self._at, byref(context))

    def _states_in(self, source: Slots) -> int:
        """Where it is written where the target keeps hidden states."""
        if self._states is None or self._states[0] is not source:
            at = [source.features[layer].data_ptr() for layer in self._target_layers]
            self._states = source, (c_void_p * len(at))(*at)
        return ctypes.addressof(self._states[1])
