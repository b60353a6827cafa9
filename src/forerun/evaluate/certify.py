"""Certification by testing: a sequential test, with stated error rates, of whether a method's output has its reference's law.

Above temperature 0 every token that the method wrote is scored under the reference's own law p, computed in one pass of its own.
For each fault that a verifier might have, a bettor stakes on that fault's law r: the stake is multiplied by (1 + r/p)/2 of the
token that came. If the output has the law p, no bettor's expected stake grows, and the mean stake exceeds 1/alpha with
probability at most alpha, whenever one looks (Ville's inequality). So a mean stake above 1/alpha refutes the method, and
testing may stop at any time.

Power is measured, not assumed: at every context seen, tokens are drawn from each fault's law too, and the share of such shadow
runs that would have been refuted by now is the probability that this fault would have been caught.

At temperature 0 the tokens must be the reference's; a difference counts unless the two logits lie closer than rounding can
move them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun import registry
from forerun.api import Model
from forerun.arguments import Wish, read_wish
from forerun.core import BLANK, Canvas, Conditional
from forerun.drafters.lookup import continuation
from forerun.engine.serve import Questions, Ticket
from forerun.errors import BadOption, NotAble
from forerun.jobs import stop_tokens
from forerun.laws import point_mass
from forerun.parameters import Sampling
from forerun.sampling import History

PROMPTS = [
    "def fibonacci(n):\n    ",
    "The capital of France is",
    "import os\nimport sys\n\ndef main():\n    ",
    "Once upon a time there was a",
    "for i in range(10):\n    print(i)\nfor j in range(10):\n    ",
    "To be, or not to be, that is the question:",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        ",
    "A list of prime numbers: 2, 3, 5, 7, 11,",
]
SHADOWS = 200
EDGE = 2  # tokens of probability 0 under the reference that rounding at the edge of top-k or top-p may explain
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 1.0, torch.float16: 0.1}


@dataclass(frozen=True)
class Verdict:
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
    power: dict[str, float] = field(default_factory=dict)  # fault -> probability that it would have been caught
    differences: list[dict[str, Any]] = field(default_factory=list)  # at temperature 0


def faults(p_V: Tensor, q_V: Tensor | None) -> dict[str, Tensor]:
    """Laws that broken verifiers would have where the right one has p; q is what the drafter would propose here."""

    def tempered(power: float) -> Tensor:
        sharp_V = p_V**power
        return sharp_V / sharp_V.sum()

    wrong = {"too sharp (temperature 10 % low)": tempered(1 / 0.9), "too flat (temperature 10 % high)": tempered(1 / 1.1)}
    if q_V is not None:
        shared_V = torch.minimum(p_V, q_V)
        wrong["no residual after a rejection"] = shared_V + (1 - shared_V.sum()) * p_V
        wrong["drafts accepted unseen"] = q_V
    return wrong


class Bets:
    """The stakes on every fault, for the real run and for shadow runs in which each fault is real."""

    def __init__(self, alpha: float, seed: int = 0, shadows: int = SHADOWS):
        self.limit, self.shadows = 1 / alpha, shadows
        self.stakes: dict[str, float] = {}
        self.best = 1.0
        self.impossible = 0
        self.shadow_stakes: dict[str, dict[str, Tensor]] = {}
        self.caught: dict[str, Tensor] = {}
        self.generator = torch.Generator().manual_seed(seed)

    def see(self, token: int, p_V: Tensor, q_V: Tensor | None) -> None:
        p_V = p_V.double().cpu()
        if p_V[token] == 0:
            self.impossible += 1
            return
        wrong = faults(p_V, None if q_V is None else q_V.double().cpu())
        odds = {name: (1 + r_V / p_V.clamp(min=1e-300)) / 2 for name, r_V in wrong.items()}
        for name, odd_V in odds.items():
            self.stakes[name] = self.stakes.get(name, 1.0) * float(odd_V[token])
        self.best = max(self.best, self.evidence)
        for name, r_V in wrong.items() if self.shadows else ():
            self._shadow(name, r_V, odds)

    def _shadow(self, name: str, r_V: Tensor, odds: dict[str, Tensor]) -> None:
        drawn = torch.multinomial(r_V, self.shadows, replacement=True, generator=self.generator)
        stakes = self.shadow_stakes.setdefault(name, {})
        for bettor, odd_V in odds.items():
            stakes[bettor] = stakes.get(bettor, torch.ones(self.shadows, dtype=torch.float64)) * odd_V[drawn]
        mean = torch.stack(list(stakes.values())).mean(0)
        self.caught[name] = self.caught.get(name, torch.zeros(self.shadows, dtype=torch.bool)) | (mean >= self.limit)

    @property
    def refuted(self) -> bool:
        return self.best >= self.limit or self.impossible > EDGE

    @property
    def evidence(self) -> float:
        return sum(self.stakes.values()) / len(self.stakes) if self.stakes else 1.0

    @property
    def power(self) -> dict[str, float]:
        return {name: float(caught.double().mean()) for name, caught in self.caught.items()}


def laws_along(model: Model, prompt: Sequence[int], output: Sequence[int], sampling: Sampling, stops: frozenset[int]) -> Tensor:
    """The model's law at every token of an output, in one pass that reuses nothing."""
    history = History(sampling, np.asarray(prompt), model.vocab, stops)
    seq = Canvas([*prompt, *[BLANK] * len(output)], history=history)
    answer: list[Tensor] = []

    async def ask() -> None:
        answer.extend(await Questions(model.family, model.host).conditionals(seq, list(output[:-1])))

    for memo in model.host.memos:
        memo.forget()
    ticket = model.engine.submit(Ticket(seq, ask))
    model.engine.run()
    if ticket.error is not None:
        raise ticket.error
    return answer[0]


def drafter_laws(how: registry.Method, draft: Any, twin: Model | None) -> Callable[..., Sequence[Tensor | None]]:
    """What the drafter would propose at every token of an output, for the bets: unknown drafters leave the bets on p alone."""

    def of_model(prompt: Sequence[int], output: Sequence[int], sampling: Sampling, stops: frozenset[int], p_TV: Tensor) -> Any:
        assert twin is not None
        return laws_along(twin, prompt, output, sampling, stops)

    def of_lookup(prompt: Sequence[int], output: Sequence[int], sampling: Sampling, stops: frozenset[int], p_TV: Tensor) -> Any:
        text, n = np.array([*prompt, *output]), len(prompt)
        copies = [continuation(text[: n + i], 3, 1) for i in range(len(output))]
        return [point_mass(torch.tensor(c), p_TV.shape[-1])[0] if c else p.cpu() for c, p in zip(copies, p_TV)]

    if twin is not None:
        return of_model
    return of_lookup if "lookup" in (how.drafter, draft) else lambda *_: [None] * len(_[1])


def certify(
    model: Model,
    method: str,
    *,
    draft: Any = None,
    prompts: Sequence[Any] | None = None,
    temperature: float = 1.0,
    alpha: float = 0.01,
    beta: float = 0.05,
    max_tokens: int = 32,
    max_sequences: int = 400,
    seed: int = 0,
    progress: Callable[[Verdict], None] = lambda verdict: None,
    **options: Any,
) -> Verdict:
    """Test a method on a real model until it is refuted, or every fault would have been caught with probability 1 - beta."""
    for name, value in (("alpha", alpha), ("beta", beta)):
        if not 0 < value < 1:
            raise BadOption(f"{name}={value!r} must lie between 0 and 1.")
    if max_sequences < 1:
        raise BadOption(f"max_sequences={max_sequences} must be at least 1.")
    if "n" in options:
        raise BadOption("n: certify draws one sample of each sequence; leave it out.")
    how: registry.Method = registry.get("methods", method)
    prompts = list(prompts or (PROMPTS if model.tokenizer is not None else [[i % model.vocab, 1, 0] for i in range(8)]))
    facts: dict[str, Any] = dict(
        method=method, model=model.name, reference=how.reference, temperature=temperature, alpha=alpha, beta=beta
    )
    arguments: dict[str, Any] = dict(method=method, draft=draft, max_tokens=max_tokens, temperature=temperature, **options)
    wish = read_wish(method, draft, {**options, "max_tokens": max_tokens, "temperature": temperature})
    if temperature == 0:
        return _certify_greedy(model, wish, prompts, arguments, facts, seed)
    if Conditional not in model.family.answers:
        raise NotAble(
            f"'{model.name}' (family '{model.family.name}') does not score sequences, so a test above temperature 0 has nothing "
            f"to go by: use --temperature 0, or leave --model out to enumerate on table models."
        )
    twin = Model(model.name, model.family, model.backbone, model.tokenizer, model.eos, lanes=1, context=model.context)
    small = model.draft_model(draft, wish) if wish.needs_draft_model else None
    scores = small is not None and Conditional in small.family.answers
    draft_twin = (
        Model(small.name, small.family, small.backbone, None, (), lanes=1, context=small.context) if small and scores else None
    )
    would_draft = drafter_laws(how, draft, draft_twin)
    sampling, stops, bets = wish.sampling, stop_tokens(model, wish), Bets(alpha, seed)
    tokens = sequences = 0

    def verdict(word: str) -> Verdict:
        return Verdict(
            word, **facts, tokens=tokens, sequences=sequences, evidence=bets.best, impossible=bets.impossible, power=bets.power
        )

    while sequences < max_sequences:
        # A seed of its own for every sequence: the bets are a martingale only if no two of them share their noise.
        numbers = range(sequences, min(sequences + model.engine.lanes, max_sequences))
        jobs = [model.submit([prompts[i % len(prompts)]], seed=seed + i, **arguments) for i in numbers]
        model.engine.run()
        for result in (job.results()[0] for job in jobs):
            if result.error is not None:
                raise result.error
            p_TV = laws_along(twin, result.prompt_ids, result.token_ids, sampling, stops)
            q_TV = would_draft(result.prompt_ids, result.token_ids, sampling, stops, p_TV)
            for token, p_V, q_V in zip(result.token_ids, p_TV, q_TV):
                bets.see(token, p_V, q_V)
                tokens += 1
                if bets.refuted:
                    return verdict("fails")
            sequences += 1
            progress(verdict("undecided"))
        if min(bets.power.values()) >= 1 - beta:
            return verdict("holds")
    return verdict("undecided")


def _certify_greedy(
    model: Model, wish: Wish, prompts: Sequence[Any], arguments: dict[str, Any], facts: dict[str, Any], seed: int
) -> Verdict:
    """Token for token against the reference; where they part, the gap between the two logits must be within rounding."""
    reference: registry.Method = registry.get("methods", wish.method.reference)
    shared = {k: v for k, v in arguments.items() if k in {*Sampling.names(), *reference.option_names()}}
    ours = model.generate(prompts, seed=seed, **arguments)
    theirs = model.generate(prompts, seed=seed, method=wish.method.reference, **shared)
    differences = []
    twin = Model(model.name, model.family, model.backbone, model.tokenizer, model.eos, lanes=1, context=model.context)
    tolerance = TOLERANCE.get(getattr(model.backbone, "dtype", torch.float64), 1e-3)
    for ours_i, theirs_i in zip(ours, theirs, strict=True):
        for result in (ours_i, theirs_i):
            if result.error is not None:
                raise result.error
        if ours_i.token_ids != theirs_i.token_ids:
            differences.append(_difference(model, twin, wish, ours_i, theirs_i, tolerance))
    fine = all(d["explained"] for d in differences)
    tokens = sum(len(r.token_ids) for r in ours)
    return Verdict("holds" if fine else "fails", **facts, tokens=tokens, sequences=len(ours), evidence=0.0, differences=differences)


def _difference(model: Model, twin: Model, wish: Wish, ours: Any, theirs: Any, tolerance: float) -> dict[str, Any]:
    """Where two outputs part, and how far apart the two tokens' logits are there, after penalties and all."""
    a, b = ours.token_ids, theirs.token_ids
    at = next((i for i in range(min(len(a), len(b))) if a[i] != b[i]), min(len(a), len(b)))
    gap = float("inf")
    if at < min(len(a), len(b)) and Conditional in model.family.answers:
        warm = replace(wish.sampling, temperature=1.0)
        law_V = laws_along(twin, ours.prompt_ids, b[: at + 1], warm, stop_tokens(model, wish))[-1].double().log()
        gap = abs(float(law_V[a[at]] - law_V[b[at]]))
    return {"prompt_ids": ours.prompt_ids, "at": at, "gap": gap, "tolerance": tolerance, "explained": gap <= tolerance}
