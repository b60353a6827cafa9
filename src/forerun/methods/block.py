"""Block diffusion decoding (Han et al., 2026, Algorithms 1 and 2): block after block, in order of
confidence inside a block.

The keys and values of a finished block come from the next block's first forward, not from one of
their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from forerun.errors import BadOption, NotAble, unknown
from forerun.families.block import BlockFiller, BlockSpan
from forerun.methods.block_order import (
    BlockOptions,
    ModelBlockOrder,
    StepShares,
    causal_reading,
)
from forerun.options import check_between, check_whole
from forerun.probability.selection import SelectionRule, above_threshold, edits, most_confident
from forerun.registry import method
from forerun.sequence.canvas import BLANK, Canvas
from forerun.sequence.question import BlankLaws

SCHEDULES = ("static", "dynamic")


@dataclass(frozen=True)
class EditingOptions(BlockOptions):
    """With token editing (LLaDA2.1): decided tokens of the block may still change, and it is
    published only when it is finished."""

    edit: float | None = field(
        default=None,
        metadata={"help": "change a decided token of the block for one at least this confident"},
    )
    post_edits: int = field(
        default=16,
        metadata={
            "help": "with edit: so many more forwards at most on a full block, until none changes"
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("post_edits", self.post_edits, least=0)
        if self.edit is not None:
            check_between("edit", self.edit)
            if self.causal != "nothing":
                raise BadOption(
                    f"edit={self.edit:g} needs causal='nothing': a token that is read causally "
                    f"knows nothing of what follows."
                )


@dataclass(frozen=True)
class BlockDecodingOptions(EditingOptions):
    schedule: str = field(
        default="dynamic",
        metadata={"help": "dynamic (all confident blanks), or static (so many per forward)"},
    )
    threshold: float = field(
        default=0.9,
        metadata={"help": "dynamic: decide blanks at least this confident, and the surest anyway"},
    )
    steps: int | None = field(
        default=None,
        metadata={"help": "static: forwards for a whole block; default: one per token"},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("threshold", self.threshold)
        if self.schedule not in SCHEDULES:
            raise unknown("schedule", self.schedule, SCHEDULES)
        if self.steps is not None:
            check_whole("steps", self.steps)
            if self.schedule != "static":
                raise BadOption(
                    f"steps={self.steps} needs schedule='static'; a dynamic one takes as many as "
                    f"it needs."
                )

    def rule_in(self, order: ModelBlockOrder) -> Callable[[list[int]], SelectionRule]:
        """Which of some open blanks are decided in the next forward."""
        if self.schedule == "dynamic":
            confident = above_threshold(self.threshold)
            return lambda blanks: confident
        shares = StepShares(self.steps)
        size = order.block - order.begins_alone  # as a whole, whatever of it is given (SDAR)

        def rule_for(blanks: list[int]) -> SelectionRule:
            share = 1 if order.alone else shares.next(blanks[0] // order.block, size)
            return most_confident(share)

        return rule_for


class Editor:
    """Asks about the blanks of a block and, where tokens may be edited, about its decided tokens
    too."""

    def __init__(
        self, seq: Canvas, target: BlockFiller, order: ModelBlockOrder, options: EditingOptions
    ):
        self.seq = seq
        self.target = target
        self.order = order
        self.threshold = options.edit
        self.post_edits = options.post_edits
        if options.edit is not None:
            self._check(options.edit)
            seq.finalize(seq.known)

    def _check(self, edit: float) -> None:
        if self.target.shifted:
            raise NotAble(
                f"edit={edit:g} needs a model whose rows speak of their own tokens; in this one "
                f"they speak of the next."
            )
        if self.seq.history.constraint is not None:
            raise BadOption(
                f"edit={edit:g} with a constraint: what is drawn in the same forward knows nothing "
                f"of an edit, and the two might never fit together."
            )
        if self.seq.history.sampling.penalised:
            raise BadOption(
                f"edit={edit:g} with penalties: a decided token would be punished for being there, "
                f"and edited for that."
            )

    async def ask(self, blanks: list[int]) -> BlankLaws:
        """The laws of the blanks. Decided tokens of which the model is sure that they are others
        are changed."""
        decided: list[int] = []
        if self.threshold is not None:
            ours = self._not_given(self.order.span())
            decided = [position for position in ours if self.seq.tokens[position] != BLANK]
        [answer] = await self.order.ask([[*decided, *blanks]], [()])
        n = len(decided)
        if self.threshold is not None and decided:
            laws = BlankLaws(answer.law[:n], answer.model_law[:n])
            await self._edit(decided, laws, self.threshold)
        return BlankLaws(answer.law[n:], answer.model_law[n:])

    def _not_given(self, span: BlockSpan) -> list[int]:
        """The positions of a block that were not given."""
        return [int(p) for p in self.seq.blanks if span.start <= p < span.end]

    async def _edit(self, decided: list[int], laws: BlankLaws, threshold: float) -> bool:
        """Change what the model is sure of. Did anything change?"""
        now = self.seq.tokens[decided].tolist()
        selection = await self.seq.draw(edits(threshold), decided, now, laws.law, laws.model_law)
        changed = selection.placements(decided)
        if changed:
            self.seq.edit(changed)
        return bool(changed)

    async def finish(self, span: BlockSpan) -> None:
        """Look at a full block again while something changes in it; then publish it."""
        if self.threshold is None or self.seq.first_blank < span.end:
            return
        decided = self._not_given(span)
        for _ in range(self.post_edits):
            [laws] = await self.target.blocks(self.seq, [decided], [()], span)
            if not decided or not await self._edit(decided, laws, self.threshold):
                break
        self.seq.finalize(span.end)


@method(
    "block",
    guarantee="approximate",
    reference="block-stepwise",
    reason="several blanks of a block are decided at once, each on its own",
)
async def block(seq: Canvas, target: BlockFiller, options: BlockDecodingOptions) -> None:
    """Draft all blanks of the block, keep the confident ones (dynamic) or so many of the surest
    (static), until none is left."""
    order = ModelBlockOrder(seq, target, options)
    editor = Editor(seq, target, order, options)
    rule_for = options.rule_in(order)
    while not seq.done:
        blanks = order.open()
        span = order.span()
        laws = await editor.ask(blanks)
        selection = await seq.draw(rule_for(blanks), blanks, laws.law, laws.model_law)
        seq.place(selection.placements(blanks), "decided")
        await editor.finish(span)


@method("block-stepwise", guarantee="exact", reference="block-stepwise", departs=causal_reading)
async def stepwise(seq: Canvas, target: BlockFiller, options: BlockOptions) -> None:
    """One blank per forward, the most confident of the block: static decoding at its slowest, the
    reference of the faster ways."""
    static = BlockDecodingOptions(
        block=options.block,
        sub_block=options.sub_block,
        causal=options.causal,
        schedule="static",
    )
    await block.run(seq, target, static)
