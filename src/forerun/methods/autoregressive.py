"""Plain decoding, the reference of every lossless method.

On a causal model it is called `ar`. On an any-subset model, whose next blank may lie anywhere, the
same loop is called `sequential`.
"""

from __future__ import annotations

from forerun.families.any_subset import SubsetScorer
from forerun.families.base import ChainScorer
from forerun.registry import NoOptions, method
from forerun.sequence.canvas import Canvas


@method("ar", guarantee="exact", reference="ar")
async def autoregressive(seq: Canvas, target: ChainScorer, options: NoOptions) -> None:
    """One token per forward, from the model's own law."""
    while seq.goes_on():
        for token in await target.write(seq):  # x_i ~ p(. | x_<i)
            if not seq.done:
                seq.append(token, "sampled")


sequential = method(
    "sequential",
    guarantee="exact",
    reference="sequential",
    needs=(SubsetScorer,),
    about="One token per forward, blank after blank, each given all that is known on both sides.",
)(autoregressive.run)
