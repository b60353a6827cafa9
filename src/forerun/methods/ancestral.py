"""The reverse process of masked diffusion (Sahoo et al., 2024): every step reveals each blank with
the schedule's probability."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from forerun.families.masked import CanvasFiller
from forerun.options import check_whole
from forerun.probability.selection import reveal
from forerun.registry import method
from forerun.sequence.canvas import BLANK, Canvas


@dataclass(frozen=True)
class AncestralOptions:
    steps: int = field(default=32, metadata={"help": "steps of the reverse process"})

    def __post_init__(self) -> None:
        check_whole("steps", self.steps)


@method(
    "ancestral",
    guarantee="approximate",
    reference="ancestral",
    reason="blanks revealed in the same step do not know of each other",
)
async def ancestral(seq: Canvas, target: CanvasFiller, options: AncestralOptions) -> None:
    """T steps from all masked to none: from time t to s a blank stays masked with probability
    s / t, else draws its token.

    A step that reveals nothing leaves the canvas as it was, so its laws serve the next step too
    (the paper's cache).
    """
    answer = None
    # Blanks that a constraint kept from being decided together are left for further steps.
    for step in itertools.chain(range(options.steps), itertools.repeat(options.steps - 1)):
        blanks = [int(p) for p in seq.blanks if seq.tokens[p] == BLANK]
        if seq.done or not blanks:
            return
        if answer is None:
            [answer] = await target.canvases(seq, [blanks], [()])
        t = 1 - step / options.steps
        s = 1 - (step + 1) / options.steps
        revealed = await seq.draw(reveal((t - s) / t), blanks, answer.law)
        placement = revealed.placements(blanks)
        if placement:
            seq.place(placement, "revealed")
            answer = None
