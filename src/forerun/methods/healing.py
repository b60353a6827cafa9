"""Before a method begins: the last tokens of its prompt, or those beside its holes, are chosen
anew, with the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from forerun.constraints.healing import Healing
from forerun.errors import NotAble
from forerun.families.any_subset import SubsetScorer
from forerun.families.base import ChainScorer, ModelHandle
from forerun.families.causal import TreeScorer
from forerun.families.masked import CanvasFiller
from forerun.probability.covers import Cover, cover_law, draw_cover
from forerun.probability.outcomes import Placement
from forerun.probability.pending import PendingLaws
from forerun.sequence.canvas import Canvas
from forerun.sequence.question import BlankLaws, Branch


class Answer(NamedTuple):
    """What a model said after a spelling."""

    logits_V: Tensor
    branch: int  # of its question, for log-probabilities


class Healed(NamedTuple):
    """A cover that was drawn, and what it was drawn from."""

    cover: Cover
    logits_NV: Tensor  # after every spelling
    law_NV: Tensor  # of covers
    branch: int  # of the question about the drawn spelling, for traces


async def heal(
    seq: Canvas,
    target: ModelHandle,
    healing: Healing,
    usable: Sequence[np.ndarray] | None = None,
) -> Healed:
    """Draw a cover of what is left of the prompt. The canvas holds what is kept, and is left as it
    is. For a left-to-right model it costs one forward, whatever the spellings; a masked model has a
    canvas for each, several in one forward; others have a forward for each chain."""
    return await _drawn(seq, healing, await _answers(seq, target, healing), usable)


async def _drawn(
    seq: Canvas,
    healing: Healing,
    answers: Sequence[Answer],
    usable: Sequence[np.ndarray] | None,
) -> Healed:
    logits_NV = torch.stack([answer.logits_V for answer in answers])
    law_NV = cover_law(logits_NV, healing, seq.history, usable)
    cover = await seq.draw(draw_cover, law_NV)
    return Healed(cover, logits_NV, law_NV, answers[cover.spelling].branch)


async def heal_border(
    seq: Canvas, target: ModelHandle, healing: Healing, first: int, step: int
) -> Healed:
    """Draw a cover of what is left of the text beside a hole. Its tokens stand at `first` and from
    there on in steps, into the hole: each is decided given the canvas and those before it."""
    placements = [
        [(first + step * i, token) for i, token in enumerate(spelling)]
        for spelling in healing.spellings
    ]
    positions = [first + step * len(spelling) for spelling in healing.spellings]
    if isinstance(target, CanvasFiller):
        answers = await _on_canvases(seq, target, positions, placements)
    else:
        assert isinstance(target, SubsetScorer), "no other model looks past a hole"
        laws = await target.after_placements(seq, positions, placements)
        answers = [Answer(_logits(law)[0], branch) for branch, law in enumerate(laws)]
    return await _drawn(seq, healing, answers, None)


async def _answers(seq: Canvas, target: ModelHandle, healing: Healing) -> list[Answer]:
    if isinstance(target, CanvasFiller):
        placements = [list(enumerate(one, seq.known)) for one in healing.spellings]
        positions = [seq.known + len(one) for one in healing.spellings]
        return await _on_canvases(seq, target, positions, placements)
    if isinstance(target, ChainScorer):
        return await _along_chains(seq, target, healing)
    raise NotAble(
        f"heal=True: a model of the family '{target.family.name}' says nothing of one token after "
        f"another. Use heal=False."
    )


async def _along_chains(seq: Canvas, target: ChainScorer, healing: Healing) -> list[Answer]:
    """All spellings as beginnings of a few chains. The prompt's own comes last where each has a
    forward of its own: it stays in the cache."""
    chains = healing.chains()
    questions = [chains] if isinstance(target, TreeScorer) else [[one] for one in chains[::-1]]
    found: dict[tuple[int, ...], Answer] = {}
    for asked in questions:
        plan = target.family.conditionals(seq, asked)
        rows = zip(asked, plan.reads, strict=True)
        branches = [Branch(chain, range(len(read))) for chain, read in rows]
        laws: list[BlankLaws] = await target.ask(seq, plan, branches, with_model_law=True)
        for branch, (chain, law) in enumerate(zip(asked, laws)):
            logits_LV = _logits(law)
            for length, logits_V in enumerate(logits_LV[: len(chain) + 1]):
                found[chain[:length]] = Answer(logits_V, branch)
    return [found[spelling] for spelling in healing.spellings]


async def _on_canvases(
    seq: Canvas, target: CanvasFiller, positions: Sequence[int], placements: Sequence[Placement]
) -> list[Answer]:
    """The law of one blank after each placement, on a canvas of its own."""
    found: list[Answer] = []
    most = target.family.CANVASES
    for start in range(0, len(placements), most):
        where = [[position] for position in positions[start : start + most]]
        laws = await target.canvases(seq, where, placements[start : start + most])
        found += [Answer(_logits(law)[0], branch) for branch, law in enumerate(laws)]
    return found


def _logits(laws: BlankLaws) -> Tensor:
    """The logits that a model's own laws are made of."""
    return cast("PendingLaws", laws.model_law).logits_NV
