"""`evaluate` by several workers: each answers and grades some items, and the answers are joined in
the file that one process would have written."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from forerun import __version__
from forerun.evaluate.answers import AnswerFile, digest
from forerun.evaluate.asking import Style
from forerun.evaluate.benchmarks.base import Choose, Item, Read
from forerun.evaluate.benchmarks.catalogue import benchmark_named
from forerun.evaluate.evaluation import Evaluation, forget
from forerun.evaluate.examiner import SandboxExaminer
from forerun.evaluate.likelihood import Likelihood
from forerun.evaluate.tasks import MethodChoice
from forerun.scale.journal import Journal
from forerun.scale.loading import LoadPlan
from forerun.scale.work import Answered, Part, Pool, Worker

ITEMS = 32  # of a part

Progress = Callable[[Answered, int, int], None]


@dataclass(frozen=True)
class Question:
    """A benchmark that is asked."""

    task: str
    items: Sequence[Item]
    shown: Mapping[str, Any] = field(default_factory=dict)

    @property
    def only_scores(self) -> bool:
        return all(isinstance(item.ask, Choose | Read) for item in self.items)


@dataclass(frozen=True)
class EvaluatePlan:
    """A worker that answers items and grades the answers."""

    load: LoadPlan
    style: Style
    draws: int = 32  # maskings of a log-likelihood
    examiner: Mapping[str, Any] = field(default_factory=dict)

    def make(self) -> Worker:
        model = self.load.model()

        def work(value: Mapping[str, Any]) -> list[dict[str, Any]]:
            """The lines of the file of answers."""
            forget(model)
            question, choice = pickle.loads(base64.b64decode(value["asked"]))
            with TemporaryDirectory() as folder:
                evaluation = Evaluation(
                    model,
                    benchmark_named(question.task),
                    question.items,
                    folder,
                    self.style,
                    SandboxExaminer(**self.examiner),
                    Likelihood(model, self.draws, self.style.seed),
                    None,
                    question.shown,
                )
                [file] = evaluation.run([choice])
                return lines_of(file)

        return work


def lines_of(file: AnswerFile) -> list[dict[str, Any]]:
    """What stands in a file of answers."""
    head = {"kind": "settings", **file.settings, "about": file.about}
    answers = [{"kind": "answer", **asdict(record)} for record in file.records.values()]
    grades = [
        {"kind": "grade", "item": item, "sample": sample, "scores": scores}
        for (item, sample), scores in file.scores.items()
    ]
    return [head, *answers, *grades]


def parts_of(number: int, question: Question, choices: Sequence[MethodChoice]) -> list[Part]:
    """A question for each way to decode, some items at a time. What belongs to one conversation
    stays together."""
    asked = choices[:1] if question.only_scores else choices
    parts = []
    for way, choice in enumerate(asked):
        for place, items in enumerate(in_parts(question.items, ITEMS)):
            some = Question(question.task, items, question.shown)
            words = base64.b64encode(pickle.dumps((some, choice))).decode()
            parts.append(Part(f"{number}.{way}.{place}", {"asked": words}))
    return parts


def in_parts(items: Sequence[Item], size: int) -> list[list[Item]]:
    parts: list[list[Item]] = []
    for item in items:
        if not parts or (len(parts[-1]) >= size and item.after is None):
            parts.append([])
        parts[-1].append(item)
    return parts


def evaluate(
    plan: EvaluatePlan,
    questions: Sequence[Question],
    choices: Sequence[MethodChoice],
    folder: Path,
    pool: Pool,
    progress: Progress = lambda answered, done, total: None,
) -> list[list[AnswerFile]]:
    """For each question the file of each way to decode. A run that was stopped goes on."""
    every = [parts_of(number, question, choices) for number, question in enumerate(questions)]
    parts = [part for of_question in every for part in of_question]
    made_by = {
        "plan": digest(asdict(plan)),
        "parts": digest([part.value for part in parts]),
        "forerun": __version__,
    }
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"by-workers-{digest(made_by)}"
    with closing(Journal(target, made_by, resume=True)) as journal:
        for answered in pool.run(plan, journal.left(parts)):
            journal.add(answered)
            progress(answered, len(journal), len(parts))
        files = [
            joined(folder, journal.answers([part.name for part in of_question]))
            for of_question in every
        ]
        journal.remove()
    for question, of_question in zip(questions, files, strict=True):
        for file in of_question:
            file.keep(item.id for item in question.items)
    return files


def joined(folder: Path, answers: Any) -> list[AnswerFile]:
    """Lines of many workers in one file for each way to decode; answers that stand there already
    are not written again."""
    files: dict[Path, AnswerFile] = {}
    for lines in answers:
        settings = {key: value for key, value in lines[0].items() if key not in ("kind", "about")}
        made = AnswerFile(folder, settings, lines[0]["about"])
        file = files.setdefault(made.file, made)
        for line in lines[1:]:
            file.take_over(line)
    return list(files.values())
