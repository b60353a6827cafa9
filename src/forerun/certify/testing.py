"""Certification by testing: a sequential test, with stated error rates, of whether a method's
output has its reference's law.

Above temperature 0 every token that the method wrote is scored under the reference's own law,
computed in one pass of its own, and bettors stake on named faults (`bets.py`). A mean stake above
1/alpha refutes the method, and testing may stop at any time. Power is measured, not assumed: at
every context seen, tokens are drawn from each fault's law too. The share of such shadow runs that
would have been refuted by now is the probability that this fault would have been caught.

At temperature 0 the tokens must be the reference's. A difference counts unless the two logits lie
closer than rounding can move them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor

from forerun import registry
from forerun.api import Model
from forerun.certify.bets import Bets
from forerun.drafters.lookup import continuation
from forerun.errors import BadOption, NotAble
from forerun.families.base import ChainScorer
from forerun.options import Sampling
from forerun.probability.distributions import point_mass
from forerun.requests.request import DecodeRequest, parse_request, stop_tokens
from forerun.requests.result import Result
from forerun.sequence.canvas import BLANK

PROMPTS = [
    "def fibonacci(n):\n    ",
    "The capital of France is",
    "import os\nimport sys\n\ndef main():\n    ",
    "Once upon a time there was a",
    "for i in range(10):\n    print(i)\nfor j in range(10):\n    ",
    "To be, or not to be, that is the question:",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n"
    "    def push(self, item):\n        ",
    "A list of prime numbers: 2, 3, 5, 7, 11,",
]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 1.0, torch.float16: 0.1}


def _in_words(claim: registry.Claim) -> str:
    """What a method is compared with: its reference under the same options, and what those make of
    the model."""
    if claim.guarantee == "exact" or not claim.reason:
        return claim.reference
    return f"{claim.reference}; {claim.reason}"


class ErrorRates(NamedTuple):
    """The most probability of refuting a right method, and of missing any of the named faults."""

    alpha: float
    beta: float


class Difference(TypedDict):
    """Where two greedy outputs part."""

    prompt_ids: list[int]
    at: int  # the first token that differs
    gap: float  # between the two tokens' logits there
    tolerance: float
    explained: bool  # by rounding


@dataclass(frozen=True)
class SequentialVerdict:
    """What the test found, with everything needed to judge it."""

    verdict: str  # holds | fails | undecided
    method: str
    model: str
    reference: str
    temperature: float
    alpha: float
    beta: float
    tokens: int
    sequences: int
    evidence: float  # the mean stake: above 1/alpha the method is refuted
    impossible: int = 0  # tokens that the reference could not have written: a few refute the method
    power: dict[str, float] = field(default_factory=dict)  # fault -> probability of catching it
    differences: list[Difference] = field(default_factory=list)  # at temperature 0


def laws_along(
    model: Model,
    prompt: Sequence[int],
    output: Sequence[int],
    sampling: Sampling,
    stop_tokens: frozenset[int],
) -> Tensor:
    """The model's law at every token of an output, in one pass that reuses nothing."""
    seq = model.canvas([*prompt, *[BLANK] * len(output)], sampling, stop_tokens)
    target = model.handle()
    assert isinstance(target, ChainScorer)
    answer: list[Tensor] = []

    async def ask() -> None:
        answer.extend(await target.conditionals(seq, list(output[:-1])))

    model.host.forget()
    model.run_to_end(seq, ask)
    return answer[0]


def certify(  # noqa: PLR0913 - keywords of a public function
    model: Model,
    method: str,
    *,
    draft: str | Model | None = None,
    prompts: Sequence[Any] | None = None,
    temperature: float = 1.0,
    alpha: float = 0.01,
    beta: float = 0.05,
    max_tokens: int = 32,
    max_sequences: int = 400,
    seed: int = 0,
    progress: Callable[[SequentialVerdict], None] = lambda verdict: None,
    **options: Any,
) -> SequentialVerdict:
    """Test a method on a real model until it is refuted, or every fault would have been caught with
    probability 1 - beta."""
    for name, value in (("alpha", alpha), ("beta", beta)):
        if not 0 < value < 1:
            raise BadOption(f"{name}={value!r} must lie between 0 and 1.")
    if max_sequences < 1:
        raise BadOption(f"max_sequences={max_sequences} must be at least 1.")
    if "n" in options:
        raise BadOption("n: certify draws one sample of each sequence; leave it out.")
    options = {**options, "max_tokens": max_tokens, "temperature": temperature}
    test = SequentialTest(model, method, draft, options, ErrorRates(alpha, beta), seed)
    prompts = list(prompts or _default_prompts(model))
    if temperature == 0:
        return test.compare_greedy(prompts)
    return test.bet(prompts, max_sequences, progress)


def _default_prompts(model: Model) -> Sequence[Any]:
    if model.tokenizer is not None:
        return PROMPTS
    return [[i % model.vocab, 1, 0] for i in range(8)]


class SequentialTest:
    """One method on one model, tested sequence by sequence."""

    def __init__(
        self,
        model: Model,
        method: str,
        draft: str | Model | None,
        options: dict[str, Any],
        error_rates: ErrorRates,
        seed: int,
    ):
        self.model = model
        self.draft = draft
        self.request = parse_request(method, draft, options)
        self.arguments = {**options, "method": method, "draft": draft}
        self.error_rates = error_rates
        self.seed = seed
        self.stop_tokens = stop_tokens(model, self.request.sampling)
        self.tokens = 0
        self.sequences = 0

    def verdict(
        self,
        word: str,
        bets: Bets | None = None,
        differences: Sequence[Difference] = (),
    ) -> SequentialVerdict:
        method = self.request.method
        return SequentialVerdict(
            verdict=word,
            method=method.name,
            model=self.model.name,
            reference=_in_words(method.claim(self.request.options)),
            temperature=self.request.sampling.temperature,
            alpha=self.error_rates.alpha,
            beta=self.error_rates.beta,
            tokens=self.tokens,
            sequences=self.sequences,
            evidence=bets.best if bets else 0.0,
            impossible=bets.impossible if bets else 0,
            power=bets.power if bets else {},
            differences=list(differences),
        )

    def bet(
        self,
        prompts: Sequence[Any],
        max_sequences: int,
        progress: Callable[[SequentialVerdict], None],
    ) -> SequentialVerdict:
        """Above temperature 0: bet on every token until the method is refuted, or the bets have
        enough power."""
        model = self.model
        if not model.family.can(ChainScorer):
            raise NotAble(
                f"'{model.name}' (family '{model.family.name}') does not score sequences, so a "
                f"test above temperature 0 has nothing to go by: use --temperature 0, or leave "
                f"--model out to enumerate on table models."
            )
        bets = Bets(self.error_rates.alpha, self.seed)
        reference = model.twin()
        drafter_laws = self._drafter_laws()
        while self.sequences < max_sequences:
            for result in self._next_results(prompts, max_sequences):
                p_TV = self._laws_along(reference, result)
                for token, p_V, q_V in zip(result.token_ids, p_TV, drafter_laws(result, p_TV)):
                    bets.record(token, p_V, q_V)
                    self.tokens += 1
                    if bets.refuted:
                        return self.verdict("fails", bets)
                self.sequences += 1
                progress(self.verdict("undecided", bets))
            if min(bets.power.values()) >= 1 - self.error_rates.beta:
                return self.verdict("holds", bets)
        return self.verdict("undecided", bets)

    def _next_results(self, prompts: Sequence[Any], max_sequences: int) -> list[Result]:
        """As many sequences as there are lanes. Each has a seed of its own: the bets are a
        martingale only if no two sequences share their noise."""
        end = min(self.sequences + self.model.engine.lanes, max_sequences)
        jobs = [
            self.model.submit([prompts[i % len(prompts)]], seed=self.seed + i, **self.arguments)
            for i in range(self.sequences, end)
        ]
        for job in jobs:
            job.run()
        results = [job.results()[0] for job in jobs]
        for result in results:
            if result.error is not None:
                raise result.error
        return results

    def _laws_along(self, model: Model, result: Result) -> Tensor:
        sampling = self.request.sampling
        return laws_along(model, result.prompt_ids, result.token_ids, sampling, self.stop_tokens)

    def _drafter_laws(self) -> Callable[[Result, Tensor], Sequence[Tensor | None]]:
        """What the drafter would propose at every token of an output, for the bets. An unknown
        drafter leaves the bets on p alone."""
        draft_twin = self._draft_twin()
        if draft_twin is not None:
            return lambda result, p_TV: list(self._laws_along(draft_twin, result))
        if "lookup" in (self.request.method.drafter, self.draft):
            return lookup_laws
        return lambda result, p_TV: [None] * len(result.token_ids)

    def _draft_twin(self) -> Model | None:
        """The draft model behind an engine of its own, if it scores sequences."""
        if not self.request.needs_draft_model:
            return None
        draft_model = self.model.draft_model(self.draft, self.request)
        return draft_model.twin() if draft_model.family.can(ChainScorer) else None

    def compare_greedy(self, prompts: Sequence[Any]) -> SequentialVerdict:
        """At temperature 0: token for token against the reference. Where they part, the gap between
        the two logits must be within rounding."""
        reference = registry.method_named(self.request.method.reference)
        known = {*Sampling.names(), *reference.option_names()}
        shared = {name: value for name, value in self.arguments.items() if name in known}
        ours = self.model.generate_all(prompts, seed=self.seed, **self.arguments)
        theirs = self.model.generate_all(prompts, seed=self.seed, method=reference.name, **shared)
        twin = self.model.twin()
        differences = [
            difference(twin, self.request, our, their)
            for our, their in zip(ours, theirs, strict=True)
            if our.token_ids != their.token_ids
        ]
        self.tokens = sum(len(result.token_ids) for result in ours)
        self.sequences = len(ours)
        holds = all(one["explained"] for one in differences)
        return self.verdict("holds" if holds else "fails", differences=differences)


def lookup_laws(result: Result, p_TV: Tensor) -> list[Tensor]:
    """Point masses on what prompt lookup would copy; p itself where it would copy nothing."""
    text = np.array([*result.prompt_ids, *result.token_ids])
    first = len(result.prompt_ids)
    laws = []
    for i, p_V in enumerate(p_TV):
        copied = continuation(text[: first + i], 3, 1)
        if copied:
            laws.append(point_mass(torch.tensor(copied), p_TV.shape[-1])[0])
        else:
            laws.append(p_V.cpu())
    return laws


def difference(twin: Model, request: DecodeRequest, ours: Result, theirs: Result) -> Difference:
    """Where two outputs part, and how far apart the two tokens' logits are there, after penalties
    and all."""
    a = ours.token_ids
    b = theirs.token_ids
    shorter = min(len(a), len(b))
    at = next((i for i in range(shorter) if a[i] != b[i]), shorter)
    gap = float("inf")
    if at < shorter and twin.family.can(ChainScorer):
        warm = replace(request.sampling, temperature=1.0)
        ends = stop_tokens(twin, request.sampling)
        law_V = laws_along(twin, ours.prompt_ids, b[: at + 1], warm, ends)[-1].double().log()
        gap = abs(float(law_V[a[at]] - law_V[b[at]]))
    tolerance = TOLERANCE[twin.backbone.dtype]
    return {
        "prompt_ids": ours.prompt_ids,
        "at": at,
        "gap": gap,
        "tolerance": tolerance,
        "explained": gap <= tolerance,
    }
