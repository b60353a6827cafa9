"""How far self-drafting could go on a masked model (Table 2 of SSD)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from forerun.api import Model, Prompt
from forerun.errors import NotAble
from forerun.families.masked import CanvasFiller
from forerun.methods.block_order import CanvasBlockOptions, CanvasBlockOrder
from forerun.options import Sampling, check_whole
from forerun.probability.selection import most_confident
from forerun.requests.prompts import parse_prompts, room_after
from forerun.sequence.canvas import BLANK


@dataclass(frozen=True)
class SsdLimit:
    """How far self-drafting could go with N drafts if any of the k likeliest tokens of a blank
    counted as its draft."""

    drafts: int
    top: int
    tokens: int
    rounds: int

    @property
    def reduction(self) -> float:
        """The share of stepwise decoding's forwards that is saved."""
        return 1 - self.rounds / self.tokens

    @property
    def bound(self) -> float:
        return self.drafts / (self.drafts + 1)


@dataclass(frozen=True)
class SsdLimitGrid:
    """The numbers of drafts (N) and of likeliest tokens (k) for which there is a limit."""

    drafts: Sequence[int] = (3, 4, 5)
    tops: Sequence[int] = (1, 2, 3, 4, 5)


class Decision(NamedTuple):
    """A token that stepwise decoding decided, and the likeliest tokens of every blank just before
    it."""

    position: int
    token: int
    likeliest: Mapping[int, Sequence[int]]  # by position


def ssd_limit(
    model: Model,
    prompts: Sequence[Prompt],
    *,
    grid: SsdLimitGrid | None = None,
    block: int = 8,
    cache: str = "none",
    max_tokens: int = 64,
) -> list[SsdLimit]:
    """Decode stepwise; in rounds of at most N + 1 decisions, count those that were among the k
    likeliest tokens of their place when the round began. The first decision of a round needs no
    draft."""
    if not model.family.can(CanvasFiller):
        raise NotAble(
            f"'{model.name}' (family '{model.family.name}') is no masked model: ssd-limit needs "
            f"one, such as 'zoo:masked'."
        )
    check_whole("max_tokens", max_tokens)
    options = CanvasBlockOptions(block=block, cache=cache, refresh=block)
    grid = grid or SsdLimitGrid()
    top = max(grid.tops)
    runs = [stepwise_decisions(model, prompt, top, options, max_tokens) for prompt in prompts]
    tokens = sum(len(decisions) for decisions in runs)
    limits = []
    for drafts in grid.drafts:
        for top in grid.tops:
            rounds = sum(count_rounds(decisions, drafts, top) for decisions in runs)
            limits.append(SsdLimit(drafts, top, tokens, rounds))
    return limits


def count_rounds(decisions: Sequence[Decision], drafts: int, top: int) -> int:
    """How many forwards the decisions take: a round ends at the first that its beginning did not
    foresee."""
    rounds = 0
    begun = 0
    for i, decision in enumerate(decisions):
        guesses = decisions[begun].likeliest.get(decision.position, [])[:top]
        foreseen = i > begun and decision.token in guesses
        if rounds == 0 or i - begun > drafts or not foreseen:
            rounds += 1
            begun = i
    return rounds


def stepwise_decisions(
    model: Model, prompt: Prompt, top: int, options: CanvasBlockOptions, max_tokens: int
) -> list[Decision]:
    """Stepwise decoding of one prompt, with the `top` likeliest tokens of the blanks before every
    decision."""
    [ids] = parse_prompts(model, prompt).ids
    if not isinstance(ids, list):
        raise ids
    room_after(ids, model, max_tokens)
    seq = model.canvas([*ids, *[BLANK] * max_tokens], Sampling(temperature=0.0))
    target = model.handle()
    assert isinstance(target, CanvasFiller)
    decisions: list[Decision] = []

    async def decode() -> None:
        order = CanvasBlockOrder(seq, target, options)
        while not seq.done:
            blanks = order.open()
            asked = [*blanks]
            if options.cache == "none":
                asked += order.open(later=1)
            [laws] = await order.ask([asked], [()])
            law = laws.law[: len(blanks)]
            model_law = laws.model_law[: len(blanks)]
            selection = await seq.draw(most_confident(1), blanks, law, model_law)
            [(position, token)] = selection.placements(blanks)
            likeliest = dict(zip(asked, _likeliest(laws.model_law, top)))
            decisions.append(Decision(position, token, likeliest))
            seq.place([(position, token)], "decided")
            order.decided(1)

    model.run_to_end(seq, decode)
    return decisions


def _likeliest(law_NV: Tensor, count: int) -> list[list[int]]:
    return law_NV.topk(min(count, law_NV.shape[-1]), -1).indices.tolist()
