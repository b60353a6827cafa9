"""A method that chooses: how many tokens to draft and by whom, or none, step by step.

What is chosen hangs on costs and on what was accepted before; never on a draft that was drawn and
is still to be judged. That keeps the law: whether a token is drafted must not depend on what it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.drafters.base import Drafter
from forerun.families.base import ChainScorer
from forerun.methods.sources import DEEPEST, draft_by, sources_of
from forerun.options import check_flag, check_whole
from forerun.registry import method
from forerun.sequence.canvas import Canvas


@dataclass(frozen=True)
class AutoOptions:
    most: int = field(default=16, metadata={"help": "most tokens drafted per verdict"})
    learn: bool = field(
        default=True,
        metadata={"help": "begin with what earlier requests of this model have shown"},
    )

    def __post_init__(self) -> None:
        check_whole("most", self.most, 1, DEEPEST)
        check_flag("learn", self.learn)


@method("auto", guarantee="exact", reference="ar", asks_costs=True)
async def auto(
    seq: Canvas, target: ChainScorer, options: AutoOptions, drafter: Drafter | None = None
) -> None:
    """Draft as many tokens as pay, or none: by copying the text, by Jacobi's guesses or by a draft
    model. What forwards cost here, how full the batch is and what was accepted decide."""
    sources = sources_of(seq, target, drafter, options.learn)
    chooser = target.chooser(seq, options.learn)
    unasked = 0  # tokens that are still written without a choice
    try:
        while seq.goes_on():
            if unasked <= 0:
                source, k = chooser.choose(sources, options.most)
                if source and (draft := await draft_by(source, k, sources)):
                    accepted = await source.judge(draft)
                    source.learn(len(draft), accepted)
                    continue
                most = chooser.text_length
                unasked = 1 if target.writes_token_by_token(seq) else most
            written = await target.write(seq, most)
            for token in written:
                if not seq.done:
                    seq.append(token, "sampled")
            unasked -= len(written)
    finally:
        chooser.leave()
