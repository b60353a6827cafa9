"""Self-speculative decoding of block diffusion models (Han et al., 2026, Algorithm 3): the model
drafts a block, and judges its own draft in blocks of one token, where a router finds that worth a
forward."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from torch import Tensor, cat

from forerun.drafters.adaptive import DraftLength, PayingLength
from forerun.errors import BadOption, unknown
from forerun.families.block import BlockFiller, BlockSpan
from forerun.methods.assd import ROWS_EACH, drafted_prefixes, judge, next_laws, still_open
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
from forerun.registry import Departure, method
from forerun.sequence.canvas import BLANK, Canvas
from forerun.sequence.question import BlankLaws

AHEAD = ("whole", "every")
ACCEPT = ("law", "published")

ALWAYS: dict[str, Any] = {"router": "span", "span": 1, "causal": "text"}  # with AR caching
HYSTERESIS: dict[str, Any] = {
    "router": "hysteresis",
    "score": "dynamic",
    "on": 1.0,
    "off": -5.0,
    "threshold": 0.9,
}
# Section 5: A is meant to be accurate, B to be fast. SDAR ran at temperature 1, the others at 0.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "sdar-1.7b-A": {"block": 4, "router": "span", "span": 2},
    "sdar-1.7b-B": {"block": 32, **ALWAYS},
    "sdar-4b-A": {"block": 16, **ALWAYS},
    "sdar-4b-B": {"block": 32, **ALWAYS},
    "sdar-8b-A": {"block": 4, "router": "score", "score": "static", "causal": "text"},
    "sdar-8b-B": {"block": 16, **ALWAYS},
    "fast-dllm-v2-A": {"block": 32, "sub_block": 4, "accept": "published", **HYSTERESIS},
    "fast-dllm-v2-B": {"block": 32, "sub_block": 16, "accept": "published", **HYSTERESIS},
    "fast-dllm-v2-C": {"block": 32, "accept": "published", "span": 8},
    # The published score threshold of -5 with a static cost of 4 is never missed: always verified.
    "llada2.1-quality": {
        "block": 32,
        "threshold": 0.7,
        "edit": 0.5,
        "post_edits": 0,
        "accept": "published",
    },
    "llada2.1-conservative": {
        "block": 32,
        "threshold": 0.95,
        "edit": 0.9,
        "post_edits": 0,
        "accept": "published",
    },
}


@dataclass(frozen=True)
class S2d2Options(EditingOptions, RoutingOptions):
    ratio_power: float = field(
        default=1.0,
        metadata={
            "help": "raise acceptance ratios to this power: below 1 forgives, above 1 doubts"
        },
    )

    accept: str = field(
        default="law",
        metadata={
            "help": "law: ratios of the laws that tokens are drawn from; published: as the "
            "authors' code, at temperature 0 too ratios of the laws at temperature 1, so that what "
            "is written there is random"
        },
    )
    config: str | None = field(
        default=None,
        metadata={"help": "a configuration of the paper by name, such as sdar-8b-A"},
    )

    def __post_init__(self) -> None:
        EditingOptions.__post_init__(self)
        RoutingOptions.__post_init__(self)
        check_positive("ratio_power", self.ratio_power)
        if self.accept not in ACCEPT:
            raise unknown("accept", self.accept, ACCEPT)
        if self.config is not None:
            self.configured()

    def configured(self) -> S2d2Options:
        """These options, or those of the configuration that they name."""
        if self.config is None:
            return self
        if self.config not in CONFIGURATIONS:
            raise unknown("config", self.config, CONFIGURATIONS)
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in CONFIGURATIONS[self.config].items():
            if given[name] not in (value, DEFAULTS[name]):
                raise BadOption(
                    f"{name}={given[name]!r} is not what config={self.config!r} has ({value!r}): "
                    f"leave one of them out."
                )
        return replace(self, **CONFIGURATIONS[self.config], config=None)

    @property
    def rule(self) -> VerdictRule:
        return rejection if self.ratio_power == 1 else tempered_ratio(self.ratio_power)


DEFAULTS = {field.name: field.default for field in fields(S2d2Options)}


def published_acceptance(options: S2d2Options) -> Departure | None:
    """The authors' own rule is another one at temperature 0."""
    if options.configured().accept == "law":
        return None
    return Departure("accept", "accept=published draws at temperature 0 too, from residuals")


@method(
    "s2d2",
    guarantee="approximate",
    reference="ar",
    reason="drafts read the text in blocks, and what the router leaves unverified is decided by "
    "confidence",
    left_to_right=False,
    departs=published_acceptance,
)
async def s2d2(seq: Canvas, target: BlockFiller, options: S2d2Options) -> None:
    """Draft the block; verify its first run of blanks at block size 1, or keep the confident
    tokens: a router says which."""
    options = options.configured()
    acceptance = Acceptance.of(options, seq.history.sampling.temperature)
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
            run = RunDraft(blanks, draft.tokens[: draft.view.run], laws)
            await judge_run(seq, target, run, span, acceptance)  # lines 10-25
        else:
            seq.place(draft.confident, "decided")  # lines 27-29
        await editor.finish(span)


class Acceptance(NamedTuple):
    """How a run is judged: by which rule, and whether by the model's own laws."""

    rule: VerdictRule
    by_model_law: bool

    @classmethod
    def of(cls, options: S2d2Options, temperature: float) -> Acceptance:
        by_model_law = options.accept == "published" and temperature == 0
        if options.ratio_power != 1 and temperature == 0 and not by_model_law:
            raise BadOption(
                f"ratio_power={options.ratio_power:g} does nothing at temperature 0, where a "
                f"ratio is 0 or 1: use a temperature, or accept='published'."
            )
        return cls(options.rule, by_model_law)


class RunDraft(NamedTuple):
    """A draft of the first run of blanks, and the laws that it was drawn from."""

    blanks: list[int]
    tokens: list[int]
    laws: BlankLaws


async def judge_run(
    seq: Canvas, target: BlockFiller, draft: RunDraft, span: BlockSpan, acceptance: Acceptance
) -> None:
    """Lines 10-25: keep the leading tokens that rejection accepts, and replace the first that it
    does not."""
    blanks = draft.blanks
    x = seq.up_to_end(draft.tokens)
    q = draft.laws.model_law if acceptance.by_model_law else draft.laws.law
    seq.note_draft(blanks, x, q)
    p = await target.verdict(seq, x, span, own=acceptance.by_model_law)
    # There is no row for a token after the run, which has a token already or belongs to the next
    # block: the token drawn there is unused.
    verdict = await seq.draw(acceptance.rule, x, q[: len(x)], cat([p, p[-1:]]))
    n = verdict.accepted
    seq.fill(blanks[:n], x[:n], "accepted", drafted=x)
    if n < len(x) and not seq.done:
        seq.fill(blanks[n : n + 1], [verdict.token], "resampled")


@dataclass(frozen=True)
class S2d2ExactOptions(DraftLength):
    k: int | None = field(
        default=None,
        metadata={
            "help": "tokens drafted per forward; not given: at temperature 0 as many as pay here, "
            "else 4"
        },
    )
    ahead: str = field(
        default="whole",
        metadata={
            "help": "when the next draft is known already: if this one is accepted whole, or every "
            "time, for many more rows"
        },
    )
    usual = 4

    def __post_init__(self) -> None:
        if self.k is not None:
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
    length = PayingLength(seq, target, options, rows_each=ROWS_EACH)
    while seq.goes_on():
        prefixes = drafted_prefixes(len(x), options.ahead)
        p, *laws = await target.verdict_and_drafts(seq, x, length(), prefixes)
        n = await judge(seq, x, q, p, rejection)
        begin = seq.filled
        q = next_laws(n, len(x), laws)
        x = []
        if seq.goes_on():
            q = still_open(q, seq.filled - begin)
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
