"""Multi-block decoding with rejection recycling (pcLLM, Algorithm 1): Jacobi iteration that works
ahead and wastes nothing."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby

from forerun.drafters.recycled import RunPool, path_to, tails_of, tree_of
from forerun.errors import BadOption
from forerun.families.causal import Tail, TreeScorer
from forerun.methods.jacobi import JacobiOptions, guess
from forerun.options import check_between, check_flag, check_whole
from forerun.probability.outcomes import Descent
from forerun.registry import method
from forerun.sequence.canvas import Canvas


@dataclass(frozen=True)
class MultiblockOptions(JacobiOptions):
    block: int = field(
        default=16, metadata={"help": "tokens that are guessed at once (n in the paper)"}
    )
    refill: bool = field(
        default=False,
        metadata={"help": "keep the window full; else a block shrinks as its tokens are decided"},
    )
    blocks: int = field(
        default=2,
        metadata={"help": "blocks that are refined at once, K; 1 turns multi-block decoding off"},
    )
    spawn: float = field(
        default=0.85,
        metadata={"help": "share of a block that must be right before the next is begun, r"},
    )
    candidates: int = field(
        default=3,
        metadata={"help": "recycled runs judged beside the draft; 0 turns recycling off"},
    )
    share: bool = field(
        default=False,
        metadata={"help": "recycle what other requests to this model rejected too (temperature 0)"},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("block", self.block)
        check_whole("blocks", self.blocks)
        check_between("spawn", self.spawn)
        check_whole("candidates", self.candidates, least=0)
        if self.refill and self.blocks > 1:
            raise BadOption(
                f"refill=True keeps one block full for ever: it needs blocks=1, not {self.blocks}."
            )
        check_flag("share", self.share)


@dataclass
class BlockDraft:
    """Tokens of a block that are not yet decided.

    The first `stable` came out again as they went in, though what stands before them may be wrong.
    Of the first block, `stable` counts what is decided.
    """

    tokens: list[int]
    stable: int = 0


class GuessTree:
    """A chain of guesses and the tails that leave it. Node 0 is the text, node i is token i - 1."""

    def __init__(self, chain: Sequence[int], tails: Sequence[Tail]):
        self.chain = list(chain)
        self.tails = list(tails)

    @cached_property  # first looked at while the model works
    def _tree(self) -> tuple[list[int], list[int], list[int]]:
        lengths = [len(tail.tokens) for tail in self.tails]
        ends = [*accumulate(lengths, initial=len(self.chain))]
        return (*tree_of(self.chain, self.tails), ends)

    @property
    def tokens(self) -> list[int]:
        return self._tree[0]

    @property
    def parents(self) -> list[int]:
        return self._tree[1]

    def branch_of(self, node: int) -> int:
        """Which branch of the answer speaks of what follows a node: 0 is the chain, i the tail
        i - 1."""
        return bisect_left(self._tree[2], node)

    def end_of(self, branch: int) -> int:
        """The last node of a branch."""
        return self._tree[2][branch]


@method("multiblock", guarantee="exact", reference="ar")
async def multiblock(seq: Canvas, target: TreeScorer, options: MultiblockOptions) -> None:
    """Refine up to K blocks in one forward, judge recycled runs beside the first, and keep the
    drafts of the blocks ahead.

    Only what follows the text with no gap is decided. A block that becomes the first one keeps its
    draft, and is judged in the same forward that finishes the block before it.
    """
    window: list[BlockDraft] = []
    after: list[int] = []
    pool = run_pool(seq, target, options)
    decided = seq.filled
    while seq.goes_on():
        window = behind(window, seq.filled - decided)
        after = after[seq.filled - decided :]
        if not window:
            window = [BlockDraft(filled(seq, after[: options.block], options))]
        elif options.refill:
            window[0].tokens = filled(seq, window[0].tokens, options)
        chain = [token for block in window for token in block.tokens][: seq.remaining - 1]
        runs = pool.after(int(seq.text[-1]))
        longest = min(options.block, seq.remaining - 1)
        tails = tails_of(chain, runs, options.candidates, longest)
        tree = GuessTree(chain, target.fitting(seq, chain, tails))
        # lines 4, 5 and 7
        descent = await target.descended(seq, chain, tree.tails, tree, meanwhile=pool.index)
        taken = commit(seq, tree, descent, len(window[0].tokens))
        decided = seq.filled
        after = said_after(tree, descent, taken)
        pool.add(chain[taken:])  # line 11: what was rejected, and what the model said instead
        pool.add([descent.token, *after])
        window = advance(window, chain, after, descent.likeliest, taken + 1)  # lines 11, 15
        stable_enough = math.ceil(options.spawn * options.block)
        if window and len(window) < options.blocks and window[-1].stable >= stable_enough:
            ahead = [token for block in window for token in block.tokens]  # line 14
            window.append(BlockDraft(guess(seq, ahead, options.block, options.start)))


def filled(seq: Canvas, draft: list[int], options: MultiblockOptions) -> list[int]:
    """A draft with guesses up to the size of a block."""
    return draft + guess(seq, draft, options.block - len(draft), options.start)


def run_pool(seq: Canvas, target: TreeScorer, options: MultiblockOptions) -> RunPool:
    """Where rejected runs are kept: the request's own pool, or the model's."""
    if not options.share:
        return RunPool(options.block)
    if seq.history.sampling.temperature > 0:
        raise BadOption(
            "share=True needs temperature 0: above it, what other requests left would change which "
            "sample a seed gives."
        )
    return target.shared_state.setdefault("recycled", RunPool(options.block))


def commit(seq: Canvas, tree: GuessTree, descent: Descent, first_block: int) -> int:
    """Decide the tokens on the way into the tree and the one after it; how many were guessed.

    Each is recorded with where it came from: the first block, a block ahead of it, or a recycled
    run. What followed on the same branch is what was rejected.
    """
    path = path_to(descent.node, tree.parents)
    rejected = rejected_after(tree, path, first_block)
    guessed = [*(tree.tokens[node - 1] for node in path), *rejected]
    seq.note_draft(seq.next(len(guessed)), guessed)
    if not path and rejected:
        seq.fill([], [], "accepted", drafted=rejected)
    for source, steps in groupby(path, lambda node: source_of(node, tree, first_block)):
        nodes = [*steps]
        tokens = [tree.tokens[node - 1] for node in nodes]
        drafted = [*tokens, *rejected] if nodes[-1] == descent.node else tokens
        where = [tree.branch_of(tree.parents[node - 1]) for node in nodes]
        seq.fill(seq.next(len(tokens)), tokens, source, drafted=drafted, branches=where)
    if not seq.done:
        reason = "resampled" if rejected else "bonus"
        seq.append(descent.token, reason, branches=[tree.branch_of(descent.node)])
    return len(path)


def source_of(node: int, tree: GuessTree, first_block: int) -> str:
    if node > len(tree.chain):
        return "recycled"
    return "accepted" if node <= first_block else "ahead"


def rejected_after(tree: GuessTree, path: list[int], first_block: int) -> list[int]:
    """The guesses that followed the last accepted one on its branch; if none was accepted and there
    is no chain, the first tail."""
    node = path[-1] if path else 0
    branch = tree.branch_of(node)
    if branch:
        end = tree.end_of(branch)
    else:
        end = max(node, min(first_block, len(tree.chain)))
    rejected = tree.tokens[node:end]
    if not rejected and tree.tails and not path:
        return list(tree.tails[0].tokens)
    return rejected


def said_after(tree: GuessTree, descent: Descent, taken: int) -> list[int]:
    """What the model said of the places behind the token just decided: along the tail that was
    taken, as far as it reaches, else along the chain."""
    along_chain = descent.likeliest[taken + 1 : len(tree.chain)]
    branch = tree.branch_of(descent.node)
    if branch == 0:
        return along_chain
    along_tail = descent.likeliest[descent.node + 1 : tree.end_of(branch) + 1]
    return along_tail + along_chain[len(along_tail) :]


def advance(
    window: list[BlockDraft],
    chain: list[int],
    after: list[int],
    said: list[int],
    decided: int,
) -> list[BlockDraft]:
    """The blocks behind what was decided, their drafts as the model corrected them; those that are
    finished are gone."""
    left: list[BlockDraft] = []
    begin = 0
    for block in window:
        end = min(begin + len(block.tokens), len(chain))
        if end > decided:
            if begin < decided or not left:  # the first one now: what is decided of it is stable
                stable_before = block.stable if begin == 0 else 0
                stable = stable_before + max(decided - begin, 0)
                tokens = after[max(begin, decided) - decided : end - decided]
            else:
                same = _first_change(chain, said, begin + block.stable, end)
                stable = same - begin
                tokens = chain[begin:same] + said[same:end]
            left.append(BlockDraft(tokens, stable))
        begin += len(block.tokens)
    return left


def behind(window: list[BlockDraft], decided: int) -> list[BlockDraft]:
    """The blocks behind some tokens more that are decided, though nobody guessed them."""
    left: list[BlockDraft] = []
    for block in window:
        gone = min(decided, len(block.tokens))
        decided -= gone
        if gone < len(block.tokens):
            left.append(BlockDraft(block.tokens[gone:], block.stable + gone))
    return left


def _first_change(chain: list[int], said: list[int], start: int, end: int) -> int:
    for i in range(start, end):
        if chain[i] != said[i]:
            return i
    return end
