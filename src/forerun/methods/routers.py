"""When is a verdict worth its forward? Estimates of how much of a draft will be accepted, and
policies that decide by them (Han et al., 2026, section 4.3 and Algorithm 4).

B sequences, N open blanks, V vocabulary. A router looks at the model's own laws of the blanks and
never at the tokens that were drawn from them: a decision that knew the draft would bias what
verification makes of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from forerun import registry
from forerun.errors import BadOption, unknown
from forerun.options import check_between, check_number, check_positive, check_whole
from forerun.probability.acceptance import Sampler, rule_factory
from forerun.probability.outcomes import Outcome
from forerun.probability.selection import confident, reaches, sample_with_confidence
from forerun.sequence.canvas import Canvas
from forerun.sequence.question import BlankLaws

SCORES = ("static", "dynamic")
WITHOUT_STRENGTH = ("renyi", "random")  # estimators without a number


def _normalised_entropy(law_BNV: Tensor) -> Tensor:
    return torch.special.entr(law_BNV).sum(-1) / math.log(law_BNV.shape[-1])


def _margin(law_BNV: Tensor) -> Tensor:
    first, second = law_BNV.topk(2, -1).values.unbind(-1)
    return first - second


def _pseudo_random(where_BN: Tensor) -> Tensor:
    """Numbers in [0, 1) that look random: the multiples of the golden ratio."""
    return (where_BN * 0.6180339887498949) % 1.0


def _by_entropy(law: Tensor, where: Tensor, beta: float) -> Tensor:
    return torch.exp(-beta * _normalised_entropy(law))


def _by_margin(law: Tensor, where: Tensor, least: float) -> Tensor:
    return (_margin(law) >= least).to(law.dtype)


def _by_confidence(law: Tensor, where: Tensor, power: float) -> Tensor:
    return law.amax(-1) ** power


def _by_renyi(law: Tensor, where: Tensor, _: float) -> Tensor:
    return law.square().sum(-1)


def _by_entropy_limit(law: Tensor, where: Tensor, most: float) -> Tensor:
    return (_normalised_entropy(law) < most).to(law.dtype)


def _by_chance(law: Tensor, where: Tensor, _: float) -> Tensor:
    return _pseudo_random(where).to(law.dtype)


class Estimator(NamedTuple):
    """How likely a drafted token is to be accepted, from the model's law, the position and one
    number; and that number's default (appendix A.5)."""

    estimate: Callable[[Tensor, Tensor, float], Tensor]
    default_strength: float


ESTIMATORS: dict[str, Estimator] = {
    "entropy": Estimator(_by_entropy, 1.0),
    "margin": Estimator(_by_margin, 0.1),
    "confidence": Estimator(_by_confidence, 0.5),
    "renyi": Estimator(_by_renyi, 1.0),
    "hard-entropy": Estimator(_by_entropy_limit, 0.2),
    "random": Estimator(_by_chance, 1.0),
}


@dataclass(frozen=True)
class RoutingOptions:
    """The options of every method that asks a router."""

    threshold: float = field(
        default=0.9,
        metadata={
            "help": "unverified: decide blanks at least this confident, and the surest anyway; 1: "
            "that alone"
        },
    )
    router: str = field(
        default="span",
        metadata={"help": "who decides when to verify: span, score, hysteresis or bandit"},
    )
    span: int = field(
        default=1,
        metadata={"help": "router span: verify runs of at least so many blanks; 1 verifies always"},
    )
    estimator: str = field(
        default="entropy",
        metadata={
            "help": "how acceptance is foreseen: entropy, margin, confidence, renyi, hard-entropy "
            "or random"
        },
    )
    strength: float | None = field(
        default=None, metadata={"help": "the estimator's one number, if not its default"}
    )
    score: str | None = field(
        default=None,
        metadata={
            "help": "expected accepted tokens less the cost: static, or dynamic (times the "
            "confident blanks); default: static, and dynamic for hysteresis"
        },
    )
    cost: float = field(default=1.0, metadata={"help": "what a verdict costs, in accepted tokens"})
    enough: float = field(default=0.0, metadata={"help": "router score: verify from this score on"})
    # The paper's (1 and -5, or -1) never turn off on our models, whose blanks are seldom confident.
    on: float = field(
        default=2.0, metadata={"help": "router hysteresis: begin to verify from this score on"}
    )
    off: float = field(default=1.0, metadata={"help": "router hysteresis: stop below this score"})
    explore: float = field(
        default=0.5,
        metadata={"help": "router bandit: how much it tries what it knows little of"},
    )
    bins: str = field(
        default="2,2,2",
        metadata={
            "help": "router bandit: parts of run length, progress and entropy that it tells apart"
        },
    )

    def __post_init__(self) -> None:
        registry.get("routers", self.router)
        if self.estimator not in ESTIMATORS:
            raise unknown("estimator", self.estimator, ESTIMATORS)
        if self.score not in (None, *SCORES):
            raise unknown("score", self.score, SCORES)
        check_whole("span", self.span)
        check_between("threshold", self.threshold)
        if self.strength is not None:
            check_positive("strength", self.strength)
            if self.estimator in WITHOUT_STRENGTH:
                raise BadOption(
                    f"strength={self.strength:g}: the estimator {self.estimator!r} has none."
                )
        for name in ("cost", "enough", "on", "off"):
            check_number(name, getattr(self, name))
        check_between("explore", self.explore, most=math.inf)
        if self.off > self.on:
            raise BadOption(f"off={self.off:g} must not be above on={self.on:g}.")
        parse_bins(self.bins)

    @property
    def cost_per_confident_blank(self) -> bool:
        """Is the cost one per blank that confidence alone would decide?"""
        if self.score is None:
            return self.router == "hysteresis"
        return self.score == "dynamic"


def parse_bins(bins: object) -> tuple[int, int, int]:
    parts = str(bins).split(",")
    if len(parts) != 3 or not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise BadOption(f"bins={bins!r} must be three whole numbers, 1 or more, as in 2,2,2.")
    a, b, c = (int(part) for part in parts)
    return a, b, c


@dataclass(frozen=True)
class RouterView:
    """What a router may look at."""

    run: int  # blanks that a verdict would judge
    block: int  # tokens of the block
    blanks: int  # of the block
    expected: float  # tokens of the draft that should be accepted (equation 5)
    confident: int  # blanks that confidence alone would decide
    entropy: float  # of the run's laws, from 0 to 1

    def score(self, options: RoutingOptions) -> float:
        """Equation 6."""
        times = self.confident if options.cost_per_confident_blank else 1
        return self.expected - options.cost * times


class Router(Protocol):
    """Decides, forward by forward, for one sequence."""

    def verify(self, view: RouterView) -> bool:
        """Is a verdict worth its forward now?"""
        ...

    def learn(self, decided: int, forwards: int) -> None:
        """The last decision led to so many decided tokens in so many forwards."""
        ...


@dataclass
class SpanRouter:
    """Verify runs of at least `span` blanks."""

    options: RoutingOptions

    def verify(self, view: RouterView) -> bool:
        return view.run >= self.options.span

    def learn(self, decided: int, forwards: int) -> None:
        pass


class ScoreRouter(SpanRouter):
    """Verify where the score is high enough."""

    def verify(self, view: RouterView) -> bool:
        return view.score(self.options) >= self.options.enough


@dataclass
class HysteresisRouter(SpanRouter):
    """Begin to verify above one score, stop below another."""

    on: bool = False

    def verify(self, view: RouterView) -> bool:
        limit = self.options.off if self.on else self.options.on
        self.on = view.score(self.options) >= limit
        return self.on


Situation = tuple[int, ...]
Arm = tuple[Situation, bool]  # what the situation was, and whether the draft was verified


class ArmRecord(NamedTuple):
    times: int = 0
    reward: float = 0.0


@dataclass
class BanditRouter(SpanRouter):
    """Upper confidence bounds on tokens per forward, for each kind of situation on its own
    (appendix A.6)."""

    records: dict[Arm, ArmRecord] = field(default_factory=dict)
    time: int = 0
    last: Arm = ((), False)

    def verify(self, view: RouterView) -> bool:
        situation = self._situation(view)
        self.time += 1
        verified = self._bound((situation, True)) >= self._bound((situation, False))
        self.last = (situation, verified)
        return verified

    def learn(self, decided: int, forwards: int) -> None:
        record = self.records.get(self.last, ArmRecord())
        reward = record.reward + decided / forwards
        self.records[self.last] = ArmRecord(record.times + 1, reward)

    def _bound(self, arm: Arm) -> float:
        times, reward = self.records.get(arm, ArmRecord())
        if not times:
            return math.inf
        return reward / times + self.options.explore * math.sqrt(math.log(self.time) / times)

    def _situation(self, view: RouterView) -> Situation:
        length = (view.run - 1) / max(view.block - 1, 1)
        progress = 1 - view.blanks / view.block
        shares = (length, progress, view.entropy)
        bins = parse_bins(self.options.bins)
        return tuple(min(int(share * count), count - 1) for share, count in zip(shares, bins))


def first_run(where_BN: Tensor) -> Tensor:
    """Which blanks, given by their positions, belong to the first run: no decided token lies
    between them."""
    step_N = torch.arange(where_BN.shape[1], device=where_BN.device)
    return (where_BN >= 0) & (where_BN == where_BN[:, :1] + step_N)


def expected_prefix(alpha_BN: Tensor) -> Tensor:
    """How many leading tokens are accepted, on average, when token i is with probability alpha[i]
    (equation 5)."""
    return alpha_BN.cumprod(1).sum(1)


@dataclass(frozen=True)
class Prospect(Outcome):
    """What a router looks at, as the device computes it."""

    run: int
    expected: float
    entropy: float
    confident: int


@dataclass(frozen=True)
class DraftedBlock(Outcome):
    """A token for every blank, whether confidence alone would decide it, and what a router looks
    at."""

    tokens: list[int]
    decided_by_confidence: list[bool]
    run: int
    expected: float
    entropy: float
    confident: int


@rule_factory
def prospect(estimator: str, strength: float | None, threshold: float) -> Callable[..., Prospect]:
    """What a router looks at, from the blanks and the model's own laws of them."""
    estimate, default = ESTIMATORS[estimator]
    strength = default if strength is None else strength

    def rule(where_BN: Tensor, model_law_BNV: Tensor, sample: Sampler) -> Prospect:
        run_BN = first_run(where_BN)
        run_B = run_BN.sum(1)
        alpha_BN = estimate(model_law_BNV, where_BN, strength) * run_BN
        likely_BN = reaches(model_law_BNV.amax(-1), threshold) & (where_BN >= 0)
        return Prospect.of_batch(
            run=run_B,
            expected=expected_prefix(alpha_BN),
            entropy=(_normalised_entropy(model_law_BNV) * run_BN).sum(1) / run_B,
            confident=likely_BN.sum(1),
        )

    return rule


@rule_factory
def draft_block(
    estimator: str, strength: float | None, threshold: float
) -> Callable[..., DraftedBlock]:
    """A token for every blank, and what a router looks at."""
    look = prospect(estimator, strength, threshold)

    def rule(
        where_BN: Tensor, law_BNV: Tensor, model_law_BNV: Tensor, sample: Sampler
    ) -> DraftedBlock:
        token_BN, confidence_BN = sample_with_confidence(where_BN, law_BNV, model_law_BNV, sample)
        return DraftedBlock.of_batch(
            tokens=torch.where(where_BN >= 0, token_BN, 0),
            decided_by_confidence=confident(where_BN, confidence_BN, threshold),
            **look(where_BN, model_law_BNV, sample).columns(),
        )

    return rule


@dataclass(frozen=True)
class RoutedDraft:
    """Tokens drawn for the open blanks, those that confidence alone would decide, and what a router
    sees of it all."""

    tokens: list[int]
    confident: list[tuple[int, int]]  # (position, token)
    view: RouterView


class RouterDriver:
    """Asks the device for drafts and for what the router may see of them, and asks the router."""

    def __init__(self, seq: Canvas, options: RoutingOptions, block: int):
        self.seq = seq
        self.block = block
        self._router: Router = registry.get("routers", options.router)(options)
        settings = (options.estimator, options.strength, options.threshold)
        self._prospect = prospect(*settings)
        self._draft_block = draft_block(*settings)
        # Blanks left, and forwards run, when the router was last asked.
        self._last: tuple[int, int] | None = None

    def verify(self, view: RouterView) -> bool:
        """The router's decision. First it learns what came of its last one: tokens decided and
        forwards run since."""
        remaining = self.seq.remaining
        forwards = self.seq.trace.forwards
        if self._last is not None:
            remaining_then, forwards_then = self._last
            self._router.learn(remaining_then - remaining, forwards - forwards_then)
        self._last = (remaining, forwards)
        verify = self._router.verify(view)
        self.seq.note_route(verify, asdict(view))
        return verify

    async def draft(self, blanks: list[int], laws: BlankLaws) -> RoutedDraft:
        """Draw a token for every blank from its law."""
        drafted = await self.seq.draw(self._draft_block, blanks, laws.law, laws.model_law)
        rows = zip(blanks, drafted.tokens, drafted.decided_by_confidence)
        sure = [(position, token) for position, token, decided in rows if decided]
        view = self._view(blanks, drafted)
        return RoutedDraft(drafted.tokens[: len(blanks)], sure, view)

    async def look(self, blanks: Sequence[int], model_law: Tensor) -> RouterView:
        return self._view(blanks, await self.seq.draw(self._prospect, blanks, model_law))

    def _view(self, blanks: Sequence[int], seen: Prospect | DraftedBlock) -> RouterView:
        return RouterView(
            seen.run, self.block, len(blanks), seen.expected, seen.confident, seen.entropy
        )
