"""How methods are named, how they fill canvases, and what that cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from forerun import registry
from forerun.api import Model
from forerun.errors import BadOption
from forerun.evaluate.metrics import Mean, mean
from forerun.requests.infill import Infilled
from forerun.requests.model import Tokenizer
from forerun.requests.result import Result

SEEDS_APART = 1_000_003  # every batch has a seed of its own

Gapped = list[int | None]  # token ids, None for every blank
T = TypeVar("T")
R = TypeVar("R", bound=Result)


@dataclass(frozen=True)
class MethodChoice:
    """A method as the command line names it: METHOD or METHOD:DRAFT, with options of its own as
    @NAME=VALUE behind it."""

    method: str
    draft: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, name: str, options: Mapping[str, Any]) -> MethodChoice:
        """Options go to the methods that have them; a method's own must be its own."""
        head, *own = name.split("@")
        method, _, draft = head.partition(":")
        known = registry.method_named(method).option_names()
        taken = {name: value for name, value in options.items() if name in known}
        for word in own:
            option, _, value = word.partition("=")
            taken[option] = plain_value(value)
        return cls(method, draft or None, taken)

    @property
    def label(self) -> str:
        draft = f" ({self.draft})" if self.draft else ""
        words = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return self.method + draft + (f" [{words}]" if words else "")


def plain_value(text: str) -> bool | int | float | str:
    """An option's value as it is written in a command: a number where it reads as one."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


@dataclass(frozen=True)
class TaskSettings:
    """How a task is decoded."""

    temperature: float = 1.0
    batch: int = 1
    seed: int = 0
    trials: int = 1  # completions of each text

    def seed_of(self, choice: int, first: int) -> int:
        """Of the batch that begins with item `first`, decoded by the choice of this number."""
        return (self.seed + choice) * SEEDS_APART + first


@dataclass(frozen=True)
class TaskRow:
    """What one method did on a task."""

    label: str
    measures: Mapping[str, Mean]
    p_values: Mapping[str, float] = field(default_factory=dict)  # of having the first row's mean

    def as_dict(self) -> dict[str, object]:
        return {
            "label": self.label,
            **{name: asdict(measure) for name, measure in self.measures.items()},
            "p_values": self.p_values,
        }


class Timed(NamedTuple, Generic[R]):
    """A result, and its share of the seconds that its batch took."""

    result: R
    seconds: float


Samples = dict[str, list[float]]  # by measure, one number for each result


def means(samples: Samples) -> dict[str, Mean]:
    return {name: mean(values) for name, values in samples.items()}


def fill(
    model: Model,
    choice: MethodChoice,
    canvases: Sequence[Gapped],
    settings: TaskSettings,
    number: int = 0,
) -> Iterator[Timed[Infilled]]:
    """Fill every canvas, batch by batch; `number` is that of the choice."""

    def infill(group: Sequence[Gapped], seed: int) -> list[Infilled]:
        return model.infill_all(
            group,
            method=choice.method,
            draft=choice.draft,
            temperature=settings.temperature,
            seed=seed,
            **choice.options,
        )

    return in_batches(infill, canvases, settings, number)


def in_batches(
    decode: Callable[[Sequence[T], int], list[R]],
    items: Sequence[T],
    settings: TaskSettings,
    number: int,
) -> Iterator[Timed[R]]:
    """`decode(items, seed)` batch by batch, timed; `number` is that of the choice."""
    for first in range(0, len(items), settings.batch):
        group = items[first : first + settings.batch]
        began = time.perf_counter()
        results = decode(group, settings.seed_of(number, first))
        seconds = (time.perf_counter() - began) / len(group)
        for result in results:
            yield Timed(result, seconds)


def costs(choice: MethodChoice, timed: Sequence[Timed[R]]) -> Samples:
    """What each sequence took. A drafter that is no model is called once per verdict; one that is
    runs forwards, which are counted."""
    stats = [one.result.stats for one in timed]
    verdicts = [
        sum(bool(event.drafted) for event in one.result.trace) if choice.draft else 0
        for one in timed
    ]
    return {
        "forwards": [one.forwards for one in stats],
        "drafter calls": [one.draft_forwards or calls for one, calls in zip(stats, verdicts)],
        "tokens/forward": [one.tokens / one.forwards for one in stats],
        "seconds": [one.seconds for one in timed],
    }


def with_gap(model: Model, text: str, start: int, end: int) -> Gapped:
    """The tokens of a text, blank where they have characters from `start` to `end`: a token that
    reaches over the edge is missing too."""
    encode = _tokenizer(model)
    encoded = encode(text, add_special_tokens=False, return_offsets_mapping=True)
    return [
        None if first < end and last > start else token
        for token, (first, last) in zip(encoded.input_ids, encoded.offset_mapping)
    ]


def _tokenizer(model: Model) -> Tokenizer:
    if model.tokenizer is None:
        raise BadOption(f"'{model.name}' has no tokenizer: tasks made of text need one.")
    return model.tokenizer
