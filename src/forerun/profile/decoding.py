"""Where the time of decoding goes: forwards, rules, the host's own work, and what is outside the
engine."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from forerun.api import Model, Prompt
from forerun.engine.clock import Clock

MethodOptions = tuple[str, Mapping[str, Any]]  # a method's name and its options


@dataclass(frozen=True)
class TimeSplit:
    """Where the time of decoding went, in seconds."""

    method: str
    tokens: int
    forwards: int
    forward: float
    rules: float
    host: float  # plans, laws and bookkeeping
    idle: float  # outside the engine

    @property
    def total(self) -> float:
        return self.forward + self.rules + self.host + self.idle

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "total": self.total, "tokens/s": self.tokens / self.total}


def time_splits(
    model: Model,
    methods: Sequence[MethodOptions],
    prompts: Sequence[Prompt],
    *,
    batch: int = 1,
    turns: int = 3,
    **options: Any,
) -> list[TimeSplit]:
    """Decode the prompts by every method in turns, and split the time of its median turn. The
    options are those of `generate`, for all methods."""
    splits: list[list[TimeSplit]] = [[] for _ in methods]
    for turn in range(turns + 1):
        for i, method in enumerate(methods):
            split = _time_split(model, method, prompts, batch, options)
            if turn:  # the first warms up
                splits[i].append(split)
    model.engine.clock = Clock()
    return [_median(of_method) for of_method in splits]


def _median(splits: Sequence[TimeSplit]) -> TimeSplit:
    return sorted(splits, key=lambda split: split.total)[len(splits) // 2]


def _time_split(
    model: Model,
    method: MethodOptions,
    prompts: Sequence[Prompt],
    batch: int,
    options: Mapping[str, Any],
) -> TimeSplit:
    name, method_options = method
    clock = Clock(times_device=True)
    model.engine.clock = clock
    results = []
    began = time.perf_counter()
    for first in range(0, len(prompts), batch):
        group = prompts[first : first + batch]
        results += model.generate_all(group, method=name, **method_options, **options)
    seconds = time.perf_counter() - began
    clock.read_device_times()
    return TimeSplit(
        method=name,
        tokens=sum(result.stats.tokens for result in results),
        forwards=sum(result.stats.forwards for result in results),
        forward=clock.forward,
        rules=clock.rules,
        host=clock.total - clock.forward - clock.rules,
        idle=seconds - clock.total,
    )
