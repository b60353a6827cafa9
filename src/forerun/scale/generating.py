"""`generate` over a file of prompts: a line of JSON for each prompt in, one for each answer out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from forerun import __version__
from forerun.api import Model
from forerun.drafters.adaptive import DraftLength
from forerun.errors import BadOption
from forerun.evaluate.evaluation import forget
from forerun.options import check_whole
from forerun.registry import method_named
from forerun.requests.jobs import Job
from forerun.requests.result import Result
from forerun.scale.journal import Journal, file_digest
from forerun.scale.loading import LoadPlan
from forerun.scale.work import Answered, Part, Pool, Worker

Progress = Callable[[Answered, int, int], None]  # the newest answer, parts answered, parts in all

# What a result says of time: no two runs agree on it.
TIMES = ("seconds", "queued_seconds", "tokens_per_second", "first_token_seconds")
# and of its steps, where how many tokens are drafted hangs on what forwards took
STEPS = (
    "forwards",
    "draft_forwards",
    "tokens_per_forward",
    "acceptance_length",
    "acceptance_rate",
    "alpha",
    "acceptance_histogram",
    "choices",
)
GIVEN = ("prompt", "messages")


@dataclass(frozen=True)
class GeneratePlan:
    """A worker that decodes prompts: its model and how it decodes."""

    load: LoadPlan
    method: str | None = None
    draft: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def make(self) -> Worker:
        return Generator(self, self.load.model())

    def made_by(self) -> dict[str, Any]:
        return {**asdict(self), "forerun": __version__}


@dataclass(frozen=True)
class Generator:
    """Decodes the prompts of a part together."""

    plan: GeneratePlan
    model: Model

    def __call__(self, entries: Sequence[Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
        """For each entry its results, as many as there are samples."""
        forget(self.model)
        plan = self.plan
        [kind] = {kind_of(entry) for entry in entries}
        asked: dict[str, Any] = {kind: [entry[kind] for entry in entries]}
        jobs = self.model.submit(
            **asked,
            method=plan.method,
            draft=plan.draft,
            **with_usual_length(plan.method, plan.options),
        )
        jobs.run()
        by_costs = any(isinstance(job, Job) and job.ticket.asks_costs for job in jobs.jobs)
        left_out = (*TIMES, *STEPS) if by_costs else TIMES
        return [[told(one, left_out) for one in asked.results()] for asked in jobs.requests]


def with_usual_length(name: str | None, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Options with the length that drafts usually have, if none is given. One that follows from
    what forwards took would differ from worker to worker, and with it the last bits of a law."""
    kind = method_named(name).options if name is not None else None
    if kind is None or not issubclass(kind, DraftLength):
        return options
    return {kind.option: kind.usual, **options}


def told(result: Result, left_out: Sequence[str]) -> dict[str, Any]:
    """A result as plain data that is the same in every run."""
    data = result.as_dict()
    data["stats"] = {name: value for name, value in data["stats"].items() if name not in left_out}
    return data


def kind_of(entry: Mapping[str, Any]) -> str:
    return "messages" if "messages" in entry else "prompt"


def read_entries(file: str) -> list[dict[str, Any]]:
    """The prompts of a .jsonl file: objects with "prompt" or "messages", and "id" or not; or of a
    text file, one a line. All are looked at before anything is asked."""
    path = Path(file)
    if not path.is_file():
        raise BadOption(f"--prompts {file!r} is not a file.")
    entries: list[dict[str, Any]] = []
    seen: dict[str, int] = {}
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            entry = _entry(path, number, line.rstrip("\r\n"))
            entry.setdefault("id", str(len(entries)))
            name = str(entry["id"])
            if name in seen:
                raise BadOption(f"{file}:{number} has the id {name!r} of line {seen[name]} again.")
            seen[name] = number
            entries.append(entry)
    if not entries:
        raise BadOption(f"--prompts {file!r} is empty.")
    if len({kind_of(entry) for entry in entries}) > 1:
        raise BadOption(f'{file} mixes "prompt" and "messages": use two files.')
    return entries


def _entry(path: Path, number: int, line: str) -> dict[str, Any]:
    if path.suffix != ".jsonl":
        return {"prompt": line}
    try:
        entry = json.loads(line)
        kind = kind_of(entry)
        given = entry[kind]
        name = entry.get("id", "")
        is_right = _is_prompt(given) if kind == "prompt" else _are_messages(given)
        if is_right and isinstance(name, str | int) and not isinstance(name, bool):
            return {key: entry[key] for key in ("id", kind) if key in entry}
    except (ValueError, KeyError, TypeError):
        pass
    raise BadOption(
        f'{path}:{number} must be a JSON object with "prompt" (text or token ids) or with '
        '"messages", a list of objects; "id" may be a text or a number.'
    )


def _is_prompt(given: object) -> bool:
    if isinstance(given, list):
        return bool(given) and all(type(one) is int for one in given)
    return isinstance(given, str)


def _are_messages(given: object) -> bool:
    return isinstance(given, list) and bool(given) and all(isinstance(one, dict) for one in given)


def cut(entries: Sequence[Any], size: int) -> list[Part]:
    """Entries in parts of equal size, in their order."""
    check_whole("batch", size)
    return [
        Part(str(first), entries[first : first + size]) for first in range(0, len(entries), size)
    ]


@dataclass(frozen=True)
class Totals:
    """What a run has written."""

    prompts: int
    answers: int
    tokens: int
    errors: int
    resumed: int  # parts that an earlier run had answered


@dataclass(frozen=True)
class GenerateJob:
    """A file of prompts that becomes a file of answers."""

    plan: GeneratePlan
    prompts: str
    output: str
    batch: int = 64  # prompts of a part
    threads: int = 1  # of a worker: more or fewer may change the last bits

    def made_by(self) -> dict[str, Any]:
        return {
            **self.plan.made_by(),
            "prompts": file_digest(self.prompts),
            "batch": self.batch,
            "threads": self.threads,
        }


def generate(
    job: GenerateJob,
    pool: Pool,
    *,
    resume: bool = False,
    progress: Progress = lambda answered, done, total: None,
) -> Totals:
    """Decode a file of prompts into a file of answers, in the order of the prompts, each once.

    The file is there when all of it is. What a run that was stopped had answered is kept beside
    it: with `resume` the next one goes on from there.
    """
    parts = cut(read_entries(job.prompts), job.batch)
    with closing(Journal(job.output, job.made_by(), resume=resume)) as journal:
        resumed = len(journal)
        for answered in pool.run(job.plan, journal.left(parts)):
            journal.add(answered)
            progress(answered, len(journal), len(parts))
        counter = Counter()
        journal.finish(counter.lines(parts, journal))
    return Totals(counter.prompts, counter.answers, counter.tokens, counter.errors, resumed)


class Counter:
    """Counts lines on their way to the file."""

    def __init__(self) -> None:
        self.prompts = 0
        self.answers = 0
        self.tokens = 0
        self.errors = 0

    def lines(self, parts: Sequence[Part], journal: Journal) -> Iterator[dict[str, Any]]:
        """A line for each answer, beside what was asked."""
        names = [part.name for part in parts]
        for part, answer in zip(parts, journal.answers(names), strict=True):
            for entry, results in zip(part.value, answer, strict=True):
                self.prompts += 1
                for sample, result in enumerate(results):
                    self.answers += 1
                    self.tokens += result["stats"]["tokens"]
                    self.errors += "error" in result
                    numbered = {"sample": sample} if len(results) > 1 else {}
                    yield {**entry, **numbered, **result}
