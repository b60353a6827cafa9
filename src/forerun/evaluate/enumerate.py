"""Certification by enumeration: run a method once for every random outcome it could have, and add up the probabilities.

The engine, the method and its rules are the ones that run in production; only `sample` differs. No statistics: the law of whole
sequences comes out exact, and is compared with the reference's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.api import Model
from forerun.backbones.table import TableBackbone
from forerun.families.causal import Causal
from forerun.laws import total_variation
from forerun.noise import Noise, mix
from forerun.parameters import Sampling
from forerun.sampling import Chain, History, laws

Law = dict[tuple[int, ...], float]
CERTAIN = 1e-12
LANES = 64


class Path:
    """One way a run may go: outcomes that are settled, then the first possible outcome of every further draw."""

    def __init__(self, settled: list[int], todo: list[list[int]]):
        self.taken: list[int] = []
        self.settled, self.todo = settled, todo
        self.probability = 1.0

    def choose(self, law: list[float]) -> int:
        if len(self.taken) < len(self.settled):
            outcome = self.settled[len(self.taken)]
        else:
            outcome, *others = [i for i, p in enumerate(law) if p > 0]
            self.todo.extend([*self.taken, other] for other in others)
        self.taken.append(outcome)
        self.probability *= law[outcome]
        return outcome


class Enumeration:
    """The `sample` argument under certification. Every run follows its own path; outcomes not taken become paths still to do."""

    def __init__(self) -> None:
        self.todo: list[list[int]] = [[]]
        self.paths: dict[int, Path] = {}

    def __call__(self, draws: Sequence[tuple[int, int]]) -> Callable[[Tensor], Tensor]:
        if draws[0][0] not in self.paths:
            return Noise(draws)
        paths = [self.paths[key] for key, _ in draws]
        return lambda law_BN: torch.tensor([path.choose(law) for path, law in zip(paths, law_BN.tolist(), strict=True)])

    def law_of(self, run: Callable[[int, int], list[tuple[int, ...]]]) -> Law:
        """The law of what `run(seed, n)` returns n of, over everything they draw. Runs go in batches, as in production."""
        law: Law = defaultdict(float)
        seed = 1
        while self.todo:
            batch, self.todo = [Path(settled, []) for settled in self.todo[:LANES]], self.todo[LANES:]
            self.paths = {mix(seed, i): path for i, path in enumerate(batch)}
            for outcome, path in zip(run(seed, len(batch)), batch, strict=True):
                law[outcome] += path.probability
                self.todo.extend(path.todo)
            seed += 1
        return dict(law)


def table_model(backbone: TableBackbone, sample: Any = None, eos: Sequence[int] = ()) -> Model:
    """A causal table model, its draws enumerated if asked to."""
    return Model("table", Causal(), backbone, None, eos, lanes=LANES, sample=sample)


def method_law(
    method: str,
    target: TableBackbone,
    prompt: Sequence[int],
    *,
    draft: TableBackbone | str | None = None,
    eos: Sequence[int] = (),
    **options: Any,
) -> Law:
    """The law of whole sequences that a method writes after a prompt."""
    enumeration = Enumeration()
    model = table_model(target, enumeration, eos)
    small: Any = table_model(draft) if isinstance(draft, TableBackbone) else draft
    # Something else goes through every lane first: what it leaves in the slots must make no difference.
    decoy = [(token + 1) % target.vocab for token in prompt]
    model.generate([decoy] * LANES, method=method, draft=small, **{**options, "max_tokens": 3, "min_tokens": 0})

    def run(seed: int, n: int) -> list[tuple[int, ...]]:
        results = model.generate([list(prompt)], method=method, draft=small, seed=seed, n=n, **options)
        for result in results:
            if result.error is not None:
                raise result.error
        return [tuple(result.token_ids) for result in results]

    return enumeration.law_of(run)


def reference_law(target: TableBackbone, prompt: Sequence[int], *, eos: Sequence[int] = (), **options: Any) -> Law:
    """The same law, straight from the definition: no engine, no rows, no method; one conditional after another."""
    sampling = Sampling(**options)
    stops = frozenset() if sampling.ignore_eos else frozenset(eos)
    stops |= frozenset(sampling.stop_token_ids)
    assert sampling.max_tokens is not None
    finished: Law = {}
    growing: Law = {(): 1.0}
    for _ in range(sampling.max_tokens):
        longer: Law = defaultdict(float)
        for said, probability in growing.items():
            p_V = _conditional(target, list(prompt), list(said), sampling, stops)
            for token in range(target.vocab):
                if p_V[token] > 0:
                    (finished if token in stops else longer)[(*said, token)] = probability * p_V[token]
        growing = dict(longer)
    return finished | growing


def _conditional(
    target: TableBackbone, prompt: list[int], said: list[int], sampling: Sampling, stops: frozenset[int]
) -> list[float]:
    history = History(sampling, np.asarray(prompt), target.vocab, stops)
    for token in said:
        history.add(token)
    text = [*prompt, *said]
    logits_V = target.logits(np.array([range(len(text)), text], np.int64))
    return laws(logits_V[None], [Chain(history, [], 1)])[0].tolist()


@dataclass(frozen=True)
class Certificate:
    """What one comparison found."""

    case: dict[str, Any]
    sequences: int
    mass: float
    distance: float

    @property
    def holds(self) -> bool:
        return self.distance < CERTAIN and abs(self.mass - 1) < CERTAIN


def certify_case(
    method: str,
    target: TableBackbone,
    prompt: Sequence[int],
    *,
    draft: Any = None,
    eos: Sequence[int] = (),
    method_options: dict[str, Any] | None = None,
    **sampling: Any,
) -> Certificate:
    """Compare a method with its reference on one table model."""
    ours = method_law(method, target, prompt, draft=draft, eos=eos, **(method_options or {}), **sampling)
    theirs = reference_law(target, prompt, eos=eos, **sampling)
    return Certificate(
        {"method": method, "prompt": list(prompt), "eos": list(eos), **(method_options or {}), **sampling},
        len(theirs),
        sum(ours.values()),
        total_variation(ours, theirs),
    )


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.6},
    {"temperature": 1.7, "top_p": 0.7},
    {"temperature": 1.0, "top_k": 2},
    {"temperature": 1.0, "min_p": 0.3},
    {"temperature": 1.0, "repetition_penalty": 1.8, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    {"temperature": 0.8, "logit_bias": {0: 1.5}, "min_tokens": 2},
    {"temperature": 1.0, "allowed_tokens": [0, 2]},
]


def standard_cases(method: str) -> list[Callable[[], Certificate]]:
    """The cases that a lossless method on a causal model must pass: drafts good and bad, every k, every parameter, an end token."""
    from forerun import registry

    how = registry.get("methods", method)
    target = TableBackbone(vocab=3, seed=1)
    drafts: list[Any] = [None]
    if how.drafts and how.drafter is None:
        drafts = [TableBackbone(vocab=3, seed=2, like=target, blend=b, cost=0.1) for b in (0.0, 0.7)] + ["lookup"]
    options = [{"k": k} for k in (1, 2, 4)] if "k" in how.option_names() else [{}]
    return [
        lambda draft=draft, option=option, sampling=sampling, eos=eos: certify_case(  # type: ignore[misc]
            method, target, [0, 1, 0], draft=draft, eos=eos, method_options=option, max_tokens=4, **sampling
        )
        for draft in drafts
        for option in options
        for eos in ((), (1,))
        for sampling in SAMPLINGS
    ]
