"""Where keys and values live, and what is known about them. The cache is a memo: nothing is ever
cropped or rolled back.

Row i of a plan is written to slot i of its lane. Slots come in pages (`engine/pages.py`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.engine.pages import Content, PagePool, PageShape, PageTable
from forerun.errors import NoRoom
from forerun.sequence.rows import (
    HI,
    HORIZON,
    LO,
    POSITION,
    TOKEN,
    Plan,
    causal_template,
    reusable,
)

# Share of the memory that is free once the weights are loaded. The forward works in the rest.
FOR_SLOTS = 0.9
# Rows in common that are worth copying a page for; fewer are run again.
WORTH_COPYING = 8
ALIGNED = 64  # bytes, as torch's own memory


class Memo:
    """Which rows a lane's slots hold, and in which pages. Slots beyond those rows hold garbage and
    will be overwritten."""

    def __init__(self, context: int, pool: PagePool, lane: int):
        self.pages: list[int] = []
        self.pool = pool
        self._lane = lane
        self._home = lane * pool.table.count // len(pool.table.starts_LP)
        self._numbers: list[int] = []  # of what the leading pages hold, while they can be found
        self._found_end = 0  # pages from here on are this lane's alone, and nobody finds them
        self._rows = np.zeros((5, context), np.int32)
        self._cells = self._rows.data  # the same: NumPy takes long to write one number at a time
        self._held = 0  # leading rows that the slots hold
        self._causal = 0  # leading rows among them that are plain left-to-right text
        # Leading rows whose slots hold what those rows say: none was computed after a row that
        # was only trusted.
        self._exact = 0
        self.relied_on = False  # do later plans trust what the slots hold, whatever it was?
        self.gave_back = False  # its pages, while its text was being decoded
        self._is_new = True  # has the text that is being decoded asked nothing yet?
        self.rest()

    @property
    def held(self) -> np.ndarray:
        return self._rows[:, : self._held]

    def start(self, plan: Plan) -> int:
        """The first row of the plan that must run."""
        most = min(self._held, plan.stored, plan.first_read)
        plain_text = 0 <= most <= min(self._causal, plan.causal)
        # Most forwards compare plain text with plain text: there tokens alone decide.
        if plain_text and self._has_tokens(plan.tokens[:most]):
            return most
        if plain_text and not plan.trusted:
            other = self._rows[TOKEN, :most] != plan.tokens[:most]
            return int(other.argmax()) if other.any() else most
        return reusable(self.held, plan)

    def holds_rows(self, count: int) -> bool:
        """Do the slots hold so many rows of the last plan?"""
        return self._held >= count

    def holds_text(self, tokens: np.ndarray) -> bool:
        """Do the slots hold at least this text?"""
        return len(tokens) <= self._causal and self._has_tokens(tokens)

    def _has_tokens(self, tokens: np.ndarray) -> bool:
        return self._rows[TOKEN, : len(tokens)].tobytes() == tokens.tobytes()

    def find(self, plan: Plan) -> int:
        """The first row of the plan that must run, once all pages are taken over that hold its
        rows already, whoever computed them."""
        start = self.start(plan)
        if plan.first_read - start >= self.pool.size and not plan.trusted:
            self._take_over(plan, start // self.pool.size)
            start = self.start(plan)
        return start

    def count_found(self, plan: Plan, start: int) -> None:
        """Count what was found of a text, when its first forward begins."""
        if self._is_new:
            self._is_new = False
            self.pool.stats.asked_rows += plan.first_read
            self.pool.stats.found_rows += start

    def _take_over(self, plan: Plan, known: int) -> None:
        """Take over the pages that hold the plan's rows after the first `known` pages."""
        if known > len(self._numbers):
            return
        size = self.pool.size
        found = self._found(plan, known)
        if self.pool.copies:
            found = self._copied(found, known)
        if not found:
            return
        for page in self.pages[known:]:
            self.pool.drop(page)
        del self.pages[known:]
        del self._numbers[known:]
        for page, number in found:
            self._append(page)
            self._numbers.append(number)
        self._found_end = len(self.pages)
        held = len(self.pages) * size
        self._rows[:, :held] = plan.rows[:, :held]
        self._held = held
        self._causal = min(plan.causal, held)
        self._exact = held

    def _found(self, plan: Plan, known: int) -> list[tuple[int, int]]:
        """Pages with the plan's rows after the first `known` pages, held, and their numbers."""
        found: list[tuple[int, int]] = []
        number = self._numbers[known - 1] if known else 0
        for index in range(known, plan.stored // self.pool.size):
            page = self.pool.find(Content(number, self._bytes(plan.rows, index)))
            if page is None:
                break
            number = self.pool.number_of(page)
            self.pool.hold(page)
            found.append((page, number))
        return found

    def _copied(self, found: list[tuple[int, int]], known: int) -> list[tuple[int, int]]:
        """Copies of pages, as many as there is room for."""
        copies = []
        wanted = self._after(known)
        for page, number in found:
            if self.pool.ensure(1):
                copy = self.pool.take(wanted)
                self.pool.copy(page, copy)
                copies.append((copy, number))
                wanted = copy + 1
        for page, _ in found:
            self.pool.drop(page)
        return copies

    def _bytes(self, rows: np.ndarray, index: int) -> bytes:
        size = self.pool.size
        return rows[:, index * size : (index + 1) * size].tobytes()

    def _after(self, index: int) -> int:
        """The page that would lie behind the first so many."""
        return self.pages[index - 1] + 1 if index else self._home

    def _append(self, page: int) -> None:
        self.pool.table.set(self._lane, len(self.pages), page)
        self.pages.append(page)

    def pages_needed(self, start: int, end: int) -> int:
        """How many pages must be taken before rows from `start` to `end` can be written."""
        size = self.pool.size
        first = start // size
        last = -(-end // size)
        shared = 0
        if first < self._found_end:
            holders = self.pool.holders
            shared = sum(holders[page] > 1 for page in self.pages[first:last])
        return shared + max(0, last - len(self.pages))

    def owns(self, slot: int) -> bool:
        """Can a slot be written to as it is, since it is this lane's own?"""
        index = slot // self.pool.size
        return self._found_end <= index < len(self.pages)

    def claim(self, start: int, end: int, stay: int | None = None) -> None:
        """Make slots from `start` to `end` this lane's own. What the slots before `start` hold
        stays, or what those before `stay` do."""
        pool = self.pool
        first = start // pool.size
        last = -(-end // pool.size)
        if first >= self._found_end and last <= len(self.pages):
            return  # they are, as in most steps
        if not pool.ensure(self.pages_needed(start, end)):
            raise NoRoom(f"no page is left for {end} slots of a lane.")
        del self._numbers[first:]
        for index in range(first, min(last, len(self.pages))):
            page = self.pages[index]
            if pool.holders[page] == 1:
                pool.hide(page)
                continue
            own = pool.take(self._after(index))
            if index * pool.size < (start if stay is None else stay):
                pool.copy(page, own)
            pool.drop(page)
            self.pages[index] = own
            pool.table.set(self._lane, index, own)
        while len(self.pages) < last:
            self._append(pool.take(self._after(len(self.pages))))
        if last >= self._found_end:
            self._found_end = min(self._found_end, first)

    def ran(self, plan: Plan, start: int) -> None:
        """Note that the plan's rows from `start` on were written."""
        if plan.causal == plan.stored:
            self._note_text(start, plan.tokens[start : plan.stored])
        else:
            self._rows[:, start : plan.stored] = plan.rows_between(start, plan.stored)
        self._held = plan.stored
        self._causal = min(plan.causal, plan.stored)
        self.relied_on = plan.relied_on
        if plan.trusted or start > self._exact:
            self._exact = min(self._exact, start)
        else:
            self._exact = plan.stored
        self._publish()

    def wrote(self, start: int, tokens: Sequence[int] | np.ndarray) -> None:
        """Note that these tokens were written as plain text after the first `start` rows, which are
        plain text, too."""
        end = start + len(tokens)
        self._note_text(start, tokens)
        self._held = end
        self._causal = end
        self.relied_on = False
        self._exact = end if start <= self._exact else min(self._exact, start)
        self._publish()

    def wrote_one(self, start: int, token: int) -> None:
        """`wrote` of one token, as nearly always."""
        cells = self._cells
        cells[TOKEN, start] = token
        cells[POSITION, start] = start
        cells[HORIZON, start] = self._held = self._causal = start + 1
        cells[LO, start] = cells[HI, start] = 0
        self.relied_on = False
        self._exact = start + 1 if start <= self._exact else min(self._exact, start)
        if (start + 1) % self.pool.size == 0:
            self._publish()

    def _note_text(self, start: int, tokens: Sequence[int] | np.ndarray) -> None:
        end = start + len(tokens)
        rows = self._rows[:, start:end]
        rows[:] = causal_template(end, start)
        rows[TOKEN] = tokens

    def _publish(self) -> None:
        """Let the pages be found that are full of rows which saw nothing behind them."""
        size = self.pool.size
        for index in range(len(self._numbers), min(self._exact, self._held) // size):
            end = (index + 1) * size
            rows = self._rows[:, index * size : end]
            if end > self._causal and max(rows[HORIZON].max(), rows[HI].max()) > end:
                return
            before = self._numbers[-1] if index else 0
            content = Content(before, rows.tobytes())
            self._numbers.append(self.pool.publish(self.pages[index], content))
            self._found_end = max(self._found_end, index + 1)

    def keep(self, rows: int) -> None:
        """Of plain text, note that only the first slots hold what they held: those behind them are
        written over."""
        self._held = rows
        self._causal = rows

    def keep_at_most(self, rows: int) -> None:
        """Of any rows, note that those behind the first so many are written over."""
        self._held = min(self._held, rows)
        self._causal = min(self._causal, rows)

    def forget(self) -> None:
        self._held = 0
        self._causal = 0

    def begin(self, text: np.ndarray) -> None:
        """Another text begins in this lane. Pages that it does not begin with are let go: who asks
        for them will find them."""
        self.pool.wake(self._lane)
        self._is_new = True
        self.relied_on = False
        self.gave_back = False
        size = self.pool.size
        common = self.common_prefix(text)
        whole = common // size
        within = common % size
        last_is_own = len(self._numbers) <= whole
        copied = not last_is_own and self.pool.copies and within >= WORTH_COPYING
        if copied and self.pool.ensure(1):
            own = self.pool.take(self._after(whole))
            self.pool.copy(self.pages[whole], own)
            self._shorten(whole)
            self._append(own)
        else:
            self._shorten(whole + (last_is_own and within > 0))
        self._held = min(self._held, len(self.pages) * size)
        self._causal = min(self._causal, self._held)

    def _shorten(self, count: int) -> None:
        """Let go of all pages but the first so many, the last one first."""
        for page in reversed(self.pages[count:]):
            self.pool.drop(page)
        del self.pages[count:]
        del self._numbers[count:]
        self._found_end = min(self._found_end, count)

    def rest(self) -> None:
        """The text is over. What the slots hold stays until its memory is wanted."""
        self.pool.rest(self._lane, self.release)

    def release(self) -> None:
        """Let go of all pages."""
        self._shorten(0)
        self.forget()
        self._exact = 0
        self.relied_on = False

    def common_prefix(self, tokens: np.ndarray) -> int:
        """How many leading tokens of a new text these slots hold already."""
        most = min(self._held, len(tokens))
        same = self._rows[TOKEN, :most] == tokens[:most]
        return most if same.all() else int(same.argmin())


class LayerSize(NamedTuple):
    """How large one slot of a layer is."""

    key_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class SlotShape:
    """How many slots there are, and how large each is."""

    layers: int
    lanes: int
    context: int  # slots per lane
    key_heads: int
    head_dim: int
    sizes: Sequence[LayerSize] | None = None  # of every layer, where they are not all the same
    pages: PageShape | None = None  # as many as all lanes can fill, if nothing is said
    joined: bool = (
        False  # do a slot's values lie behind its keys, so that both are written at once?
    )

    def of_layers(self) -> Sequence[LayerSize]:
        same = LayerSize(self.key_heads, self.head_dim, self.head_dim)
        return self.sizes or [same] * self.layers


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that on a CPU take neither memory nor time until they are touched: the system gives
    pages of zeros. Torch's own are written one by one."""
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    count = math.prod(shape) * dtype.itemsize
    memory = np.zeros(count + ALIGNED, np.uint8)
    start = -memory.ctypes.data % ALIGNED  # where torch would begin
    return torch.from_numpy(memory[start : start + count]).view(dtype).view(*shape)


class Slots:
    """Keys and values of all lanes, one pair of tensors per layer: [slots, heads, dim]. Which slots
    are whose says `table`.

    They begin as zeros, so that an unwritten slot can never bring a NaN into a masked product.
    """

    def __init__(self, shape: SlotShape, dtype: torch.dtype, device: torch.device):
        self.table = PageTable(shape.lanes, shape.context, shape.pages, device)
        self.scratch_slot = self.table.scratch_slot
        self._flat: list[tuple[Tensor, Tensor]] = []
        self.features: dict[int, Tensor] = {}  # hidden states by layer, [slots, size]
        self._added: dict[tuple[int, ...], Tensor] = {}  # those that were asked for together
        self._joined: list[Tensor] = []
        count = self.scratch_slot + 1
        for heads, key_dim, value_dim in shape.of_layers():
            if shape.joined:
                both = zeros((count, 2 * heads, key_dim), dtype, device)
                self._joined.append(both.flatten(1))
                self._flat.append((both[:, :heads], both[:, heads:]))
                continue
            keys = zeros((count, heads, key_dim), dtype, device)
            values = zeros((count, heads, value_dim), dtype, device)
            self._flat.append((keys, values))

    def add_features(self, layers: Sequence[int], size: int) -> bool:
        """Have forwards leave the hidden states after these layers in slots, beside keys and
        values. Were some of them not kept before?"""
        new = [layer for layer in layers if layer not in self.features]
        keys, _ = self._flat[0]
        together = zeros((len(new), len(keys), size), keys.dtype, keys.device)
        self.features.update(zip(new, together))
        self._added[tuple(new)] = together
        return bool(new)

    def features_at(self, layers: Sequence[int], places_T: Tensor) -> Tensor:
        """The hidden states after some layers at some places, side by side."""
        together = self._added.get(tuple(layers))
        if together is None:
            return torch.cat([self.features[layer][places_T] for layer in layers], -1)
        return together[:, places_T].transpose(0, 1).flatten(1)

    def keep_features(self, layer: int, slots_T: Tensor, x_TE: Tensor) -> None:
        """Write the hidden states of all rows after a layer, if anybody asked for them."""
        if layer in self.features:
            self.features[layer].index_copy_(0, slots_T, x_TE)

    def flat(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values."""
        return self._flat[layer]

    def write(self, layer: int, slots_T: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> None:
        """Write rows to where they live."""
        keys, values = self._flat[layer]
        keys.index_copy_(0, slots_T, k_TGD)
        values.index_copy_(0, slots_T, v_TGD)

    def write_joined(self, layer: int, slots_T: Tensor, kv_TN: Tensor) -> None:
        """Write keys and values that lie side by side."""
        self._joined[layer].index_copy_(0, slots_T, kv_TN)

    @torch.inference_mode()
    def copy(self, source: int, target: int, count: int) -> None:
        """Copy slots to others, in all layers."""
        for pair in self._flat:
            for kept in pair:
                kept[target : target + count] = kept[source : source + count]
        for kept in self.features.values():
            kept[target : target + count] = kept[source : source + count]


def available_bytes(device: torch.device) -> int:
    """Free memory on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as lines:
            available = next(line for line in lines if line.startswith("MemAvailable"))
            return int(available.split()[1]) * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def lanes_that_fit(bytes_per_lane: int, device: torch.device) -> int:
    return int(available_bytes(device) * FOR_SLOTS) // max(1, bytes_per_lane)


def check_room(lanes: int, context: int, bytes_per_lane: int, device: torch.device) -> None:
    """Refuse more lanes than memory holds."""
    fit = lanes_that_fit(bytes_per_lane, device)
    if lanes > fit:
        needed = lanes * bytes_per_lane / 2**30
        raise NoRoom(
            f"lanes={lanes} with max_context={context} needs {needed:.1f} GiB of keys and values "
            f"on {device}, where {fit} would fit: use lanes={max(fit, 1)} or less, a smaller "
            "max_context, or memory=GIB, which lanes then share."
        )
