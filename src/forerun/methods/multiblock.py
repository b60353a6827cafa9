"""Multi-block decoding with rejection recycling (pcLLM, Algorithm 1): Jacobi iteration that works ahead and wastes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import cat

from forerun.accept import descend
from forerun.core import TAILS, Branching, Canvas, Tail
from forerun.drafters.recycled import Pool, path, tails, tree
from forerun.errors import BadOption
from forerun.methods.jacobi import Jacobi, guess
from forerun.parameters import check_between, check_whole
from forerun.registry import method


@dataclass(frozen=True)
class Multiblock(Jacobi):
    refill: bool = field(default=False, metadata={"help": "keep the window full; else a block shrinks as its tokens are decided"})
    blocks: int = field(default=2, metadata={"help": "blocks that are refined at once, K; 1 turns multi-block decoding off"})
    spawn: float = field(default=0.85, metadata={"help": "share of a block that must be right before the next is begun, r"})
    candidates: int = field(default=3, metadata={"help": "recycled runs judged beside the draft; 0 turns recycling off"})
    share: bool = field(default=False, metadata={"help": "recycle what other requests to this model rejected too (temperature 0)"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("blocks", self.blocks)
        check_between("spawn", self.spawn)
        check_whole("candidates", self.candidates, least=0)
        if self.refill and self.blocks > 1:
            raise BadOption(f"refill=True keeps one block full for ever: it needs blocks=1, not {self.blocks}.")
        if self.block * self.candidates > TAILS:
            raise BadOption(
                f"candidates={self.candidates} of block={self.block} tokens are more than the {TAILS} that fit beside a draft."
            )


@dataclass
class Block:
    """Tokens not yet decided: those that came out again as they went in (`sure`, though what stands before may be wrong), then
    the rest. Of the real-active block, the first, `sure` counts what is decided."""

    draft: list[int]
    sure: int = 0


@method("multiblock", guarantee="exact", reference="ar", options=Multiblock)
async def multiblock(
    seq: Canvas, target: Branching, block: int, start: str, refill: bool, blocks: int, spawn: float, candidates: int, share: bool
) -> None:
    """Refine up to K blocks in one forward, judge recycled runs beside the first, and keep the drafts of the blocks ahead.

    Only what follows the text with no gap is decided. A block that becomes the first one keeps its draft, and is judged in the same
    forward that finishes the block before it.
    """
    window: list[Block] = []
    after: list[int] = []
    pool = target.shelf.setdefault("recycled", Pool(block)) if shared(seq, share) else Pool(block)
    while not seq.done:
        if not window:
            window = [Block(filled(seq, after[:block], block, start))]
        elif refill:
            window[0].draft = filled(seq, window[0].draft, block, start)
        chain = [token for b in window for token in b.draft][: seq.remaining - 1]
        others = tails(chain, pool.after(int(seq.text[-1])), candidates, min(block, seq.remaining - 1))
        laws = await target.branches(seq, chain, others)  # lines 4, 5
        tokens, parents = tree(chain, others)
        node, token, *said = await seq.draw(descend, tokens, parents, cat(laws))  # line 7
        way = path(node, parents)
        commit(seq, way, token, chain, others, len(window[0].draft))
        after = said_after(node, len(way), chain, others, said)
        pool.add(chain[len(way) :])  # line 11: what was rejected, and what the model said instead
        pool.add([token, *after])
        window = advance(window, chain, after, said, len(way) + 1)  # lines 11, 15
        if window and len(window) < blocks and window[-1].sure >= math.ceil(spawn * block):  # line 14
            window.append(Block(guess(seq, [t for b in window for t in b.draft], block, start)))


def filled(seq: Canvas, draft: list[int], size: int, start: str) -> list[int]:
    return draft + guess(seq, draft, size - len(draft), start)


def shared(seq: Canvas, share: bool) -> bool:
    if share and seq.history.sampling.temperature > 0:
        raise BadOption(
            "share=True needs temperature 0: above it, what other requests left would change which sample a seed gives."
        )
    return share


def branch_of(node: int, chain: int, others: list[Tail]) -> int:
    """Which part of the answer speaks of what follows a node: 0 is the chain, i the tail i - 1."""
    branch, end = 0, chain
    while node > end:
        end += len(others[branch][1])
        branch += 1
    return branch


def commit(seq: Canvas, way: list[int], token: int, chain: Sequence[int], others: list[Tail], first: int) -> None:
    """Decide the tokens on the way into the tree and the one after it, each with where it came from: the first block, a block ahead
    of it, or what was recycled. What followed on the same line is what was rejected."""
    tokens, _ = tree(chain, others)
    branches = [branch_of(node, len(chain), others) for node in [0, *way]]
    node, branch = (way or [0])[-1], branches[-1]
    line = len(chain) + sum(len(own) for _, own in others[:branch]) if branch else max(node, min(first, len(chain)))
    rejected = tokens[node:line] or (list(others[0][1]) if others and not way else [])
    sources = ["recycled" if node > len(chain) else "accepted" if node <= first else "ahead" for node in way]
    if not way and rejected:
        seq.fill([], [], "accepted", drafted=rejected)
    for source in dict.fromkeys(sources):
        places = [i for i, s in enumerate(sources) if s == source]
        own = [tokens[way[i] - 1] for i in places]
        rest = rejected if source == sources[-1] else []
        seq.fill(seq.next(len(own)), own, source, drafted=[*own, *rest], branches=[branches[i] for i in places])
    if not seq.done:
        seq.fill(seq.next(1), [token], "resampled" if rejected else "bonus", branches=branches[-1:])


def said_after(node: int, taken: int, chain: list[int], others: list[Tail], said: list[int]) -> list[int]:
    """What the model said of the places behind the token just decided: along the tail that was taken, if one was and as far as it
    reaches, else along the chain."""
    along = said[taken + 1 : len(chain)]
    branch = branch_of(node, len(chain), others)
    if branch == 0:
        return along
    end = len(chain) + 1 + sum(len(own) for _, own in others[:branch])
    own = said[node + 1 : end]
    return own + along[len(own) :]


def advance(window: list[Block], chain: list[int], after: list[int], said: list[int], decided: int) -> list[Block]:
    """The blocks behind what was decided, their drafts as the model corrected them; those that are finished are gone."""
    left: list[Block] = []
    begin = 0
    for block in window:
        end = min(begin + len(block.draft), len(chain))
        if end > decided:
            if begin < decided or not left:  # the first one now: what is decided of it is sure
                first = begin == 0
                same = max(begin, decided)
                sure = (block.sure if first else 0) + max(decided - begin, 0)
                draft = after[same - decided : end - decided]
            else:
                same = next((i for i in range(begin + block.sure, end) if chain[i] != said[i]), end)
                sure, draft = same - begin, chain[begin:same] + said[same:end]
            left.append(Block(draft, sure))
        begin += len(block.draft)
    return left
