"""A random language model with no network: one law per context, from a hash. Methods are certified
on it.

It has two layers, as hashes. Where a network keeps keys and values, it keeps what each row is
(position and token) and a digest of the rows that row saw. A row's law depends on its position and
on the digests of exactly the rows it sees. So a stale slot, a wrong mask, a shifted position, or a
row computed from the wrong context changes the law, and certification shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from forerun.engine.pack import Batch, visible
from forerun.engine.pages import PageShape, PageTable
from forerun.probability.noise import mix, uniform
from forerun.sequence.rows import POSITION

FREE_ROWS = {1: 1.0, 2: 1.0}  # seconds of a step by rows: a table has no time of its own


def digest(seen: Sequence[tuple[int, int]]) -> int:
    """What a row holds after the first layer, given the (position, token) of every row it sees, in
    order."""
    return mix(*(number for row in seen for number in row)) >> 1


class TableSlots:
    """Position, token and digest of every slot."""

    def __init__(self, table: PageTable):
        self.table = table
        self.numbers_3S = np.zeros((3, table.scratch_slot + 1), np.int64)

    def copy(self, source: int, target: int, count: int) -> None:
        self.numbers_3S[:, target : target + count] = self.numbers_3S[:, source : source + count]


class TableBackbone:
    """Logits are 2 * sharpness * (u - 0.5) with u a hash of (seed, position, digests of what the
    row sees, token); `blend` mixes in another table's."""

    device = torch.device("cpu")
    dtype = torch.float64
    layers = 1
    heads = 1
    key_heads = 1
    head_dim = 1
    capturable = False
    has_fixed_kernels = False
    deterministic = False

    def __init__(  # noqa: PLR0913 - each of them has a default
        self,
        vocab: int = 3,
        seed: int = 0,
        context: int = 64,
        sharpness: float = 2.0,
        like: TableBackbone | None = None,
        blend: float = 0.5,
        cost: float = 1.0,
        step_costs: Mapping[int, float] = FREE_ROWS,
    ):
        self.vocab = vocab
        self.context = context
        self.cost = cost
        self.step_costs = step_costs
        self.seed = seed
        self.sharpness = sharpness
        self.like = like
        self.blend = blend
        self._known: dict[tuple[int, ...], Tensor] = {}
        self._digests: dict[bytes, int] = {}

    def bytes_per_lane(self, context: int) -> int:
        return context * 24

    def make_slots(self, lanes: int, context: int, pages: PageShape | None = None) -> TableSlots:
        return TableSlots(PageTable(lanes, context, pages))

    def logits(self, position: int, digests: Sequence[int]) -> Tensor:
        """The logits of a row at a position that sees rows with these digests."""
        key = (int(position), *map(int, digests))
        if (known := self._known.get(key)) is None:
            h = mix(self.seed, *key)
            known = torch.tensor(
                [2 * self.sharpness * (uniform(h, 0, v) - 0.5) for v in range(self.vocab)],
                dtype=torch.float64,
            )
            if self.like is not None:
                known = self.blend * self.like.logits(position, digests) + (1 - self.blend) * known
            self._known[key] = known
        return known

    def forward(self, batch: Batch, slots: TableSlots) -> Tensor:
        out: list[Tensor] = []
        for s in batch.segments:
            places = slots.table.span(s.lane, s.end)
            lane = slots.numbers_3S[:, places]
            lane[0, s.start :] = s.rows_to_run()[POSITION]
            lane[1, s.start :] = batch.tokens_T[s.offset : s.offset + s.rows]
            mask = visible(s)
            lane[2, s.start :] = [self._digest(lane[:2, seen]) for seen in mask]
            slots.numbers_3S[:, places] = lane
            for branch in s.plan.reads:
                out.extend(
                    self.logits(lane[0, s.start + row], lane[2, mask[row]])
                    for row in branch - s.start
                )
        return torch.stack(out)

    def _digest(self, seen_2N: np.ndarray) -> int:
        key = seen_2N.tobytes()
        if key not in self._digests:
            self._digests[key] = digest(seen_2N.T.tolist())
        return self._digests[key]
