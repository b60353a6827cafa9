"""Self speculative decoding of masked diffusion models (Gao et al., 2025, Algorithm 1): stepwise
decoding in fewer forwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from torch import Tensor

from forerun.errors import BadOption, unknown
from forerun.families.block import BlockFiller
from forerun.families.masked import CanvasFiller
from forerun.methods.block_order import (
    BlockOptions,
    BlockOrder,
    CanvasBlockOrder,
    ModelBlockOrder,
    OrderedBlockOptions,
    stale_keys,
)
from forerun.options import check_between, check_whole
from forerun.probability.outcomes import Placement
from forerun.probability.selection import most_confident, ranking
from forerun.registry import method
from forerun.sequence.canvas import BLANK, Canvas
from forerun.sequence.question import BlankLaws

TREES = ("auto", "chain", "mixed", "likeliest")

Decision = tuple[int, int]  # (position, token)
SHARPNESS = 5  # how much likelier the surer of two blanks is to be decided first; measured


class Guess(NamedTuple):
    """A decision that may come next."""

    decision: Decision
    score: float  # what blanks are decided in the order of
    confidence: float
    block: int


class Tree(NamedTuple):
    """Canvases to look at, as what is placed on each, and which decision leads from which of them
    to which."""

    nodes: list[list[Decision]]
    leads: dict[tuple[int, Decision], int]


def joined(nodes: list[list[Decision]]) -> Tree:
    """A canvas does not know in which order it was filled: a decision leads to whichever canvas has
    just that one more."""
    number = {frozenset(placed): i for i, placed in enumerate(nodes)}
    leads = {}
    for i, placed in enumerate(nodes):
        for decision in placed:
            before = number.get(frozenset(placed) - {decision})
            if before is not None:
                leads[before, decision] = i
    return Tree(nodes, leads)


def chain(guesses: list[Guess], most: int) -> Tree:
    """The guesses in their order, one more on each canvas: N + 1 canvases."""
    draft = [guess.decision for guess in guesses[: most - 1]]
    return joined([draft[:i] for i in range(len(draft) + 1)])


def mixed(guesses: list[Guess], most: int) -> Tree:
    """Mixed order (section 5.2): each node but the last two also leads to its grandchild's draft,
    placed alone. In the paper nothing follows there. Here the chain goes on, once the draft that
    was passed over is chosen too."""
    draft = [guess.decision for guess in guesses[: max(most // 2, 1)]][: most - 1]
    nodes = [draft[:i] for i in range(len(draft) + 1)]
    return joined(nodes + [[*draft[:i], draft[i + 1]] for i in range(len(draft) - 1)])


def likeliest(guesses: list[Guess], depth: int, most: int) -> Tree:
    """The canvases that stepwise decoding is likeliest to come by, whatever the order."""
    reach: dict[tuple[Decision, ...], float] = {(): 1.0}
    nodes: list[list[Decision]] = []
    while reach and len(nodes) < most:
        placed = max(reach, key=lambda node: reach[node])
        chance = reach.pop(placed)
        nodes.append(list(placed))
        left = [guess for guess in guesses if guess.decision not in placed]
        if len(placed) == depth or not left:
            continue
        rivals = [guess for guess in left if guess.block == left[0].block]
        total = sum(guess.score**SHARPNESS for guess in rivals)
        for guess in rivals:
            more = {*placed, guess.decision}
            after = tuple(one.decision for one in guesses if one.decision in more)
            share = guess.score**SHARPNESS / total if total else 1 / len(rivals)
            if list(after) not in nodes:
                reach[after] = reach.get(after, 0.0) + chance * share
    return joined(nodes)


@dataclass(frozen=True)
class DraftTreeOptions:
    """Which decisions are guessed ahead."""

    drafts: int = field(
        default=4,
        metadata={"help": "drafted tokens N: so many decisions more than one per forward, at most"},
    )
    tree: str = field(
        default="auto",
        metadata={
            "help": "chain (N + 1 canvases), mixed (N - 1 more, for two decisions that come in the "
            "other order), likeliest (as many as `canvases` says), or auto: chain where rows cost "
            "time, as on a CPU or without a cache, and mixed on a GPU"
        },
    )
    canvases: int | None = field(
        default=None,
        metadata={"help": "tree likeliest: so many canvases at most; default: 4 N"},
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
        if self.canvases is not None:
            check_whole("canvases", self.canvases)
            if self.tree != "likeliest":
                raise BadOption(
                    f"canvases={self.canvases} needs tree='likeliest'; a {self.tree} tree has as "
                    f"many as its drafts need."
                )


@dataclass(frozen=True)
class SsdOptions(OrderedBlockOptions, DraftTreeOptions):
    def __post_init__(self) -> None:
        OrderedBlockOptions.__post_init__(self)
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
    guesses: list[Guess] = []
    while not seq.done:
        last = await verify(seq, order, guesses, options)
        guesses = await next_guesses(seq, order, last, options)


class LastNode(NamedTuple):
    """What the last decision of a forward looked at."""

    blanks: list[int]
    model_law: Tensor  # of those blanks


async def verify(
    seq: Canvas, order: BlockOrder, guesses: list[Guess], options: DraftTreeOptions
) -> LastNode:
    """One forward: decide what stepwise decoding would, as far as the guesses foresaw it and once
    more."""
    nodes, leads = plant_tree(guesses, order, options)
    drafted = max(nodes, key=len)
    seq.note_draft([position for position, _ in drafted], [token for _, token in drafted])
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
        choices.append(await stepwise_choice(seq, open_at[node], laws, order.by))
        if (node, choices[-1]) in leads:
            path.append(leads[node, choices[-1]])
    commit(seq, choices, path, drafted)
    order.decided(len(choices))
    return LastNode(look_at[path[-1]], answers[path[-1]].model_law)


def plant_tree(guesses: list[Guess], order: BlockOrder, options: DraftTreeOptions) -> Tree:
    """The canvases of one forward: as deep as decisions may follow each other in it, and as many as
    a lane has room for."""
    depth = max(min(options.drafts, order.ahead()), 0)
    most = order.most_canvases()
    if options.tree == "likeliest":
        return likeliest(guesses, depth, min(options.canvases or 4 * depth, most) or 1)
    if options.tree == "mixed" or (options.tree == "auto" and order.rows_are_cheap):
        return mixed(guesses[:depth], most)
    return chain(guesses[:depth], most)


async def stepwise_choice(
    seq: Canvas, blanks: list[int], laws: BlankLaws, by: str = "confidence"
) -> Decision:
    """What stepwise decoding decides on a canvas: where, and as what."""
    selection = await seq.draw(most_confident(1, by), blanks, laws.law, laws.model_law)
    return selection.placements(blanks)[0]


def commit(seq: Canvas, choices: list[Decision], path: list[int], draft: Placement) -> None:
    """Decide the choices, each made at its node: all but the last agree with the draft."""
    matched = len(choices) - 1
    positions = [position for position, _ in choices]
    tokens = [token for _, token in choices]
    missed = [token for position, token in draft if (position, token) not in choices[:matched]]
    drafted = [*tokens[:matched], *missed][: len(draft)]
    seq.fill(positions[:matched], tokens[:matched], "accepted", drafted, path)
    if seq.done:
        return
    reason = "decided"
    if draft:
        reason = "bonus" if matched == len(draft) else "resampled"
    seq.fill(positions[matched:], tokens[matched:], reason, branches=path[-1:])


async def next_guesses(
    seq: Canvas, order: BlockOrder, last: LastNode, options: DraftTreeOptions
) -> list[Guess]:
    """The likeliest tokens of what is still blank, in the order in which they should be decided:
    the blanks of the block, then those of the one after it, the most confident first. They end
    where the chance that all of them are right falls below `worth`."""
    if seq.done or not options.drafts:
        return []
    still = [p if seq.tokens[p] == BLANK else -1 for p in last.blanks]
    if not any(p >= 0 for p in still):
        return []
    likely = await seq.draw(ranking(order.by), still, last.model_law)
    columns = zip(still, likely.tokens, likely.score, likely.confidence)
    guesses = [
        Guess((position, token), score, confidence, order.number(position))
        for position, token, score, confidence in columns
        if position >= 0
    ]
    guesses.sort(key=lambda guess: (guess.block, -guess.score))
    chances = accumulate((guess.confidence for guess in guesses), mul)
    worthwhile = sum(chance >= options.worth for chance in chances)
    guesses = guesses[:worthwhile]
    fitting = set(seq.compatible([guess.decision for guess in guesses]))
    return [guess for guess in guesses if guess.decision in fitting]
