"""Where keys and values live, and what is known about them. The cache is a memo: nothing is ever cropped or rolled back.

Slots are fixed places, [lanes, context] of them per layer; a plan's row i of a lane is written to slot i of that lane.
"""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Tensor

from forerun.errors import NoRoom
from forerun.rows import TOKEN, Plan, reusable

FOR_SLOTS = 0.9  # of the memory that is free once the weights are loaded; the rest is for the forward's own work


class Memo:
    """Which rows a lane's slots hold. Rows beyond what is held are garbage and will be overwritten."""

    def __init__(self, context: int):
        self._rows = np.zeros((5, context), np.int32)
        self._held = self._causal = 0  # rows that are held, and how many of them, from the first on, are plain text

    @property
    def held(self) -> np.ndarray:
        return self._rows[:, : self._held]

    def start(self, plan: Plan) -> int:
        """The first row of the plan that must run."""
        most = min(self._held, plan.stored, plan.first_read)
        if 0 <= most <= min(self._causal, plan.causal) and self._has_tokens(plan.rows[TOKEN, :most]):
            return most  # plain text on both sides, as in most forwards: the other four integers need not be looked at
        return reusable(self.held, plan)

    def _has_tokens(self, tokens: np.ndarray) -> bool:
        return self._rows[TOKEN, : len(tokens)].tobytes() == tokens.tobytes()

    def ran(self, plan: Plan, start: int) -> None:
        """The plan's rows from `start` on were written."""
        self._rows[:, start : plan.stored] = plan.rows[:, start : plan.stored]
        self._held, self._causal = plan.stored, min(plan.causal, plan.stored)

    def forget(self) -> None:
        self._held = self._causal = 0

    def common_prefix(self, tokens: np.ndarray) -> int:
        """How many leading tokens of a new text are in these slots already: the lane to put it in has the most."""
        n = min(self._held, len(tokens))
        same = self._rows[0, :n] == tokens[:n]
        return n if same.all() else int(same.argmin())


class Slots:
    """Keys and values of all lanes, one pair of tensors per layer: [lanes, context, heads, dim].

    Zeros, so that a slot nobody wrote can never bring a NaN into a masked product; on a CPU untouched zeros cost no memory.
    Behind the last slot of the last lane there is one more, `nowhere`, for rows that only fill a forward up to its size.
    """

    def __init__(self, layers: int, lanes: int, context: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device):
        self.context, self.nowhere = context, lanes * context
        shape = (self.nowhere + 1, heads, dim)
        self._flat = [tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)) for _ in range(layers)]
        self.keys, self.values = ([pair[i][:-1].unflatten(0, (lanes, context)) for pair in self._flat] for i in range(2))

    def flat(self, layer: int) -> tuple[Tensor, ...]:
        """A layer's keys and values by flat slot (lane * context + slot)."""
        return self._flat[layer]

    def write(self, layer: int, slot_T: Tensor, k_THD: Tensor, v_THD: Tensor) -> None:
        """Write rows to flat slots."""
        keys, values = self._flat[layer]
        keys.index_copy_(0, slot_T, k_THD)
        values.index_copy_(0, slot_T, v_THD)


def available_bytes(device: torch.device) -> int:
    """Memory that can still be taken on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def lanes_that_fit(bytes_per_lane: int, device: torch.device) -> int:
    return int(available_bytes(device) * FOR_SLOTS) // max(1, bytes_per_lane)


def check_room(lanes: int, context: int, bytes_per_lane: int, device: torch.device) -> None:
    fit = lanes_that_fit(bytes_per_lane, device)
    if lanes > fit:
        raise NoRoom(
            f"lanes={lanes} with max_context={context} needs {lanes * bytes_per_lane / 2**30:.1f} GiB of keys and values on "
            f"{device}, where {fit} would fit: use lanes={max(fit, 1)} or less, or a smaller max_context."
        )
