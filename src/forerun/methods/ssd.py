"""Self speculative decoding of masked diffusion models (Gao et al., 2025, Algorithm 1): stepwise
decoding in fewer forwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from forerun.errors import BadOption, unknown
from forerun.families.block import BlockFiller
from forerun.families.masked import CanvasFiller
from forerun.methods.block_order import (
    BlockOptions,
    BlockOrder,
    CanvasBlockOptions,
    CanvasBlockOrder,
    ModelBlockOrder,
    stale_keys,
)
from forerun.options import check_between, check_whole
from forerun.probability.outcomes import Placement
from forerun.probability.selection import most_confident, ranking
from forerun.registry import method
from forerun.sequence.canvas import BLANK, Canvas
from forerun.sequence.question import BlankLaws

TREES = ("chain", "mixed")

Decision = tuple[int, int]  # (position, token)


@dataclass(frozen=True)
class DraftTreeOptions:
    """Which decisions are guessed ahead."""

    drafts: int = field(
        default=4,
        metadata={"help": "drafted tokens N: so many decisions more than one per forward, at most"},
    )
    tree: str = field(
        default="mixed",
        metadata={
            "help": "chain (N + 1 canvases), or mixed: N - 1 more, for two decisions that come in "
            "the other order"
        },
    )
    worth: float = field(
        default=0.0,
        metadata={
            "help": "draft no further than all drafts are right with this chance: fewer canvases, "
            "as exact"
        },
    )

    def __post_init__(self) -> None:
        check_whole("drafts", self.drafts, least=0, most=5)
        check_between("worth", self.worth)
        if self.tree not in TREES:
            raise unknown("tree", self.tree, TREES)


@dataclass(frozen=True)
class SsdOptions(CanvasBlockOptions, DraftTreeOptions):
    def __post_init__(self) -> None:
        CanvasBlockOptions.__post_init__(self)
        DraftTreeOptions.__post_init__(self)


@dataclass(frozen=True)
class BlockSsdOptions(BlockOptions, DraftTreeOptions):
    def __post_init__(self) -> None:
        BlockOptions.__post_init__(self)
        DraftTreeOptions.__post_init__(self)
        # A placed token would be read one way on its canvas, and another once it is decided.
        if self.causal != "nothing":
            raise BadOption(
                f"causal={self.causal!r} has no canvases: block-ssd and s2d2-canvases need "
                f"causal='nothing'."
            )


@method("ssd", guarantee="exact", reference="stepwise", departs=stale_keys)
async def ssd(seq: Canvas, target: CanvasFiller, options: SsdOptions) -> None:
    """Guess the next N decisions of stepwise decoding, look at all the canvases they would lead to
    at once, keep what it would do.

    Every node is a canvas with some drafts placed. Its own choice, position and token, is what
    stepwise decoding would decide there. It leads on to the node where just that is placed, if
    there is one. Choices are drawn, drafts only guessed, so this holds at every temperature.
    """
    await self_speculative(seq, CanvasBlockOrder(seq, target, options), options)


@method("block-ssd", guarantee="exact", reference="block-stepwise")
async def block_ssd(seq: Canvas, target: BlockFiller, options: BlockSsdOptions) -> None:
    """The same inside the blocks of a block model: canvases are copies of the block over the shared
    text before it."""
    await self_speculative(seq, ModelBlockOrder(seq, target, options), options)


async def self_speculative(seq: Canvas, order: BlockOrder, options: DraftTreeOptions) -> None:
    draft: list[Decision] = []
    while not seq.done:
        last = await verify(seq, order, draft[: order.ahead()], options)
        draft = await next_draft(seq, order, last, options)


class LastNode(NamedTuple):
    """What the last decision of a forward looked at."""

    blanks: list[int]
    model_law: Tensor  # of those blanks


async def verify(
    seq: Canvas, order: BlockOrder, draft: list[Decision], options: DraftTreeOptions
) -> LastNode:
    """One forward: decide what stepwise decoding would, as far as the draft foresaw it and once
    more."""
    nodes, leads = plant_tree(draft, options.tree)
    open_at = [order.open(node) for node in nodes]
    beyond = [order.beyond(node, options.drafts) for node in nodes]
    look_at = [[*blanks, *later] for blanks, later in zip(open_at, beyond)]
    answers = await order.ask(look_at, nodes)
    path: list[int] = [0]
    choices: list[Decision] = []
    while len(choices) < len(path):
        node = path[-1]
        count = len(open_at[node])
        law, model_law = answers[node]
        laws = BlankLaws(law[:count], model_law[:count])
        choices.append(await stepwise_choice(seq, open_at[node], laws))
        if (node, choices[-1]) in leads:
            path.append(leads[node, choices[-1]])
    commit(seq, choices, path, draft)
    order.decided(len(choices))
    return LastNode(look_at[path[-1]], answers[path[-1]].model_law)


def plant_tree(
    draft: list[Decision], tree: str
) -> tuple[list[list[Decision]], dict[tuple[int, Decision], int]]:
    """The canvases to look at, as what is placed on each, and which choice leads from which node to
    which.

    Mixed order (section 5.2): each node but the last two also leads to its grandchild's draft,
    placed alone; nothing follows there.
    """
    nodes = [draft[:i] for i in range(len(draft) + 1)]
    leads = {(i, placed): i + 1 for i, placed in enumerate(draft)}
    if tree == "mixed":
        for i in range(len(draft) - 1):
            leads[i, draft[i + 1]] = len(nodes)
            nodes.append([*draft[:i], draft[i + 1]])
    return nodes, leads


async def stepwise_choice(seq: Canvas, blanks: list[int], laws: BlankLaws) -> Decision:
    """What stepwise decoding decides on a canvas: where, and as what."""
    selection = await seq.draw(most_confident(1), blanks, laws.law, laws.model_law)
    return selection.placements(blanks)[0]


def commit(seq: Canvas, choices: list[Decision], path: list[int], draft: Placement) -> None:
    """Decide the choices, each made at its node: all but the last agree with the draft."""
    matched = len(choices) - 1
    positions = [position for position, _ in choices]
    tokens = [token for _, token in choices]
    drafted = [token for _, token in draft]
    seq.fill(positions[:matched], tokens[:matched], "accepted", drafted, path)
    if seq.done:
        return
    reason = "decided"
    if draft:
        reason = "bonus" if matched == len(draft) else "resampled"
    seq.fill(positions[matched:], tokens[matched:], reason, branches=path[-1:])


async def next_draft(
    seq: Canvas, order: BlockOrder, last: LastNode, options: DraftTreeOptions
) -> list[Decision]:
    """The likeliest tokens of what is still blank, the most confident first: of the block, then of
    the one after it."""
    if seq.done or not options.drafts:
        return []
    blanks = last.blanks
    still = [p if seq.tokens[p] == BLANK else -1 for p in blanks]
    if not any(p >= 0 for p in still):
        return []
    ranked = await seq.draw(ranking(options.worth), still, last.model_law)
    in_order = [i for i in ranked.order if i < len(blanks) and still[i] >= 0]
    drafts = [(blanks[i], ranked.tokens[i]) for i in in_order]
    drafts.sort(key=lambda decision: order.number(decision[0]))
    return drafts[: min(options.drafts, ranked.worthwhile)]
