"""What answers add up to: quality with its error, cost, and each method beside the first."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from forerun.evaluate.answers import AnswerFile, Key, Record
from forerun.evaluate.benchmarks.base import Benchmark, Scores
from forerun.evaluate.benchmarks.catalogue import BENCHMARKS
from forerun.evaluate.metrics import Mean, mean
from forerun.evaluate.statistics import (
    Difference,
    mcnemar,
    paired_bootstrap,
    pass_at_k,
    sentence,
)

RESAMPLES = 400  # for the error of what is no mean


@dataclass(frozen=True)
class Speed:
    """What answers cost, on average."""

    tokens: int
    forwards: float  # of the target, per answer
    tokens_per_forward: float
    tokens_per_second: float | None  # of all answers together, by the wall clock
    acceptance_length: float | None  # tokens per verdict, the one that is added included
    acceptance_rate: float | None
    first_token: float | None  # seconds

    @classmethod
    def of(cls, records: Sequence[Record], all_of_them: Sequence[Record] = ()) -> Speed:
        """What these answers cost. The wall clock saw `all_of_them`."""
        costs = [record.cost for record in records]
        tokens = sum(cost.tokens for cost in costs)
        forwards = sum(cost.forwards for cost in costs)
        verdicts = sum(cost.verdicts for cost in costs)
        accepted = sum(cost.accepted for cost in costs)
        drafted = sum(cost.drafted for cost in costs)
        first = [cost.first_token for cost in costs if cost.first_token is not None]
        return cls(
            tokens=tokens,
            forwards=forwards / max(1, len(costs)),
            tokens_per_forward=tokens / forwards if forwards else 0.0,
            tokens_per_second=_per_second(all_of_them or records),
            acceptance_length=accepted / verdicts + 1 if verdicts else None,
            acceptance_rate=accepted / drafted if drafted else None,
            first_token=float(np.mean(first)) if first else None,
        )


def _per_second(records: Sequence[Record]) -> float | None:
    ends: dict[str, float] = {}  # of each run, when its last answer came
    for record in records:
        ends[record.session] = max(ends.get(record.session, 0.0), record.at)
    seconds = sum(ends.values())
    return sum(record.cost.tokens for record in records) / seconds if seconds else None


@dataclass(frozen=True)
class Beside:
    """A method beside the first one, on the items that both answered."""

    first: str
    difference: Difference
    p_value: float | None  # McNemar's, where items are right or wrong
    same: float  # share of answers that are the same, token for token
    sentence: str


@dataclass(frozen=True)
class Summary:
    """One method on one benchmark."""

    settings: Mapping[str, Any]
    about: Mapping[str, Any]
    items: int
    metric: str
    percent: bool
    score: Mean
    measures: Mapping[str, Mean]
    speed: Speed
    groups: Mapping[str, Speed] = field(default_factory=dict)
    beside: Beside | None = None

    @property
    def method(self) -> str:
        return str(self.settings["method"])

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarise(files: Sequence[AnswerFile]) -> list[Summary]:
    """Files of one benchmark, model and kind of number; all are set beside the first. Everything
    is of the items that all have answered, but for tokens per second, which are of all answers."""
    answered = [{item for item, _ in file.scores} for file in files]
    common = set.intersection(*answered) or set.union(*answered)
    return [
        _summary(file, files[0] if number else None, common) for number, file in enumerate(files)
    ]


def summarise_folder(folder: str | Path) -> list[list[Summary]]:
    """All answers of a folder: a list for each benchmark, model and kind of number, `ar` or else
    the reference of the others first."""
    groups: dict[tuple[str, ...], list[AnswerFile]] = {}
    for path in sorted(Path(folder).glob("*.jsonl")):
        file = AnswerFile.read(path)
        if file.scores:
            names = ("task", "model", "dtype", "device", "lanes", "temperature", "data")
            key = tuple(str(file.settings.get(name)) for name in names)
            groups.setdefault(key, []).append(file)
    return [summarise(_reference_first(files)) for files in groups.values()]


def _reference_first(files: Sequence[AnswerFile]) -> list[AnswerFile]:
    references = {file.settings.get("reference") for file in files}
    return sorted(files, key=lambda file: file.settings["method"] not in references)


def _summary(file: AnswerFile, first: AnswerFile | None, items: set[str]) -> Summary:
    benchmark = BENCHMARKS[file.settings["task"]]
    by_item = {item: s for item, s in _by_item(file.scores).items() if item in items}
    measures = _measures(benchmark, by_item)
    answered = [record for key, record in file.records.items() if key in file.scores]
    every = [record for record in answered if record.finish != "too long"]
    decoded = [record for record in every if record.item in items]
    names = sorted({record.group for record in decoded} - {""})
    groups = {name: Speed.of([one for one in decoded if one.group == name]) for name in names}
    chosen = "rating" if "rating" in measures else benchmark.metric
    return Summary(
        settings=file.settings,
        about=file.about,
        items=len(by_item),
        metric=chosen,
        percent=benchmark.percent,
        score=measures[chosen],
        measures={name: value for name, value in measures.items() if name != chosen},
        speed=Speed.of(decoded, every),
        groups=groups if len(groups) > 1 else {},
        beside=None if first is None else _beside(benchmark, file, first, items),
    )


def _by_item(scores: Mapping[Key, Scores]) -> dict[str, list[Scores]]:
    """The scores of all samples of each item."""
    found: dict[str, list[Scores]] = {}
    for (item, _), one in scores.items():
        found.setdefault(item, []).append(one)
    return found


def _measures(benchmark: Benchmark, by_item: Mapping[str, Sequence[Scores]]) -> dict[str, Mean]:
    """Means over items of the means over their samples. So samples of one item, which are alike, do
    not make the error look smaller than it is."""
    samples = list(by_item.values())
    found = {
        name: mean([float(np.mean([one[name] for one in item])) for item in samples])
        for name in samples[0][0]
    }
    if benchmark.metric == "pass@1":
        found |= _pass_at_more(samples)
    if benchmark.combine is not None:
        flat = [one for item in samples for one in item]
        found |= _combined(benchmark.combine, flat)
    return found


def _pass_at_more(samples: Sequence[Sequence[Scores]]) -> dict[str, Mean]:
    """pass@k for k up to the number of samples."""
    least = min(map(len, samples))
    found = {}
    for k in (5, 10, 100):
        if k <= least:
            passed = [(len(item), int(sum(one["pass@1"] for one in item))) for item in samples]
            found[f"pass@{k}"] = mean([pass_at_k(n, c, k) for n, c in passed])
    return found


def _combined(
    combine: Callable[[Sequence[Scores]], Scores], scores: list[Scores]
) -> dict[str, Mean]:
    """What is made of all scores, with an error by resampling them."""
    rng = np.random.default_rng(0)
    count = len(scores)
    drawn = [
        combine([scores[i] for i in rng.integers(0, count, count)])
        for _ in range(RESAMPLES if count > 1 else 0)
    ]
    found = {}
    for name, value in combine(scores).items():
        error = float(np.std([one[name] for one in drawn])) if drawn else math.nan
        found[name] = Mean(value, error, count)
    return found


def _beside(
    benchmark: Benchmark, file: AnswerFile, first: AnswerFile, items: set[str]
) -> Beside | None:
    metric = benchmark.metric
    ours = _by_item(file.scores)
    theirs = _by_item(first.scores)
    both = [item for item in theirs if item in ours and item in items]
    common = [item for item in both if metric in theirs[item][0]]
    if not common:
        return None
    a = [float(np.mean([one[metric] for one in ours[item]])) for item in common]
    b = [float(np.mean([one[metric] for one in theirs[item]])) for item in common]
    difference = paired_bootstrap(a, b)
    binary = {*a, *b} <= {0.0, 1.0}
    p_value = mcnemar(a, b) if binary else None
    keys = [key for key in first.records if key in file.records and key[0] in common]
    same = [first.records[key].tokens == file.records[key].tokens for key in keys]
    words = sentence(difference, p_value, benchmark.percent)
    if all(same):
        words = f"the same answers, token for token, on all {len(common)} items"
    name = str(first.settings["method"])
    return Beside(name, difference, p_value, float(np.mean(same)), words)
