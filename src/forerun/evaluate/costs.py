"""What decoding costs in arithmetic and in memory traffic (SpecDiff's Table 1, counted from what really ran).

A row passes every weight once: two operations each. Attention adds four operations per row, slot it may look at, head and
dimension. A forward reads all weights once, and the keys and values of the slots it looks at.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from forerun.engine.serve import Host, Work


@dataclass(frozen=True)
class Cost:
    flops: float
    bytes: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


def cost_of(backbone: Any, work: Work) -> Cost:
    per_slot = backbone.bytes_per_lane(1)  # keys and values of one slot, all layers
    size = getattr(backbone, "dtype", None)
    width = size.itemsize if size is not None else 4
    # A slot's keys and values are 2 * layers * heads * dim numbers; scores and sums take two operations for each of them, and heads
    # that share keys each work on their own.
    shared = getattr(backbone, "heads", 1) / getattr(backbone, "key_heads", getattr(backbone, "heads", 1))
    attention = 2 * shared * per_slot / width
    return Cost(
        2 * backbone.cost * work.rows + attention * work.pairs, work.forwards * backbone.cost * width + work.slots * per_slot
    )


def snapshot(hosts: Iterable[Host]) -> dict[Host, Work]:
    """What every model has done so far; `since` says what came after."""
    return {host: Work(**vars(host.work)) for host in hosts}


def since(hosts: Iterable[Host], before: dict[Host, Work]) -> dict[Host, Cost]:
    found = {}
    for host in hosts:
        was = before.get(host, Work())
        done = Work(**{name: value - getattr(was, name) for name, value in vars(host.work).items()})
        found[host] = cost_of(host.backbone, done)
    return found
