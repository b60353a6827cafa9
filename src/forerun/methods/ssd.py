"""Self speculative decoding of masked diffusion models (Gao et al., 2025, Algorithm 1): stepwise decoding in fewer forwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from forerun.choose import ranking, surest
from forerun.core import BLANK, Canvas, Canvases, Placement
from forerun.parameters import check_whole
from forerun.registry import method
from forerun.walk import Blocks, Walk


@dataclass(frozen=True)
class Ssd(Blocks):
    drafts: int = field(default=4, metadata={"help": "drafted tokens N, so N + 1 canvases per forward"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("drafts", self.drafts, least=0, most=5)


@method("ssd", guarantee="exact", reference="stepwise", options=Ssd)
async def ssd(seq: Canvas, target: Canvases, drafts: int, **blocks: Any) -> None:
    """Guess the next N decisions of stepwise decoding, look at all the canvases they would lead to at once, keep what it would do.

    Node i is the canvas with the first i drafts placed. Its own choice, position and token, is what stepwise decoding would decide
    there; the next node is valid only if that is draft i + 1. Choices are drawn, drafts only guessed, so this holds at every
    temperature.
    """
    walk = Walk(seq, **blocks)
    draft: list[tuple[int, int]] = []
    while not seq.done:
        nodes = [draft[:i] for i in range(min(len(draft), walk.ahead()) + 1)]
        open_at = [walk.open(node) for node in nodes]
        look_at = [[*blanks, *walk.beyond(node, drafts)] for blanks, node in zip(open_at, nodes)]
        answers = await walk.ask(target, look_at, nodes)
        choices: list[tuple[int, int]] = []
        while len(choices) < len(nodes) and choices == draft[: len(choices)]:
            i = len(choices)
            law, own = (x[: len(open_at[i])] for x in answers[i])
            choices.append(await choice(seq, open_at[i], law, own))
        commit(seq, choices, draft[: len(nodes) - 1])
        walk.decided(len(choices))
        draft = await next_draft(seq, walk, look_at[len(choices) - 1], answers[len(choices) - 1][1], drafts)


async def choice(seq: Canvas, blanks: list[int], law: Tensor, own: Tensor) -> tuple[int, int]:
    """What stepwise decoding decides on a canvas: where, and as what."""
    chosen = await seq.draw(surest(1), blanks, law, own)
    return next((p, x - 1) for p, x in zip(blanks, chosen) if x > 0)


def commit(seq: Canvas, choices: list[tuple[int, int]], draft: Placement) -> None:
    """Decide the choices: all but the last agree with the draft."""
    matched = len(choices) - 1
    positions, tokens = [p for p, _ in choices], [x for _, x in choices]
    seq.fill(positions[:matched], tokens[:matched], "accepted", [x for _, x in draft], range(matched))
    if not seq.done:
        reason = "decided" if not draft else "bonus" if matched == len(draft) else "resampled"
        seq.fill(positions[matched:], tokens[matched:], reason, branches=[matched])


async def next_draft(seq: Canvas, walk: Walk, blanks: list[int], own: Tensor, n: int) -> list[tuple[int, int]]:
    """The likeliest tokens of what is still blank, the surest first: of the block, then of the one after it."""
    if seq.done or not n:
        return []
    found = await seq.draw(ranking, blanks, own)
    tokens, order = found[: len(found) // 2], found[len(found) // 2 :]
    ranked = [(blanks[i], tokens[i]) for i in order if i < len(blanks) and seq.canvas[blanks[i]] == BLANK]
    return sorted(ranked, key=lambda draft: walk.number(draft[0]))[:n]
