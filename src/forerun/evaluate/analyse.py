"""What limits a method: measurements on a model that no single run shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun.api import Model
from forerun.choose import surest
from forerun.core import BLANK, Canvas, Canvases
from forerun.engine.serve import Questions, Ticket
from forerun.errors import NotAble
from forerun.parameters import Sampling, check_whole
from forerun.sampling import History
from forerun.walk import Blocks, Walk


@dataclass(frozen=True)
class Limit:
    """How far self-drafting could go with N drafts if any of the k likeliest tokens of a blank counted as its draft."""

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


def ssd_limit(
    model: Model,
    prompts: Sequence[Any],
    *,
    drafts: Sequence[int] = (3, 4, 5),
    tops: Sequence[int] = (1, 2, 3, 4, 5),
    block: int = 8,
    cache: str = "none",
    max_tokens: int = 64,
) -> list[Limit]:
    """SSD's Table 2: decode stepwise; in rounds of at most N + 1 decisions, count those that were among the k likeliest tokens of
    their place when the round began. The first decision of a round needs no draft."""
    if Canvases not in model.family.answers:
        raise NotAble(
            f"'{model.name}' (family '{model.family.name}') is no masked model: ssd-limit needs one, such as 'zoo:masked'."
        )
    check_whole("max_tokens", max_tokens)
    Blocks(block=block, cache=cache)
    told = [_decisions(model, prompt, max(tops), block, cache, max_tokens) for prompt in prompts]
    return [
        Limit(n, k, sum(map(len, told)), sum(_rounds(decisions, n, k) for decisions in told)) for n in drafts for k in tops
    ]  # fmt: skip


def _rounds(decisions: list[dict[str, Any]], drafts: int, top: int) -> int:
    """How many forwards the decisions take: a round ends at the first that its beginning did not foresee."""
    rounds, begun = 0, 0
    for i, decision in enumerate(decisions):
        foreseen = i > begun and decision["token"] in decisions[begun]["ahead"].get(decision["position"], [])[:top]
        if rounds == 0 or i - begun > drafts or not foreseen:
            rounds, begun = rounds + 1, i
    return rounds


def _decisions(model: Model, prompt: Any, top: int, block: int, cache: str, max_tokens: int) -> list[dict[str, Any]]:
    """Stepwise decoding of one prompt: every decision, and what the model thought likeliest of all blanks just before it."""
    from forerun.arguments import read_prompts, room_after

    [ids], _ = read_prompts(model, prompt, None)
    if not isinstance(ids, list):
        raise ids
    room_after(ids, max_tokens, 0, model.context, model.name)
    history = History(Sampling(temperature=0.0), np.asarray(ids), model.vocab, frozenset())
    seq = Canvas([*ids, *[BLANK] * max_tokens], history=history)
    target, found = Questions(model.family, model.host), []

    async def decode() -> None:
        walk = Walk(seq, block, cache, refresh=block)
        while not seq.done:
            blanks = walk.open()
            ahead = [*blanks, *(walk.open(later=1) if cache == "none" else [])]
            [(law, own)] = await walk.ask(target, [ahead], [()])
            chosen = await seq.draw(surest(1), blanks, law[: len(blanks)], own[: len(blanks)])
            likeliest = own.topk(min(top, own.shape[-1]), -1).indices.tolist()
            position, token = next((p, x - 1) for p, x in zip(blanks, chosen) if x > 0)
            found.append({"position": position, "token": token, "ahead": dict(zip(ahead, likeliest))})
            seq.fill([position], [token], "decided")
            walk.decided(1)

    ticket = model.engine.submit(Ticket(seq, decode))
    model.engine.run()
    if ticket.error is not None:
        raise ticket.error
    return found
