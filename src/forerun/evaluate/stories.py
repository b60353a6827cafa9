"""The task `stories`: one or three sentences of five are missing (Guo & Ermon, Table 3). What is
filled in is compared with what stood there, by ROUGE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from forerun.api import Model
from forerun.errors import BadOption
from forerun.evaluate.metrics import rouge
from forerun.evaluate.tasks import (
    Gapped,
    MethodChoice,
    TaskRow,
    TaskSettings,
    costs,
    fill,
    means,
    parse_object,
    read_lines,
    with_gap,
)
from forerun.profile.progress import Progress, no_progress

SENTENCES = 5


class StoryGap(NamedTuple):
    """A story with a gap, and the text that stood there."""

    canvas: Gapped
    truth: str


def read_stories(file: str) -> list[list[str]]:
    """Five sentences a story: JSON lines with "sentences", or lines of five fields with tabs
    between them."""
    stories = []
    for number, line in enumerate(read_lines(file), 1):
        if not line.strip():
            continue
        if line.lstrip().startswith("{"):
            sentences = parse_object(file, number, line).get("sentences", ())
        else:
            sentences = line.split("\t")
        if len(sentences) != SENTENCES:
            raise BadOption(
                f"{file}:{number} has {len(sentences)} sentences, and a story has five."
            )
        stories.append([sentence.strip() for sentence in sentences])
    return stories


def stories(
    model: Model,
    choices: Sequence[MethodChoice],
    texts: Sequence[Sequence[str]],
    settings: TaskSettings | None = None,
    *,
    missing: Sequence[int] = (2,),
    progress: Progress = no_progress,
) -> list[TaskRow]:
    """Sentences `missing` (from 0) are filled in, with as many tokens as stood there, and compared
    with them."""
    settings = settings or TaskSettings(batch=8, trials=5)
    gaps = [_gap(model, sentences, missing) for sentences in texts] * settings.trials
    canvases = [gap.canvas for gap in gaps]
    rows = []
    for number, choice in enumerate(choices):
        timed = list(fill(model, choice, canvases, settings, number))
        scores = [rouge(" ".join(one.result.fills), gap.truth) for one, gap in zip(timed, gaps)]
        quality = {name: [score[name] for score in scores] for name in scores[0]}
        rows.append(TaskRow(choice.label, means({**quality, **costs(choice, timed)})))
        progress(number + 1, len(choices))
    return rows


def _gap(model: Model, sentences: Sequence[str], missing: Sequence[int]) -> StoryGap:
    """A story without some sentences. Tokens that reach over the edge are missing too."""
    before = " ".join(sentences[: missing[0]])
    truth = " ".join(sentences[i] for i in missing)
    after = " ".join(sentences[missing[-1] + 1 :])
    text = " ".join(part for part in (before, truth, after) if part)
    start = len(before) + 1 if before else 0
    return StoryGap(with_gap(model, text, start, start + len(truth)), truth)
