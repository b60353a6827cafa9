"""Self-speculative decoding of block diffusion models (Han et al., 2026, Algorithm 3): the model drafts a block, and judges its own
draft in blocks of one token, where a router finds that worth a forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, cat

from forerun.accept import each, rejection
from forerun.accept_lossy import tempered_ratio
from forerun.core import BLANK, BlockWise, Canvas, Frame
from forerun.errors import unknown
from forerun.methods.assd import judge, upto_end
from forerun.methods.block import Editing, Editor
from forerun.methods.ssd import BlockSsd, choice, next_draft, verify
from forerun.parameters import check_positive, check_whole
from forerun.registry import method
from forerun.routers import Routing, Watch
from forerun.walk import BlockWalk


@dataclass(frozen=True)
class S2d2(Editing, Routing):
    ratio_power: float = field(
        default=1.0, metadata={"help": "raise acceptance ratios to this power: below 1 forgives, above 1 doubts"}
    )

    def __post_init__(self) -> None:
        Editing.__post_init__(self)
        Routing.__post_init__(self)
        check_positive("ratio_power", self.ratio_power)


@method(
    "s2d2",
    guarantee="approximate",
    reference="ar",
    options=S2d2,
    reason="drafts read the text in blocks, and what the router leaves unverified is decided by confidence",
)
async def s2d2(seq: Canvas, target: BlockWise, ratio_power: float, edit: float | None, post_edits: int, **options: Any) -> None:
    """Draft the block; verify its first run of blanks at block size 1, or keep the confident tokens: a router says which."""
    routing = Routing.taken_from(options)
    walk = BlockWalk(seq, target, **options)
    editor, watch = Editor(seq, target, walk, edit, post_edits), Watch(seq, routing, walk.part)
    rule = rejection if ratio_power == 1 else tempered_ratio(ratio_power)
    while not seq.done:
        blanks, frame, alone = walk.open(), walk.frame(), walk.alone
        law, own = await editor.ask(blanks)  # line 5
        found = await watch.draft(blanks, law, own)  # lines 6-8
        if not alone and watch.verify(found.sight):  # line 9
            await judged(seq, target, blanks, found.tokens[: found.sight.run], law, frame, rule)  # lines 10-25
        else:
            seq.decide(found.confident, "decided")  # lines 27-29
        await editor.finish(frame)


async def judged(
    seq: Canvas, target: BlockWise, blanks: list[int], x: list[int], q: Tensor, frame: Frame, rule: Callable[..., Any]
) -> None:
    """Lines 10-25: the leading tokens that rejection keeps, and the one that replaces the first it does not."""
    x = upto_end(seq, x)
    p = await target.verdict(seq, x, frame)
    # No row for a token after the run, which has a token already or belongs to the next block: what is drawn there is thrown away.
    n, token = await seq.draw(rule, x, q[: len(x)], cat([p, p[-1:]]))
    seq.fill(blanks[:n], x[:n], "accepted", drafted=x)
    if n < len(x) and not seq.done:
        seq.fill(blanks[n : n + 1], [token], "resampled")


AHEAD = ("whole", "every")


@dataclass(frozen=True)
class Exact:
    k: int = field(default=4, metadata={"help": "tokens drafted per forward; more where rows are free, as on a GPU"})
    ahead: str = field(
        default="whole",
        metadata={"help": "when the next draft is known already: if this one is accepted whole, or every time, for many more rows"},
    )

    def __post_init__(self) -> None:
        check_whole("k", self.k, most=16)
        if self.ahead not in AHEAD:
            raise unknown("ahead", self.ahead, AHEAD)


@method("s2d2-exact", guarantee="exact", reference="ar", options=Exact)
async def s2d2_exact(seq: Canvas, target: BlockWise, k: int, ahead: str) -> None:
    """Always verified, all text read as at block size 1, draft and verdict in one forward: block-size-1 decoding, only faster.

    A verdict's rows for what it accepts are the cache, and masks behind the chain draft the next block as they go: every forward
    decides a token at least, and none is spent on drafting alone.
    """
    x: list[int] = []
    q: Tensor | None = None
    while not seq.done:
        p, *laws = await target.outlook(seq, x, k, range(len(x) + 1) if ahead == "every" else [len(x)])
        q = await judge(seq, x, q, p, rejection, ahead, laws)
        x = []
        if q is not None and not seq.done:
            x = upto_end(seq, (await seq.draw(each, seq.next(len(q)), q))[: len(q)])[: seq.remaining - 1]
        q = q[: len(x)] if q is not None and x else None


@dataclass(frozen=True)
class Hybrid(BlockSsd, Routing):
    def __post_init__(self) -> None:
        BlockSsd.__post_init__(self)
        Routing.__post_init__(self)


@method(
    "s2d2-canvases",
    guarantee="approximate",
    reference="block-stepwise",
    options=Hybrid,
    reason="what the router leaves unverified is decided by confidence",
)
async def s2d2_canvases(seq: Canvas, target: BlockWise, drafts: int, tree: str, worth: float, **options: Any) -> None:
    """S2D2's routers over SSD's verdict: what stepwise decoding would do, several decisions at once where a chain of canvases
    foresaw them, or the confident tokens. Neither costs a second forward."""
    routing = Routing.taken_from(options)
    walk = BlockWalk(seq, target, **options)
    watch = Watch(seq, routing, walk.part)
    guesses: list[tuple[int, int]] = []
    while not seq.done:
        if guesses:
            blanks, own = await verify(seq, target, walk, guesses, drafts, tree)
            verified = await worth_verifying(seq, watch, blanks, own)
        else:
            blanks = walk.open()
            [(law, own)] = await walk.ask(target, [blanks], [()])
            found = await watch.draft(blanks, law, own)
            verified = watch.verify(found.sight)
            seq.decide([await choice(seq, blanks, law, own)] if verified else found.confident, "decided")
        guesses = []
        if verified and not seq.done:
            guesses = (await next_draft(seq, walk, blanks, own, drafts, worth))[: walk.ahead()]


async def worth_verifying(seq: Canvas, watch: Watch, blanks: list[int], own: Tensor) -> bool:
    """What the router says of the blanks that a verdict left; of the next block nothing is known yet."""
    left = [i for i, p in enumerate(blanks) if seq.canvas[p] == BLANK]
    return bool(left) and not seq.done and watch.verify(await watch.look([blanks[i] for i in left], own[left]))
