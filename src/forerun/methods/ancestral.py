"""The reverse process of masked diffusion (Sahoo et al., 2024): every step reveals each blank with the schedule's probability."""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.choose import reveal
from forerun.core import BLANK, Canvas, Canvases
from forerun.methods.stepwise import taken
from forerun.parameters import check_whole
from forerun.registry import method


@dataclass(frozen=True)
class Ancestral:
    steps: int = field(default=32, metadata={"help": "steps of the reverse process"})

    def __post_init__(self) -> None:
        check_whole("steps", self.steps)


@method(
    "ancestral",
    guarantee="approximate",
    reference="ancestral",
    options=Ancestral,
    reason="blanks revealed in the same step do not know of each other",
)
async def ancestral(seq: Canvas, target: Canvases, steps: int) -> None:
    """T steps from all masked to none: from time t to s a blank stays masked with probability s / t, else draws its token.

    A step that reveals nothing leaves the canvas as it was, so its laws serve the next step too (the paper's cache).
    """
    answer = None
    for step in range(steps):
        blanks = [int(p) for p in seq.blanks if seq.canvas[p] == BLANK]
        if seq.done or not blanks:
            return
        if answer is None:
            [answer] = await target.canvases(seq, [blanks], [()])
        t, s = 1 - step / steps, 1 - (step + 1) / steps
        revealed = taken(blanks, await seq.draw(reveal((t - s) / t), blanks, answer[0]))
        if revealed:
            seq.decide(revealed, "revealed")
            answer = None
