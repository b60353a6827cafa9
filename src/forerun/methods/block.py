"""Block diffusion decoding (Han et al., 2026, Algorithms 1 and 2): block after block, in order of confidence inside a block.

The keys and values of a finished block come from the next block's first forward, not from one of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from forerun.choose import edits, sure_enough, surest
from forerun.core import BLANK, BlockWise, Canvas, Frame
from forerun.errors import BadOption, NotAble, unknown
from forerun.methods.stepwise import taken
from forerun.parameters import check_between, check_whole
from forerun.registry import method
from forerun.walk import BlockWalk, Strides

SCHEDULES = ("static", "dynamic")


@dataclass(frozen=True)
class Editing(Strides):
    """With token editing (LLaDA2.1): decided tokens of the block may still change, and it is said only when it is finished."""

    edit: float | None = field(
        default=None, metadata={"help": "change a decided token of the block for one at least this confident"}
    )
    post_edits: int = field(
        default=16, metadata={"help": "with edit: so many more forwards at most on a full block, until none changes"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("post_edits", self.post_edits, least=0)
        if self.edit is not None:
            check_between("edit", self.edit)
            if self.causal != "nothing":
                raise BadOption(
                    f"edit={self.edit:g} needs causal='nothing': a token that is read causally knows nothing of what follows."
                )


@dataclass(frozen=True)
class BlockOptions(Editing):
    schedule: str = field(default="dynamic", metadata={"help": "dynamic (all confident blanks), or static (so many per forward)"})
    threshold: float = field(
        default=0.9, metadata={"help": "dynamic: decide blanks at least this confident, and the surest anyway"}
    )
    steps: int | None = field(default=None, metadata={"help": "static: forwards per block, at most; default: one per token"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("threshold", self.threshold)
        if self.schedule not in SCHEDULES:
            raise unknown("schedule", self.schedule, SCHEDULES)
        if self.steps is not None:
            check_whole("steps", self.steps)
            if self.schedule != "static":
                raise BadOption(f"steps={self.steps} needs schedule='static'; a dynamic one takes as many as it needs.")


class Editor:
    """Asks about the blanks of a block, and where tokens may be edited, about its decided tokens too."""

    def __init__(self, seq: Canvas, target: BlockWise, walk: BlockWalk, edit: float | None, post_edits: int):
        self.seq, self.target, self.walk, self.threshold, self.post_edits = seq, target, walk, edit, post_edits
        if edit is not None:
            if target.row_before:
                raise NotAble(
                    f"edit={edit:g} needs a model whose rows speak of their own tokens; in this one they speak of the next."
                )
            if seq.history.sampling.penalised:
                raise BadOption(
                    f"edit={edit:g} with penalties: a decided token would be punished for being there, and edited for that."
                )
            seq.settle(seq.known)

    async def ask(self, blanks: list[int]) -> tuple[Tensor, Tensor]:
        """The laws of the blanks, and the model's own. Decided tokens of which it is sure that they are others are changed."""
        decided = [p for p in self._ours(self.walk.frame()) if self.seq.canvas[p] != BLANK] if self.threshold is not None else []
        [(law, own)] = await self.walk.ask(self.target, [[*decided, *blanks]], [()])
        n = len(decided)
        await self._edit(decided, law[:n], own[:n])
        return law[n:], own[n:]

    def _ours(self, frame: Frame) -> list[int]:
        """The positions of a block that were not given."""
        return [int(p) for p in self.seq.blanks if frame.start <= p < frame.end]

    async def _edit(self, decided: list[int], law: Tensor, own: Tensor) -> bool:
        if not decided:
            return False
        now = self.seq.canvas[decided].tolist()
        changed = taken(decided, await self.seq.draw(edits(self.threshold), decided, now, law, own))
        if changed:
            self.seq.edit(changed)
        return bool(changed)

    async def finish(self, frame: Frame) -> None:
        """A full block is looked at again while something changes in it, and then said."""
        if self.threshold is None or self.seq.first_blank < frame.end:
            return
        decided = self._ours(frame)
        for _ in range(self.post_edits):
            [(law, own)] = await self.target.blocks(self.seq, [decided], [()], frame)
            if not await self._edit(decided, law, own):
                break
        self.seq.settle(frame.end)


@method(
    "block",
    guarantee="approximate",
    reference="block-stepwise",
    options=BlockOptions,
    reason="several blanks of a block are decided at once, each on its own",
)
async def block(
    seq: Canvas,
    target: BlockWise,
    schedule: str,
    threshold: float,
    steps: int | None,
    edit: float | None,
    post_edits: int,
    **strides: Any,
) -> None:
    """Draft all blanks of the block, keep the confident ones (dynamic) or so many of the surest (static), until none is left."""
    walk = BlockWalk(seq, target, **strides)
    editor = Editor(seq, target, walk, edit, post_edits)
    rule = sure_enough(threshold) if schedule == "dynamic" else surest(-(-walk.block // (steps or walk.block)))
    while not seq.done:
        blanks, frame = walk.open(), walk.frame()
        law, own = await editor.ask(blanks)
        decided = taken(blanks, await seq.draw(rule, blanks, law, own))
        seq.decide(decided, "decided")
        await editor.finish(frame)


@method("block-stepwise", guarantee="exact", reference="block-stepwise", options=Strides)
async def stepwise(seq: Canvas, target: BlockWise, **strides: Any) -> None:
    """One blank per forward, the surest of the block: static decoding at its slowest, the reference of the faster ways."""
    everything = dict(schedule="static", threshold=1.0, steps=None, edit=None, post_edits=0)
    await block.run(seq, target, **everything, **strides)
