"""When is a verdict worth its forward? Estimates of how much of a draft will be accepted, and policies that decide by them (Han
et al., 2026, section 4.3 and Algorithm 4).

B sequences, N open blanks, V vocabulary. A router looks at the model's own laws of the blanks and never at the tokens that were
drawn from them: a decision that knew the draft would bias what verification makes of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from forerun import registry
from forerun.choose import Rule, confident, drawn, enough
from forerun.core import Canvas
from forerun.errors import BadOption, unknown
from forerun.parameters import check_between, check_number, check_positive, check_whole

MILLION = 1_000_000  # outcomes of a rule are whole numbers, so shares and expectations travel in millionths
SCORES = ("static", "dynamic")
PLAIN = ("renyi", "random")  # estimators without a number


def _normalised_entropy(own_BNV: Tensor) -> Tensor:
    return torch.special.entr(own_BNV).sum(-1) / math.log(own_BNV.shape[-1])


def _margin(own_BNV: Tensor) -> Tensor:
    first, second = own_BNV.topk(2, -1).values.unbind(-1)
    return first - second


def _scattered(where_BN: Tensor) -> Tensor:
    """Numbers in [0, 1) without any system to them: the multiples of the golden ratio."""
    return (where_BN * 0.6180339887498949) % 1.0


# How likely a drafted token is to be accepted, from the law it is drawn from and one number; and that number's default (A.5).
ESTIMATORS: dict[str, tuple[Callable[[Tensor, Tensor, float], Tensor], float]] = {
    "entropy": (lambda own, where, beta: torch.exp(-beta * _normalised_entropy(own)), 1.0),
    "margin": (lambda own, where, least: (_margin(own) >= least).to(own.dtype), 0.1),
    "confidence": (lambda own, where, power: own.amax(-1) ** power, 0.5),
    "renyi": (lambda own, where, _: own.square().sum(-1), 1.0),
    "hard-entropy": (lambda own, where, most: (_normalised_entropy(own) < most).to(own.dtype), 0.2),
    "random": (lambda own, where, _: _scattered(where).to(own.dtype), 1.0),
}


@dataclass(frozen=True)
class Routing:
    """The options of every method that asks a router."""

    threshold: float = field(
        default=0.9, metadata={"help": "unverified: decide blanks at least this confident, and the surest anyway; 1: that alone"}
    )
    router: str = field(default="span", metadata={"help": "who decides when to verify: span, score, hysteresis or bandit"})
    span: int = field(default=1, metadata={"help": "router span: verify runs of at least so many blanks; 1 verifies always"})
    estimator: str = field(
        default="entropy",
        metadata={"help": "how acceptance is foreseen: entropy, margin, confidence, renyi, hard-entropy or random"},
    )
    strength: float | None = field(default=None, metadata={"help": "the estimator's one number, if not its default"})
    score: str | None = field(
        default=None,
        metadata={
            "help": "expected accepted tokens less the cost: static, or dynamic (times the confident blanks); default: static, and "
            "dynamic for hysteresis"
        },
    )
    cost: float = field(default=1.0, metadata={"help": "what a verdict costs, in accepted tokens"})
    enough: float = field(default=0.0, metadata={"help": "router score: verify from this score on"})
    on: float = field(default=1.0, metadata={"help": "router hysteresis: begin to verify from this score on"})
    off: float = field(default=-1.0, metadata={"help": "router hysteresis: stop below this score"})
    explore: float = field(default=0.5, metadata={"help": "router bandit: how much it tries what it knows little of"})
    bins: str = field(
        default="2,2,2", metadata={"help": "router bandit: parts of run length, progress and entropy that it tells apart"}
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
            if self.estimator in PLAIN:
                raise BadOption(f"strength={self.strength:g}: the estimator {self.estimator!r} has none.")
        for name in ("cost", "enough", "on", "off"):
            check_number(name, getattr(self, name))
        check_between("explore", self.explore, most=math.inf)
        if self.off > self.on:
            raise BadOption(f"off={self.off:g} must not be above on={self.on:g}.")
        parse_bins(self.bins)

    @property
    def per_confident(self) -> bool:
        """Is the cost one per blank that confidence alone would decide?"""
        return self.score == "dynamic" or (self.score is None and self.router == "hysteresis")

    @classmethod
    def taken_from(cls, options: dict[str, Any]) -> Routing:
        """Ours among a method's options; the others are left."""
        return cls(**{name: options.pop(name) for name in Routing.__dataclass_fields__})


def parse_bins(bins: Any) -> tuple[int, int, int]:
    parts = str(bins).split(",")
    if len(parts) != 3 or not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise BadOption(f"bins={bins!r} must be three whole numbers, 1 or more, as in 2,2,2.")
    a, b, c = (int(part) for part in parts)
    return a, b, c


@dataclass(frozen=True)
class Sight:
    """What a router may look at."""

    run: int  # blanks that a verdict would judge
    block: int  # tokens of the block
    blanks: int  # of the block
    expected: float  # tokens of the draft that should be accepted (equation 5)
    confident: int  # blanks that confidence alone would decide
    entropy: float  # of the run's laws, from 0 to 1

    def score(self, routing: Routing) -> float:
        """Equation 6."""
        return self.expected - routing.cost * (self.confident if routing.per_confident else 1)


class Router(Protocol):
    """Decides, forward by forward, for one sequence."""

    def verify(self, sight: Sight) -> bool: ...

    def learn(self, decided: int, forwards: int) -> None:
        """What it said last decided so many tokens in so many forwards."""


@dataclass
class Span:
    routing: Routing

    def verify(self, sight: Sight) -> bool:
        return sight.run >= self.routing.span

    def learn(self, decided: int, forwards: int) -> None:
        pass


class Score(Span):
    def verify(self, sight: Sight) -> bool:
        return sight.score(self.routing) >= self.routing.enough


@dataclass
class Hysteresis(Span):
    on: bool = False

    def verify(self, sight: Sight) -> bool:
        self.on = sight.score(self.routing) >= (self.routing.off if self.on else self.routing.on)
        return self.on


@dataclass
class Bandit(Span):
    """Upper confidence bounds on tokens per forward, for each kind of situation on its own (appendix A.6)."""

    told: dict[tuple[Any, bool], tuple[int, float]] = field(default_factory=dict)  # (situation, verified) -> (times, reward)
    time: int = 0
    last: tuple[Any, bool] = ((), False)

    def verify(self, sight: Sight) -> bool:
        situation, self.time = self._situation(sight), self.time + 1
        bound = {verified: self._bound((situation, verified)) for verified in (True, False)}
        self.last = (situation, bound[True] >= bound[False])
        return self.last[1]

    def learn(self, decided: int, forwards: int) -> None:
        times, reward = self.told.get(self.last, (0, 0.0))
        self.told[self.last] = (times + 1, reward + decided / forwards)

    def _bound(self, arm: tuple[Any, bool]) -> float:
        times, reward = self.told.get(arm, (0, 0.0))
        return reward / times + self.routing.explore * math.sqrt(math.log(self.time) / times) if times else math.inf

    def _situation(self, sight: Sight) -> tuple[int, ...]:
        shares = ((sight.run - 1) / max(sight.block - 1, 1), 1 - sight.blanks / sight.block, sight.entropy)
        return tuple(min(int(share * bins), bins - 1) for share, bins in zip(shares, parse_bins(self.routing.bins)))


def first_run(where_BN: Tensor) -> Tensor:
    """Which blanks, given by their positions, belong to the first run: no decided token lies between them."""
    step_N = torch.arange(where_BN.shape[1], device=where_BN.device)
    return (where_BN >= 0) & (where_BN == where_BN[:, :1] + step_N)


def expected_prefix(alpha_BN: Tensor) -> Tensor:
    """How many leading tokens are accepted, on average, when token i is with probability alpha[i] (equation 5)."""
    return alpha_BN.cumprod(1).sum(1)


@cache
def seen(estimator: str, strength: float | None, threshold: float) -> Rule:
    """What a router looks at, of the blanks and the model's own laws of them."""
    estimate, default = ESTIMATORS[estimator]

    def rule(where_BN: Tensor, own_BNV: Tensor, sample: Any) -> tuple[Tensor, ...]:
        run_BN = first_run(where_BN)
        expected_B = expected_prefix(estimate(own_BNV, where_BN, default if strength is None else strength) * run_BN)
        entropy_B = (_normalised_entropy(own_BNV) * run_BN).sum(1) / run_BN.sum(1)
        confident_B = (enough(own_BNV.amax(-1), threshold) & (where_BN >= 0)).sum(1)
        return run_BN.sum(1), (expected_B * MILLION).long(), (entropy_B * MILLION).long(), confident_B

    return rule


@cache
def drafting(estimator: str, strength: float | None, threshold: float) -> Rule:
    """A token for every blank; whether confidence alone would decide it; and what a router looks at."""
    look = seen(estimator, strength, threshold)

    def rule(where_BN: Tensor, law_BNV: Tensor, own_BNV: Tensor, sample: Any) -> tuple[Tensor, ...]:
        token_BN, sure_BN = drawn(where_BN, law_BNV, own_BNV, sample)
        sure_enough_BN = confident(where_BN, sure_BN, threshold)
        tokens = torch.where(where_BN >= 0, token_BN, 0).unbind(1)
        return *tokens, *sure_enough_BN.long().unbind(1), *look(where_BN, own_BNV, sample)

    return rule


@dataclass(frozen=True)
class Drafted:
    """Tokens drawn for the open blanks, which of them confidence alone would decide, and what a router sees of it all."""

    blanks: list[int]
    tokens: list[int]
    sure: list[bool]
    sight: Sight

    @property
    def confident(self) -> list[tuple[int, int]]:
        return [(p, x) for p, x, sure in zip(self.blanks, self.tokens, self.sure) if sure]


class Watch:
    """What a method with a router asks the device: drafts, and what the router may see of them."""

    def __init__(self, seq: Canvas, routing: Routing, block: int):
        self.seq, self.block, self._router = seq, block, registry.get("routers", routing.router)(routing)
        self._seen = seen(routing.estimator, routing.strength, routing.threshold)
        self._drafting = drafting(routing.estimator, routing.strength, routing.threshold)
        self._then: tuple[int, int] | None = None  # blanks left, and forwards run, when the router was last asked

    def verify(self, sight: Sight) -> bool:
        """The router's word. It learns first what came of the last one: tokens decided and forwards run since."""
        now = (self.seq.remaining, self.seq.forwards)
        if self._then is not None:
            self._router.learn(self._then[0] - now[0], now[1] - self._then[1])
        self._then = now
        return self._router.verify(sight)

    async def draft(self, blanks: list[int], law: Tensor, own: Tensor) -> Drafted:
        """Draw a token for every blank from its law."""
        *found, run, expected, entropy, confident = await self.seq.draw(self._drafting, blanks, law, own)
        tokens, sure = found[: len(blanks)], [bool(x) for x in found[len(found) // 2 :][: len(blanks)]]
        return Drafted(blanks, tokens, sure, self._sight(blanks, run, expected, entropy, confident))

    async def look(self, blanks: list[int], own: Tensor) -> Sight:
        return self._sight(blanks, *await self.seq.draw(self._seen, blanks, own))

    def _sight(self, blanks: list[int], run: int, expected: int, entropy: int, confident: int) -> Sight:
        return Sight(run, self.block, len(blanks), expected / MILLION, confident, entropy / MILLION)
