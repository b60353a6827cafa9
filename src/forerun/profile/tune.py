"""Which options are fastest here: costs are measured on this machine, acceptance on your prompts,
and the choice is checked by running it.

None of this touches what is decided: the methods that are tuned keep their reference's law whatever
their options.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forerun.api import Model, Prompt
from forerun.errors import BadOption
from forerun.options import check_whole
from forerun.profile.machine import machine
from forerun.profile.surface import SurfacePeak
from forerun.requests.request import parse_request

Options = Mapping[str, Any]
Report = Callable[[str], None]


def no_report(line: str) -> None:
    """For callers that read no lines."""


@dataclass(frozen=True)
class TuningSettings:
    """How options are measured."""

    max_tokens: int = 48
    temperature: float = 0.0
    rounds: int = 1  # per setting; the median counts

    def __post_init__(self) -> None:
        check_whole("rounds", self.rounds)
        check_whole("max_tokens", self.max_tokens)


@dataclass(frozen=True)
class Speed:
    """How fast some options decode, at batch 1."""

    tokens_per_second: float
    tokens_per_forward: float
    alpha: float  # how often a drafted token that was judged was accepted

    def as_dict(self) -> dict[str, float]:
        return {
            "tokens/s": self.tokens_per_second,
            "tokens/forward": self.tokens_per_forward,
            "alpha": self.alpha,
        }


@dataclass(frozen=True)
class Prediction:
    """Tokens per second that SpecDiff's equations expect."""

    equation_3: float  # from the acceptance measured at this T
    equation_6: float  # from the acceptance that was fitted over all T

    def as_dict(self) -> dict[str, float]:
        return {"equation 3": self.equation_3, "equation 6": self.equation_6}


@dataclass(frozen=True)
class TriedOptions:
    """Some options, their speed, and the speed that was expected, where there is a theory."""

    options: Options
    speed: Speed
    expected: Prediction | None = None

    def as_dict(self) -> dict[str, object]:
        expected = {} if self.expected is None else self.expected.as_dict()
        return {**self.options, **expected, **self.speed.as_dict()}


@dataclass(frozen=True)
class SpecdiffFacts:
    """What was learned about a pair of models on the way."""

    c4: float
    c5: float
    alpha_by_steps: Mapping[int, float]
    alpha_by_draft_temperature: Mapping[float, float]  # empty at temperature 0
    foreseen: TriedOptions  # what equation 3 chose
    foreseen_share: float  # its measured speed, of the best

    def as_dict(self) -> dict[str, object]:
        options = self.foreseen.options
        by_temperature = {}
        if self.alpha_by_draft_temperature:
            by_temperature["alpha by draft_temperature"] = self.alpha_by_draft_temperature
        return {
            **by_temperature,
            "c4": self.c4,
            "c5": self.c5,
            "alpha by T": self.alpha_by_steps,
            "equation 3 chose": [options["k"], options["steps"]],
            "equation 3's choice, of the best": self.foreseen_share,
        }


@dataclass(frozen=True)
class JacobiFacts:
    """What was learned about a model on the way."""

    seconds: Mapping[int, float]  # of a forward, by its tokens
    knee: int
    peak: SurfacePeak

    def as_dict(self) -> dict[str, object]:
        return {
            "seconds": self.seconds,
            "knee": self.knee,
            "surface degree": self.peak.degree,
            "surface peak": (self.peak.block, self.peak.candidates),
        }


@dataclass(frozen=True)
class Tuned:
    """What was found: the options to use, and everything that was measured on the way."""

    method: str
    options: Options
    tokens_per_second: float
    plain: float  # tokens per second of the reference
    rows: Sequence[TriedOptions]
    facts: SpecdiffFacts | JacobiFacts
    machine: str = field(default_factory=machine)

    def as_dict(self) -> dict[str, object]:
        return {
            "method": self.method,
            "options": self.options,
            "tokens_per_second": self.tokens_per_second,
            "plain": self.plain,
            "machine": self.machine,
            "rows": [row.as_dict() for row in self.rows],
            "facts": self.facts.as_dict(),
        }

    def write(self, file: str) -> None:
        Path(file).write_text(json.dumps(self.as_dict(), indent=1))


def read(file: str) -> tuple[str, dict[str, Any]]:
    """(method, options) that `forerun tune` wrote; refused before anything is loaded if they are
    none."""
    try:
        tuned = json.loads(Path(file).read_text())
        method = str(tuned["method"])
        options = dict(tuned["options"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadOption(
            f"tuned={file!r} is not a file that `forerun tune` wrote ({error})."
        ) from error
    without_draft = {key: value for key, value in options.items() if key != "draft"}
    parse_request(method, options.get("draft"), without_draft)
    return method, options


def measure_speed(
    model: Model, prompts: Sequence[Prompt], max_tokens: int, rounds: int = 1, **options: Any
) -> Speed:
    """Decode the prompts one by one. The options are those of `generate`."""
    rates = []
    for _ in range(rounds):
        results = []
        began = time.perf_counter()
        for prompt in prompts:
            results += model.generate_all(
                [prompt], max_tokens=max_tokens, ignore_eos=True, **options
            )
        tokens = sum(result.stats.tokens for result in results)
        rates.append(tokens / (time.perf_counter() - began))
    verdicts = [event for result in results for event in result.trace if event.drafted]
    accepted = sum(event.accepted for event in verdicts)
    judged = accepted + sum(bool(event.rejected) for event in verdicts)
    return Speed(
        tokens_per_second=statistics.median(rates),
        tokens_per_forward=tokens / sum(result.stats.forwards for result in results),
        alpha=accepted / judged if judged else 0.0,
    )


def fastest(rows: Sequence[TriedOptions]) -> TriedOptions:
    return max(rows, key=lambda row: row.speed.tokens_per_second)
