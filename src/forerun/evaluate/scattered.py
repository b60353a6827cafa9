"""The task `scattered`: held-out text of which a share of tokens, at random places, is given (Guo &
Ermon, Tables 1, 4, 5, 6 and 8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.api import Model
from forerun.errors import BadOption
from forerun.evaluate.judge import check_judge, perplexity
from forerun.evaluate.metrics import shannon_entropy, t_test
from forerun.evaluate.tasks import (
    Gapped,
    MethodChoice,
    Samples,
    TaskRow,
    TaskSettings,
    costs,
    fill,
    means,
)
from forerun.profile.progress import Progress, no_progress

TESTED = ("perplexity", "entropy")


@dataclass(frozen=True)
class ScatteredTask:
    """Windows of held-out text, the share of each that is given, and who judges what is filled
    in."""

    windows: np.ndarray
    known: float = 0.3
    judge: Model | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.known < 1:
            raise BadOption(f"known={self.known!r} must be at least 0 and below 1.")


def scattered_canvases(windows: np.ndarray, known: float, seed: int = 0) -> list[Gapped]:
    """A share of the tokens of each window, at random places; the others are blank."""
    rng = np.random.default_rng(seed)
    canvases: list[Gapped] = []
    for window in windows:
        count = max(1, round(known * len(window)))
        given = set(rng.choice(len(window), count, replace=False).tolist())
        canvases.append([int(t) if i in given else None for i, t in enumerate(window)])
    return canvases


def scattered(
    model: Model,
    choices: Sequence[MethodChoice],
    task: ScatteredTask,
    settings: TaskSettings | None = None,
    progress: Progress = no_progress,
) -> list[TaskRow]:
    """Quality and cost of filling what is missing; p-values against the first method."""
    settings = settings or TaskSettings()
    if task.judge is not None:
        check_judge(task.judge, model)
    canvases = scattered_canvases(task.windows, task.known, settings.seed)
    samples: list[Samples] = []
    for number, choice in enumerate(choices):
        timed = list(fill(model, choice, canvases, settings, number))
        outputs = [one.result.token_ids for one in timed]
        quality = {"entropy": [shannon_entropy(tokens) for tokens in outputs]}
        if task.judge is not None:
            quality["perplexity"] = [perplexity(task.judge, tokens, model) for tokens in outputs]
        samples.append({**quality, **costs(choice, timed)})
        progress(number + 1, len(choices))
    rows = []
    for number, (choice, of_choice) in enumerate(zip(choices, samples)):
        p_values = _p_values(of_choice, samples[0]) if number else {}
        rows.append(TaskRow(choice.label, means(of_choice), p_values))
    return rows


def _p_values(samples: Samples, first: Samples) -> dict[str, float]:
    tested = [name for name in TESTED if name in samples]
    return {name: t_test(samples[name], first[name]) for name in tested}
