"""Where keys and values live, and what is known about them. The cache is a memo: nothing is ever
cropped or rolled back.

Every layer has a fixed number of slots, [lanes, context]. Row i of a plan is written to slot i of
its lane.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.errors import NoRoom
from forerun.sequence.rows import TOKEN, Plan, reusable

# Share of the memory that is free once the weights are loaded. The forward works in the rest.
FOR_SLOTS = 0.9


class Memo:
    """Which rows a lane's slots hold. Slots beyond those hold garbage and will be overwritten."""

    def __init__(self, context: int):
        self._rows = np.zeros((5, context), np.int32)
        self._held = 0  # leading rows that the slots hold
        self._causal = 0  # leading rows among them that are plain left-to-right text

    @property
    def held(self) -> np.ndarray:
        return self._rows[:, : self._held]

    def start(self, plan: Plan) -> int:
        """The first row of the plan that must run."""
        most = min(self._held, plan.stored, plan.first_read)
        plain_text = 0 <= most <= min(self._causal, plan.causal)
        # Most forwards compare plain text with plain text: there tokens alone decide.
        if plain_text and self._has_tokens(plan.rows[TOKEN, :most]):
            return most
        return reusable(self.held, plan)

    def _has_tokens(self, tokens: np.ndarray) -> bool:
        return self._rows[TOKEN, : len(tokens)].tobytes() == tokens.tobytes()

    def ran(self, plan: Plan, start: int) -> None:
        """Note that the plan's rows from `start` on were written."""
        self._rows[:, start : plan.stored] = plan.rows[:, start : plan.stored]
        self._held = plan.stored
        self._causal = min(plan.causal, plan.stored)

    def keep(self, rows: int) -> None:
        """Of plain text, note that only the first slots hold what they held: those behind them are
        written over."""
        self._held = rows
        self._causal = rows

    def forget(self) -> None:
        self._held = 0
        self._causal = 0

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

    def of_layers(self) -> Sequence[LayerSize]:
        same = LayerSize(self.key_heads, self.head_dim, self.head_dim)
        return self.sizes or [same] * self.layers


class Slots:
    """Keys and values of all lanes, one pair of tensors per layer: [lanes, context, heads, dim].

    They begin as zeros, so that an unwritten slot can never bring a NaN into a masked product. On
    a CPU untouched zeros cost no memory. Behind the last slot of the last lane there is one more,
    `scratch_slot`, for rows that only pad a forward to its size.
    """

    def __init__(self, shape: SlotShape, dtype: torch.dtype, device: torch.device):
        self.context = shape.context
        self.scratch_slot = shape.lanes * shape.context
        count = self.scratch_slot + 1
        lanes = (shape.lanes, shape.context)
        self._flat: list[tuple[Tensor, Tensor]] = []
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.features: dict[int, Tensor] = {}  # hidden states by layer, [slots, size]
        for heads, key_dim, value_dim in shape.of_layers():
            keys = torch.zeros((count, heads, key_dim), dtype=dtype, device=device)
            values = torch.zeros((count, heads, value_dim), dtype=dtype, device=device)
            self._flat.append((keys, values))
            self.keys.append(keys[:-1].unflatten(0, lanes))
            self.values.append(values[:-1].unflatten(0, lanes))

    def add_features(self, layers: Sequence[int], size: int) -> bool:
        """Have forwards leave the hidden states after these layers in slots, beside keys and
        values. Were some of them not kept before?"""
        new = [layer for layer in layers if layer not in self.features]
        keys, _ = self._flat[0]
        for layer in new:
            self.features[layer] = keys.new_zeros(len(keys), size)
        return bool(new)

    def keep_features(self, layer: int, slots_T: Tensor, x_TE: Tensor) -> None:
        """Write the hidden states of all rows after a layer, if anybody asked for them."""
        if layer in self.features:
            self.features[layer].index_copy_(0, slots_T, x_TE)

    def flat(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values by flat slot (lane * context + slot)."""
        return self._flat[layer]

    def write(self, layer: int, slots_T: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> None:
        """Write rows to flat slots."""
        keys, values = self._flat[layer]
        keys.index_copy_(0, slots_T, k_TGD)
        values.index_copy_(0, slots_T, v_TGD)


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
            f"on {device}, where {fit} would fit: use lanes={max(fit, 1)} or less, or a smaller "
            "max_context."
        )
