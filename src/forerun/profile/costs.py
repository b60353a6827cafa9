"""What decoding costs in arithmetic and in memory traffic (SpecDiff's Table 1, counted from what
really ran).

A row passes every weight once: two operations each. Attention adds four operations per row, slot it
may look at, head and dimension. A forward reads all weights once, and the keys and values of the
slots it looks at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from forerun.engine.backbone import Backbone
from forerun.engine.host import Host, Work


@dataclass(frozen=True)
class Cost:
    flops: float
    bytes: float


def cost_of(backbone: Backbone, work: Work) -> Cost:
    slot_bytes = backbone.bytes_per_lane(1)  # keys and values of one slot, all layers
    width = backbone.dtype.itemsize
    # A slot's keys and values are 2 * layers * key heads * dim numbers. Scores and sums take two
    # operations for each of them, and heads that share keys each do their own.
    heads_per_key = backbone.heads / backbone.key_heads
    weight_bytes = backbone.cost * width
    if getattr(backbone, "quantize", None) is not None:
        weight_bytes = getattr(backbone, "read_bytes", weight_bytes)
    attention_flops = 2 * heads_per_key * slot_bytes / width
    return Cost(
        flops=2 * backbone.cost * work.rows + attention_flops * work.pairs,
        bytes=work.forwards * weight_bytes + work.slots * slot_bytes,
    )


def work_so_far(hosts: Iterable[Host]) -> dict[Host, Work]:
    """What every model has done so far. `costs_since` tells what came after."""
    return {host: replace(host.work) for host in hosts}


def costs_since(hosts: Iterable[Host], before: Mapping[Host, Work]) -> dict[Host, Cost]:
    """What every model has cost since then. Models that were added later count from nothing."""
    costs = {}
    for host in hosts:
        work = _difference(host.work, before.get(host, Work()))
        costs[host] = cost_of(host.backbone, work)
    return costs


def _difference(after: Work, before: Work) -> Work:
    return Work(
        rows=after.rows - before.rows,
        pairs=after.pairs - before.pairs,
        slots=after.slots - before.slots,
        forwards=after.forwards - before.forwards,
    )
