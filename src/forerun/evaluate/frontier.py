"""What speed costs a block model in quality: tokens per forward beside the judge's surprise, for
many ways to decode (figure 3 of Han et al., 2026)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from forerun.api import Model
from forerun.evaluate.ar_ness import check_fills_blocks
from forerun.evaluate.compare import first_lines_right
from forerun.evaluate.judge import check_judge, surprises
from forerun.evaluate.metrics import Mean, mean, shannon_entropy
from forerun.profile.progress import Progress, no_progress


@dataclass(frozen=True)
class FrontierSetting:
    """A method and its options, in a series that is drawn as a line."""

    series: str
    method: str
    options: Mapping[str, Any]

    @property
    def label(self) -> str:
        words = [
            str(value) if name == "router" else f"{name} {value}"
            for name, value in self.options.items()
            if name != "block"
        ]
        return self.method + (f" ({', '.join(words)})" if words else "")


def frontier_settings(block: int) -> list[FrontierSetting]:
    """What the frontier is made of, at one block size."""
    settings = [FrontierSetting("ar", "ar", {})]

    def add(series: str, method: str, **options: Any) -> None:
        settings.append(FrontierSetting(series, method, {"block": block, **options}))

    add("static", "block-stepwise")
    for count in (2, 4):
        if count < block:
            add("static", "block", schedule="static", steps=block // count)
    for threshold in (0.95, 0.9, 0.8, 0.7, 0.6, 0.5):
        add("dynamic", "block", threshold=threshold)
    for span in (1, 2, 4, 8, 16):
        if span < block:
            add("s2d2", "s2d2", router="span", span=span)
    add("s2d2, causal text", "s2d2", causal="text")
    for enough in (0.0, 1.0, 2.0):
        add("s2d2, score", "s2d2", router="score", enough=enough)
    add("s2d2, score, margin", "s2d2", router="score", estimator="margin")
    add("s2d2, hysteresis", "s2d2", router="hysteresis")
    add("s2d2, hysteresis", "s2d2", router="hysteresis", on=1.0, off=-5.0)  # the paper's
    add("s2d2, bandit", "s2d2", router="bandit")
    for ahead in ("whole", "every"):
        options = {"k": 8, "ahead": ahead}
        settings.append(FrontierSetting("s2d2-exact", "s2d2-exact", options))
    add("block-ssd", "block-ssd")
    for enough in (0.0, 1.0):
        add("s2d2-canvases", "s2d2-canvases", router="score", enough=enough)
    return settings


@dataclass(frozen=True)
class FrontierPoint:
    """What a setting cost and gave, over all prompts."""

    series: str
    label: str
    method: str
    options: Mapping[str, Any]
    tokens_per_forward: Mean
    nats: Mean  # per token, under the judge
    entropy: Mean  # bits per token of an output's own frequencies: low where it repeats itself
    first_line_right: Mean  # share of completions whose first line is the true one
    seconds: float | None = None

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class HeldOutText:
    """Windows of held-out tokens, of each the first `given` given."""

    windows: np.ndarray
    given: int = 64

    @property
    def prompts(self) -> list[list[int]]:
        return self.windows[:, : self.given].tolist()

    @property
    def truths(self) -> list[list[int]]:
        """What really follows the prompts."""
        return self.windows[:, self.given :].tolist()


def frontier(
    model: Model,
    judge: Model,
    text: HeldOutText,
    settings: Sequence[FrontierSetting],
    *,
    temperature: float = 0.0,
    progress: Progress = no_progress,
) -> list[FrontierPoint]:
    """Complete all prompts together, by every setting."""
    check_fills_blocks(model, "frontier")
    check_judge(judge, model)
    points = []
    for setting in settings:
        points.append(_point(model, judge, text, setting, temperature))
        progress(len(points), len(settings))
    return points


def _point(
    model: Model, judge: Model, text: HeldOutText, setting: FrontierSetting, temperature: float
) -> FrontierPoint:
    truths = text.truths
    began = time.perf_counter()
    results = model.generate_all(
        text.prompts,
        method=setting.method,
        max_tokens=len(truths[0]),
        ignore_eos=True,
        temperature=temperature,
        **setting.options,
    )
    seconds = time.perf_counter() - began
    completions = [(result.prompt_ids, result.token_ids) for result in results]
    return FrontierPoint(
        setting.series,
        setting.label,
        setting.method,
        setting.options,
        tokens_per_forward=mean([r.stats.tokens / r.stats.forwards for r in results]),
        nats=mean(surprises(judge, completions, model)),
        entropy=mean([shannon_entropy(result.token_ids) for result in results]),
        first_line_right=mean(first_lines_right(model, results, truths)),
        seconds=seconds,
    )
