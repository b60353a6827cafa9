"""Self speculative decoding of masked diffusion models (Gao et al., 2025, Algorithm 1): stepwise decoding in fewer forwards."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from forerun.choose import ranking, surest
from forerun.core import BLANK, Canvas, Canvases, Placement
from forerun.errors import BadOption
from forerun.methods.stepwise import Stepwise, Walk
from forerun.registry import method


@dataclass(frozen=True)
class Ssd(Stepwise):
    drafts: int = field(default=4, metadata={"help": "drafted tokens N, so N + 1 canvases per forward"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.drafts, int) or isinstance(self.drafts, bool) or not 0 <= self.drafts <= 5:
            raise BadOption(f"drafts={self.drafts!r} must be a whole number from 0 to 5.")


@method("ssd", guarantee="exact", reference="stepwise", options=Ssd)
async def ssd(seq: Canvas, target: Canvases, block: int, cache: str, refresh: int, drafts: int) -> None:
    """Guess the next N decisions of stepwise decoding, look at all the canvases they would lead to at once, keep what it would do.

    Node i is the canvas with the first i drafts placed. Its own choice, position and token, is what stepwise decoding would decide
    there; the next node is valid only if that is draft i + 1. Choices are drawn, drafts only guessed, so this holds at every
    temperature.
    """
    walk = Walk(seq, block, cache, refresh)
    draft: list[tuple[int, int]] = []
    while not seq.done:
        nodes = [draft[:i] for i in range(min(len(draft), walk.ahead()) + 1)]
        open_at = [walk.open(node) for node in nodes]
        # Drafts may come from the next block once this one has too few blanks; under a cache every block begins anew.
        look_at = [
            [*blanks, *(walk.open(node, later=1) if cache == "none" and len(blanks) <= drafts else ())]
            for blanks, node in zip(open_at, nodes)
        ]
        answers = await target.canvases(seq, look_at, nodes, walk.scope())
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
