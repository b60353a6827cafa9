"""Plain decoding, the reference of every lossless method: `ar` on a causal model; on an any-subset model, whose next blank may
lie anywhere, the same loop is called `sequential`."""

from __future__ import annotations

from forerun.accept import draw
from forerun.core import AnySubset, Canvas, Conditional
from forerun.registry import method


@method("ar", guarantee="exact", reference="ar")
async def autoregressive(seq: Canvas, target: Conditional) -> None:
    """One token per forward, from the model's own law."""
    while not seq.done:
        p_V = await target.following(seq)
        seq.fill(seq.next(1), await seq.draw(draw, p_V), "sampled")


sequential = method("sequential", guarantee="exact", reference="sequential", needs=(AnySubset,))(autoregressive.run)
