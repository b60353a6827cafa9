"""A random language model with no network: one law per context, from a hash. It is what methods are certified on.

It keeps tokens and positions in slots as a network keeps keys and values, and a row's law depends on exactly the slots the row
sees: a stale slot, a wrong mask or a shifted position changes the law, and certification shows it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from forerun.engine.pack import Batch, visible
from forerun.noise import mix, uniform
from forerun.rows import POSITION, TOKEN


class TableBackbone:
    """Logits are 2 * sharpness * (u - 0.5) with u a hash of (seed, what the row sees, token); `blend` mixes in another table's."""

    def __init__(
        self,
        vocab: int = 3,
        seed: int = 0,
        context: int = 64,
        sharpness: float = 2.0,
        like: TableBackbone | None = None,
        blend: float = 0.5,
        cost: float = 1.0,
    ):
        self.vocab, self.context, self.cost = vocab, context, cost
        self.seed, self.sharpness, self.like, self.blend = seed, sharpness, like, blend
        self.device = torch.device("cpu")
        self._known: dict[bytes, Tensor] = {}

    def bytes_per_lane(self, context: int) -> int:
        return context * 8

    def make_slots(self, lanes: int, context: int) -> np.ndarray:
        return np.zeros((lanes, 2, context), np.int64)

    def logits(self, seen_2N: np.ndarray) -> Tensor:
        """The logits of a row that sees these positions (first row) and tokens (second row)."""
        known = self._known.get(key := seen_2N.tobytes())
        if known is None:
            h = mix(self.seed, *map(int, seen_2N.T.flatten()))
            known = torch.tensor([2 * self.sharpness * (uniform(h, 0, v) - 0.5) for v in range(self.vocab)], dtype=torch.float64)
            if self.like is not None:
                known = self.blend * self.like.logits(seen_2N) + (1 - self.blend) * known
            self._known[key] = known
        return known

    def forward(self, batch: Batch, slots: np.ndarray) -> Tensor:
        out: list[Tensor] = []
        for s in batch.segments:
            own = slots[s.lane][:, : s.end]
            own[:, s.start :] = s.run()[[POSITION, TOKEN]]
            mask = visible(s)
            for branch in s.plan.reads:
                out.extend(self.logits(own[:, mask[row]]) for row in branch - s.start)
        return torch.stack(out)
