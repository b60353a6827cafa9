"""Self-speculative decoding of block diffusion models (Han et al., 2026, Algorithm 3): the model
drafts a block, and judges its own draft in blocks of one token, where a router finds that worth a
forward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, cat

from forerun.errors import unknown
from forerun.families.block import BlockFiller, BlockSpan
from forerun.methods.assd import drafted_prefixes, judge, next_laws
from forerun.methods.block import EditingOptions, Editor
from forerun.methods.block_order import ModelBlockOrder
from forerun.methods.routers import RouterDriver, RoutingOptions
from forerun.methods.ssd import (
    BlockSsdOptions,
    Guess,
    LastNode,
    next_guesses,
    stepwise_choice,
    verify,
)
from forerun.options import check_positive, check_whole
from forerun.probability.acceptance import VerdictRule, rejection, sample_each
from forerun.probability.lossy import tempered_ratio
from forerun.registry import method
from forerun.sequence.canvas import BLANK, Canvas

AHEAD = ("whole", "every")


@dataclass(frozen=True)
class S2d2Options(EditingOptions, RoutingOptions):
    ratio_power: float = field(
        default=1.0,
        metadata={
            "help": "raise acceptance ratios to this power: below 1 forgives, above 1 doubts"
        },
    )

    def __post_init__(self) -> None:
        EditingOptions.__post_init__(self)
        RoutingOptions.__post_init__(self)
        check_positive("ratio_power", self.ratio_power)

    @property
    def rule(self) -> VerdictRule:
        return rejection if self.ratio_power == 1 else tempered_ratio(self.ratio_power)


@method(
    "s2d2",
    guarantee="approximate",
    reference="ar",
    reason="drafts read the text in blocks, and what the router leaves unverified is decided by "
    "confidence",
)
async def s2d2(seq: Canvas, target: BlockFiller, options: S2d2Options) -> None:
    """Draft the block; verify its first run of blanks at block size 1, or keep the confident
    tokens: a router says which."""
    order = ModelBlockOrder(seq, target, options)
    editor = Editor(seq, target, order, options)
    driver = RouterDriver(seq, options, order.part)
    while not seq.done:
        blanks = order.open()
        span = order.span()
        alone = order.alone
        laws = await editor.ask(blanks)  # line 5
        draft = await driver.draft(blanks, laws)  # lines 6-8
        if not alone and driver.verify(draft.view):  # line 9
            run = RunDraft(blanks, draft.tokens[: draft.view.run], laws.law)
            await judge_run(seq, target, run, span, options.rule)  # lines 10-25
        else:
            seq.place(draft.confident, "decided")  # lines 27-29
        await editor.finish(span)


class RunDraft(NamedTuple):
    """A draft of the first run of blanks, and the laws that it was drawn from."""

    blanks: list[int]
    tokens: list[int]
    q: Tensor


async def judge_run(
    seq: Canvas, target: BlockFiller, draft: RunDraft, span: BlockSpan, rule: VerdictRule
) -> None:
    """Lines 10-25: keep the leading tokens that rejection accepts, and replace the first that it
    does not."""
    blanks = draft.blanks
    x = seq.up_to_end(draft.tokens)
    p = await target.verdict(seq, x, span)
    # There is no row for a token after the run, which has a token already or belongs to the next
    # block: the token drawn there is unused.
    verdict = await seq.draw(rule, x, draft.q[: len(x)], cat([p, p[-1:]]))
    n = verdict.accepted
    seq.fill(blanks[:n], x[:n], "accepted", drafted=x)
    if n < len(x) and not seq.done:
        seq.fill(blanks[n : n + 1], [verdict.token], "resampled")


@dataclass(frozen=True)
class S2d2ExactOptions:
    k: int = field(
        default=4,
        metadata={"help": "tokens drafted per forward; more where rows are free, as on a GPU"},
    )
    ahead: str = field(
        default="whole",
        metadata={
            "help": "when the next draft is known already: if this one is accepted whole, or every "
            "time, for many more rows"
        },
    )

    def __post_init__(self) -> None:
        check_whole("k", self.k, most=16)
        if self.ahead not in AHEAD:
            raise unknown("ahead", self.ahead, AHEAD)


@method("s2d2-exact", guarantee="exact", reference="ar")
async def s2d2_exact(seq: Canvas, target: BlockFiller, options: S2d2ExactOptions) -> None:
    """Always verified, all text read as at block size 1, draft and verdict in one forward:
    block-size-1 decoding, only faster.

    A verdict's rows for what it accepts are the cache, and masks behind the chain draft the next
    block as they go: every forward decides a token at least, and none is spent on drafting alone.
    """
    x: list[int] = []
    q: Tensor | None = None
    while not seq.done:
        prefixes = drafted_prefixes(len(x), options.ahead)
        p, *laws = await target.verdict_and_drafts(seq, x, options.k, prefixes)
        n = await judge(seq, x, q, p, rejection)
        q = next_laws(n, len(x), laws)
        x = []
        if q is not None and not seq.done:
            drawn = await seq.draw(sample_each, seq.next(len(q)), q)
            x = seq.up_to_end(drawn.tokens[: len(q)])[: seq.remaining - 1]
        q = q[: len(x)] if q is not None and x else None


@dataclass(frozen=True)
class S2d2CanvasesOptions(BlockSsdOptions, RoutingOptions):
    def __post_init__(self) -> None:
        BlockSsdOptions.__post_init__(self)
        RoutingOptions.__post_init__(self)


@method(
    "s2d2-canvases",
    guarantee="approximate",
    reference="block-stepwise",
    reason="what the router leaves unverified is decided by confidence",
)
async def s2d2_canvases(seq: Canvas, target: BlockFiller, options: S2d2CanvasesOptions) -> None:
    """S2D2's routers over SSD's verdict: what stepwise decoding would do, several decisions at once
    where a chain of canvases foresaw them, or the confident tokens. Neither costs a second
    forward."""
    order = ModelBlockOrder(seq, target, options)
    driver = RouterDriver(seq, options, order.part)
    guesses: list[Guess] = []
    while not seq.done:
        if guesses:
            last = await verify(seq, order, guesses, options)
            verified = await worth_verifying(seq, driver, last)
        else:
            blanks = order.open()
            [laws] = await order.ask([blanks], [()])
            draft = await driver.draft(blanks, laws)
            verified = driver.verify(draft.view)
            decisions = draft.confident
            if verified:
                decisions = [await stepwise_choice(seq, blanks, laws)]
            seq.place(decisions, "decided")
            last = LastNode(blanks, laws.model_law)
        guesses = []
        if verified and not seq.done:
            guesses = await next_guesses(seq, order, last, options)


async def worth_verifying(seq: Canvas, driver: RouterDriver, last: LastNode) -> bool:
    """What the router says of the blanks that a verdict left; of the next block nothing is known
    yet."""
    left = [i for i, position in enumerate(last.blanks) if seq.tokens[position] == BLANK]
    if not left or seq.done:
        return False
    view = await driver.look([last.blanks[i] for i in left], last.model_law[left])
    return driver.verify(view)
