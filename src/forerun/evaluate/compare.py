"""Methods side by side: the same prompts, seeds and machine, in turns, with what each costs,
promises and is worth.

Speed without quality is easy. So beside the speed stand whether the output is the reference's, how
likely a judge finds it, and whether it parses. A method that is fast and wrong must look wrong
here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forerun import registry
from forerun.api import Model, Prompt
from forerun.engine.host import Host
from forerun.evaluate.judge import completion_perplexity, law_p_value, surprises
from forerun.evaluate.metrics import first_line, parses
from forerun.families.base import BlankFiller, ChainScorer
from forerun.profile.costs import Cost, costs_since, work_so_far
from forerun.profile.progress import Progress, no_progress
from forerun.requests.request import needs_model
from forerun.requests.result import Result


@dataclass(frozen=True)
class Contestant:
    """A model, and a method with its options, `draft` among them."""

    model: Model
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        words = [_option_words(name, value) for name, value in self.options.items() if value]
        return f"{self.method} ({', '.join(words)})" if words else self.method


def _option_words(name: str, value: object) -> str:
    text = value.name if isinstance(value, Model) else str(value)
    return text if name == "draft" else f"{name} {text}"


@dataclass(frozen=True)
class ComparisonSettings:
    """How all contestants decode, and how often they are timed."""

    max_tokens: int = 64
    temperature: float = 0.0
    rounds: int = 3
    batch: int = 1
    seed: int = 0


@dataclass(frozen=True)
class ComparisonRow:
    """What one contestant did."""

    model: str
    method: str
    family: str
    guarantee: str
    reason: str  # why it is approximate, and what it equals all the same
    tokens: int
    forwards: int
    draft_forwards: int
    tokens_per_forward: float
    acceptance_length: float | None
    alpha: float | None  # accepted tokens per judged token, mean over prompts
    tokens_per_second: float  # median over the rounds
    least: float
    most: float
    speedup: float | None  # over the method's own reference on the same model
    over_ar: float | None  # over plain left-to-right decoding, of whichever model does that here
    # at temperature 0, the share of outputs that are the reference's, token for token
    equals_reference: float | None
    # above temperature 0, of the hypothesis that the output has the reference's law
    p_value: float | None
    perplexity: float | None  # under the judge
    parses: float  # share of prompts with their completions that are Python
    # share of completions whose first line is the true one, where that is known
    first_line_right: float | None
    # the model's own, per token of the true completions, where it scores chains
    loss: float | None
    mflops_per_token: float  # of all models together, rows as they really ran
    mbytes_per_token: float  # weights, keys and values read
    draft_mflops: float | None  # per draft, of the models that draft


def contestants_for(
    model: Model, methods: Sequence[str] | None = None, draft: str | Model | None = None
) -> list[Contestant]:
    """The named methods on a model, or all that it can run; references first. Methods that need a
    draft take part if there is one."""
    contestants: list[Contestant] = []
    for name in methods or registry.names("methods"):
        method = registry.method_named(name)
        if methods is None and not method.runs_on(model.family):
            continue
        method.check(model.family, model.name)
        contestants += _contestants_of_method(model, method, draft, named=methods is not None)

    def is_no_reference(one: Contestant) -> bool:
        return one.method != registry.method_named(one.method).reference

    return sorted(contestants, key=is_no_reference)


def _contestants_of_method(
    model: Model, method: registry.Method, draft: str | Model | None, named: bool
) -> list[Contestant]:
    """A method that was not named is left out where the draft does not fit it."""
    name = method.name
    with_draft = Contestant(model, name, {"draft": draft})
    if method.drafts_itself:
        counted = [Contestant(model, name, {"draft": "ngram"})] if name != "auto" else []
        return [Contestant(model, name), *counted]
    if method.drafter is not None and needs_model(registry.get("drafters", method.drafter)):
        fills = isinstance(draft, Model) and draft.family.can(BlankFiller)
        return [with_draft] if named or fills else []
    if method.drafter == "predicted" and not named:
        return []  # nobody has said what to expect
    if method.drafts and method.drafter is None:
        return [with_draft] if named or draft is not None else []
    return [Contestant(model, name)]


@dataclass
class Run:
    """What a contestant wrote and took; of results and costs the last round's."""

    contestant: Contestant
    results: list[Result] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)  # tokens per second, by round
    costs: dict[Host, Cost] = field(default_factory=dict)

    @property
    def model(self) -> Model:
        return self.contestant.model

    @property
    def method(self) -> registry.Method:
        return registry.method_named(self.contestant.method)

    @property
    def tokens(self) -> int:
        return sum(result.stats.tokens for result in self.results)

    @property
    def speed(self) -> float:
        return statistics.median(self.rates)


@dataclass(frozen=True)
class Comparison:
    """All runs, and what each is compared with."""

    runs: Sequence[Run]
    temperature: float
    judge: Model | None
    truths: Sequence[Sequence[int]] | None  # what really follows the prompts
    losses: Mapping[Model, float]  # of the models that score the truths


def compare(
    contestants: Sequence[Contestant],
    prompts: Sequence[Prompt],
    settings: ComparisonSettings | None = None,
    *,
    judge: Model | None = None,
    truths: Sequence[Sequence[int]] | None = None,
    progress: Progress = no_progress,
) -> list[ComparisonRow]:
    """Run all contestants in turns. The first round warms up and is not timed. `truths` are what
    really follows the prompts."""
    settings = settings or ComparisonSettings()
    runs = [Run(contestant) for contestant in contestants]
    total = (settings.rounds + 1) * len(runs)
    done = 0
    for turn in range(settings.rounds + 1):
        for run in runs:
            rate = _decode(run, prompts, settings)
            if turn:
                run.rates.append(rate)
            done += 1
            progress(done, total)
    losses = {} if truths is None else _losses(runs, truths)
    comparison = Comparison(runs, settings.temperature, judge, truths, losses)
    return [_row(run, comparison) for run in runs]


def _decode(run: Run, prompts: Sequence[Prompt], settings: ComparisonSettings) -> float:
    """Decode all prompts. Gives tokens per second."""
    model = run.model
    results: list[Result] = []
    before = work_so_far(model.engine.hosts)
    began = time.perf_counter()
    for first in range(0, len(prompts), settings.batch):
        results += model.generate_all(
            prompts[first : first + settings.batch],
            method=run.contestant.method,
            max_tokens=settings.max_tokens,
            temperature=settings.temperature,
            seed=settings.seed,
            **run.contestant.options,
        )
    seconds = time.perf_counter() - began
    run.results = results
    run.costs = costs_since(model.engine.hosts, before)
    return run.tokens / seconds


def _losses(runs: Sequence[Run], truths: Sequence[Sequence[int]]) -> dict[Model, float]:
    """The loss on the true completions of every model that scores chains."""
    losses: dict[Model, float] = {}
    for run in runs:
        if run.model not in losses and _scores(run.model):
            prompts = [result.prompt_ids for result in run.results]
            losses[run.model] = statistics.mean(surprises(run.model, zip(prompts, truths)))
    return losses


def _scores(model: Model) -> bool:
    """Does it know the law of what it wrote? A masked model has none for whole sequences."""
    return model.family.can(ChainScorer)


def _row(run: Run, comparison: Comparison) -> ComparisonRow:
    model = run.model
    stats = [result.stats for result in run.results]
    forwards = sum(one.forwards for one in stats)
    lengths = [one.acceptance_length for one in stats if one.acceptance_length is not None]
    alphas = [one.alpha for one in stats if one.alpha is not None]
    reference = _reference_of(run, comparison.runs)
    plain = _plain_run(comparison.runs)
    return ComparisonRow(
        model=model.name,
        method=run.contestant.label,
        family=model.family.name,
        guarantee=run.results[0].guarantee,
        reason=run.results[0].reason,
        tokens=run.tokens,
        forwards=forwards,
        draft_forwards=sum(one.draft_forwards for one in stats),
        tokens_per_forward=run.tokens / forwards,
        acceptance_length=statistics.mean(lengths) if lengths else None,
        alpha=statistics.mean(alphas) if alphas else None,
        tokens_per_second=run.speed,
        least=min(run.rates),
        most=max(run.rates),
        speedup=None if reference is None else run.speed / reference.speed,
        over_ar=None if plain is None else run.speed / plain.speed,
        equals_reference=_equal_share(run, reference, comparison.temperature),
        p_value=_p_value(run, comparison.temperature),
        perplexity=_perplexity(run, comparison.judge),
        parses=_parsing_share(run),
        first_line_right=_first_line_share(run, comparison.truths),
        loss=comparison.losses.get(model),
        mflops_per_token=sum(cost.flops for cost in run.costs.values()) / run.tokens / 1e6,
        mbytes_per_token=sum(cost.bytes for cost in run.costs.values()) / run.tokens / 1e6,
        draft_mflops=_mflops_per_draft(run),
    )


def _reference_of(run: Run, runs: Sequence[Run]) -> Run | None:
    """The run of a method's reference on the same model, if it takes part; of several the one that
    shares its options, such as a cache."""
    method = registry.method_named(run.method.reference)
    same_model = [other for other in runs if other.model is run.model]
    found = [other for other in same_model if other.contestant.method == method.name]

    def differing(other: Run) -> int:
        ours, theirs = run.contestant.options, other.contestant.options
        return sum(ours.get(name) != theirs.get(name) for name in method.option_names())

    return min(found, key=differing, default=None)


def _plain_run(runs: Sequence[Run]) -> Run | None:
    """Plain decoding of a left-to-right model, if it takes part."""
    plain = [run for run in runs if run.contestant.method == "ar"]
    return next((run for run in plain if run.model.family.name == "causal"), None)


def _equal_share(run: Run, reference: Run | None, temperature: float) -> float | None:
    if reference is None or temperature != 0:
        return None
    pairs = zip(run.results, reference.results)
    return statistics.mean(ours.token_ids == theirs.token_ids for ours, theirs in pairs)


def _p_value(run: Run, temperature: float) -> float | None:
    if temperature == 0 or not _scores(run.model):
        return None
    return law_p_value(run.model, run.results, temperature)


def _perplexity(run: Run, judge: Model | None) -> float | None:
    return None if judge is None else completion_perplexity(judge, run.model, run.results)


def _parsing_share(run: Run) -> float:
    decode = run.model.decode
    texts = [decode([*result.prompt_ids, *result.token_ids]) for result in run.results]
    return statistics.mean(parses(text) for text in texts)


def _first_line_share(run: Run, truths: Sequence[Sequence[int]] | None) -> float | None:
    if truths is None:
        return None
    return statistics.mean(first_lines_right(run.model, run.results, truths))


def first_lines_right(
    model: Model, results: Sequence[Result], truths: Sequence[Sequence[int]]
) -> list[bool]:
    """Of each completion, whether its first line is the true one."""
    decode = model.decode
    return [
        first_line(decode(result.token_ids)) == first_line(decode(truth))
        for result, truth in zip(results, truths)
    ]


def _mflops_per_draft(run: Run) -> float | None:
    """Arithmetic of the draft models for one draft, in millions; None where no other model
    drafts."""
    drafts = sum(1 for result in run.results for event in result.trace if event.drafted)
    if not drafts or not any(result.stats.draft_forwards for result in run.results):
        return None
    others = [cost.flops for host, cost in run.costs.items() if host is not run.model.host]
    return sum(others) / drafts / 1e6
