"""Plain decoding, the reference of every lossless method.

On a causal model it is called `ar`. On an any-subset model, whose next blank may lie anywhere, the
same loop is called `sequential`.
"""

from __future__ import annotations

from forerun.families.any_subset import SubsetScorer
from forerun.families.base import ChainScorer
from forerun.probability.acceptance import sample_token
from forerun.registry import NoOptions, method
from forerun.sequence.canvas import Canvas


@method("ar", guarantee="exact", reference="ar")
async def autoregressive(seq: Canvas, target: ChainScorer, options: NoOptions) -> None:
    """One token per forward, from the model's own law."""
    while seq.goes_on():
        p_V = await target.next_law(seq)
        drawn = await seq.draw(sample_token, p_V)
        seq.fill(seq.next(1), [drawn.token], "sampled")


sequential = method("sequential", guarantee="exact", reference="sequential", needs=(SubsetScorer,))(
    autoregressive.run
)
