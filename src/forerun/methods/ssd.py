"""Self speculative decoding of masked diffusion models (Gao et al., 2025, Algorithm 1): stepwise decoding in fewer forwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from forerun.choose import ranking, surest
from forerun.core import BLANK, BlockWise, Canvas, Canvases, Placement
from forerun.errors import BadOption, unknown
from forerun.parameters import check_between, check_whole
from forerun.registry import method
from forerun.walk import Blocks, BlockWalk, Strides, Walk

TREES = ("chain", "mixed")


@dataclass(frozen=True)
class Drafts:
    """Which decisions are guessed ahead."""

    drafts: int = field(default=4, metadata={"help": "drafted tokens N: so many decisions more than one per forward, at most"})
    tree: str = field(
        default="mixed",
        metadata={"help": "chain (N + 1 canvases), or mixed: N - 1 more, for two decisions that come in the other order"},
    )
    worth: float = field(
        default=0.0, metadata={"help": "draft no further than all drafts are right with this chance: fewer canvases, as exact"}
    )

    def __post_init__(self) -> None:
        check_whole("drafts", self.drafts, least=0, most=5)
        check_between("worth", self.worth)
        if self.tree not in TREES:
            raise unknown("tree", self.tree, TREES)


@dataclass(frozen=True)
class Ssd(Blocks, Drafts):
    def __post_init__(self) -> None:
        Blocks.__post_init__(self)
        Drafts.__post_init__(self)


@dataclass(frozen=True)
class BlockSsd(Strides, Drafts):
    def __post_init__(self) -> None:
        Strides.__post_init__(self)
        Drafts.__post_init__(self)
        if self.causal != "nothing":  # a placed token would be read one way on its canvas, and another once it is decided
            raise BadOption(f"causal={self.causal!r} has no canvases: block-ssd and s2d2-canvases need causal='nothing'.")


@method("ssd", guarantee="exact", reference="stepwise", options=Ssd)
async def ssd(seq: Canvas, target: Canvases, drafts: int, tree: str, worth: float, **blocks: Any) -> None:
    """Guess the next N decisions of stepwise decoding, look at all the canvases they would lead to at once, keep what it would do.

    Every node is a canvas with some drafts placed. Its own choice, position and token, is what stepwise decoding would decide
    there, and leads on to the node where just that is placed, if there is one. Choices are drawn, drafts only guessed, so this
    holds at every temperature.
    """
    await self_speculative(seq, target, Walk(seq, **blocks), drafts, tree, worth)


@method("block-ssd", guarantee="exact", reference="block-stepwise", options=BlockSsd)
async def block_ssd(seq: Canvas, target: BlockWise, drafts: int, tree: str, worth: float, **strides: Any) -> None:
    """The same inside the blocks of a block model: canvases are copies of the block over the shared text before it."""
    await self_speculative(seq, target, BlockWalk(seq, target, **strides), drafts, tree, worth)


async def self_speculative(seq: Canvas, target: Any, walk: Walk, drafts: int, tree: str, worth: float) -> None:
    draft: list[tuple[int, int]] = []
    while not seq.done:
        blanks, own = await verify(seq, target, walk, draft[: walk.ahead()], drafts, tree)
        draft = await next_draft(seq, walk, blanks, own, drafts, worth)


async def verify(
    seq: Canvas, target: Any, walk: Walk, draft: list[tuple[int, int]], drafts: int, tree: str
) -> tuple[list[int], Tensor]:
    """One forward: decide what stepwise decoding would, as far as the draft foresaw it and once more. Returns what the last of
    those decisions looked at, blanks and the model's own laws of them."""
    nodes, leads = plant(draft, tree)
    open_at = [walk.open(node) for node in nodes]
    look_at = [[*blanks, *walk.beyond(node, drafts)] for blanks, node in zip(open_at, nodes)]
    answers = await walk.ask(target, look_at, nodes)
    at: list[int] = [0]
    choices: list[tuple[int, int]] = []
    while len(choices) < len(at):
        node = at[-1]
        law, own = (x[: len(open_at[node])] for x in answers[node])
        choices.append(await choice(seq, open_at[node], law, own))
        if (node, choices[-1]) in leads:
            at.append(leads[node, choices[-1]])
    commit(seq, choices, at, draft)
    walk.decided(len(choices))
    return look_at[at[-1]], answers[at[-1]][1]


def plant(draft: list[tuple[int, int]], tree: str) -> tuple[list[list[tuple[int, int]]], dict[tuple[int, tuple[int, int]], int]]:
    """The canvases to look at, as what is placed on each, and which choice leads from which to which. Mixed order (section 5.2):
    each but the last two also leads to its grandchild's draft, placed alone; nothing follows there."""
    nodes = [draft[:i] for i in range(len(draft) + 1)]
    leads = {(i, placed): i + 1 for i, placed in enumerate(draft)}
    if tree == "mixed":
        for i in range(len(draft) - 1):
            leads[i, draft[i + 1]] = len(nodes)
            nodes.append([*draft[:i], draft[i + 1]])
    return nodes, leads


async def choice(seq: Canvas, blanks: list[int], law: Tensor, own: Tensor) -> tuple[int, int]:
    """What stepwise decoding decides on a canvas: where, and as what."""
    chosen = await seq.draw(surest(1), blanks, law, own)
    return next((p, x - 1) for p, x in zip(blanks, chosen) if x > 0)


def commit(seq: Canvas, choices: list[tuple[int, int]], at: list[int], draft: Placement) -> None:
    """Decide the choices, each made at its node: all but the last agree with the draft."""
    matched = len(choices) - 1
    positions, tokens = [p for p, _ in choices], [x for _, x in choices]
    seq.fill(positions[:matched], tokens[:matched], "accepted", [x for _, x in draft], at)
    if not seq.done:
        reason = "decided" if not draft else "bonus" if matched == len(draft) else "resampled"
        seq.fill(positions[matched:], tokens[matched:], reason, branches=at[-1:])


async def next_draft(seq: Canvas, walk: Walk, blanks: list[int], own: Tensor, n: int, worth: float) -> list[tuple[int, int]]:
    """The likeliest tokens of what is still blank, the surest first: of the block, then of the one after it."""
    if seq.done or not n:
        return []
    still = [p if seq.canvas[p] == BLANK else -1 for p in blanks]
    if not any(p >= 0 for p in still):
        return []
    *found, count = await seq.draw(ranking(worth), still, own)
    tokens, order = found[: len(found) // 2], found[len(found) // 2 :]
    ranked = [(blanks[i], tokens[i]) for i in order if i < len(blanks) and seq.canvas[blanks[i]] == BLANK]
    return sorted(ranked, key=lambda draft: walk.number(draft[0]))[: min(n, count)]
