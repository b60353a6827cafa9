"""Answers on disk: JSON lines, each written when it is known, so that an interrupt loses nothing
and a second run asks nothing twice.

A file holds the answers of one model by one method to one benchmark. Its first line says how they
were made. An `answer` is what the model wrote and what that cost; a `grade` is what it was worth.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from forerun.errors import BadOption
from forerun.evaluate.benchmarks.base import Answer, Scores

Key = tuple[str, int]  # of an item, and the number of the sample


@dataclass(frozen=True)
class Cost:
    """What an answer cost."""

    tokens: int = 0
    prompt_tokens: int = 0
    forwards: int = 0
    draft_forwards: int = 0
    drafted: int = 0
    accepted: int = 0
    verdicts: int = 0  # on drafts
    seconds: float = 0.0  # from the first forward to the last token
    first_token: float | None = None  # seconds from the first forward to the first token


@dataclass(frozen=True)
class Record:
    """One answer, and how it came about."""

    item: str
    sample: int
    asked: str  # a digest of the request
    answer: Answer
    cost: Cost = field(default_factory=Cost)
    tokens: str = ""  # a digest of the token ids
    finish: str = ""
    group: str = ""
    session: str = ""  # the run that it was made in
    at: float = 0.0  # seconds since that run began

    @property
    def key(self) -> Key:
        return self.item, self.sample


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def file_name(settings: Mapping[str, Any]) -> str:
    """The name of the file for some settings: other settings, another file."""
    words = f"{settings['task']}.{settings['model']}.{settings['method']}"
    plain = re.sub(r"[^A-Za-z0-9.=-]+", "-", words.replace("/", "-")).strip("-.")
    return f"{plain[-100:]}.{digest(dict(settings))}.jsonl"


class AnswerFile:
    """The answers of one method, in memory and on disk."""

    def __init__(
        self, folder: str | Path, settings: Mapping[str, Any], about: Mapping[str, Any] = {}
    ):
        """`about` is said of the answers, too, but they do not hang on it."""
        self.settings = dict(settings)
        self.about = dict(about)
        self.file = Path(folder) / file_name(settings)
        self.records: dict[Key, Record] = {}
        self.scores: dict[Key, Scores] = {}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        if self.file.exists():
            self._read()
        else:
            self._write({"kind": "settings", **self.settings, "about": self.about})

    @classmethod
    def read(cls, file: str | Path) -> AnswerFile:
        """A file that is there, whatever its settings."""
        path = Path(file)
        with path.open(encoding="utf-8") as lines:
            settings = _object(path, lines.readline())
        if settings.pop("kind", None) != "settings":
            raise BadOption(f"{path} holds no answers: its first line says no settings.")
        made = cls.__new__(cls)
        made.about = settings.pop("about", {})
        made.settings = settings
        made.file = path
        made.records = {}
        made.scores = {}
        made._read()
        return made

    def answer(self, key: Key, asked: str) -> Record | None:
        """The answer to a request, if it was answered and is still the same."""
        record = self.records.get(key)
        return record if record is not None and record.asked == asked else None

    def add(self, record: Record) -> None:
        self._write({"kind": "answer", **asdict(record)})
        self.records[record.key] = record
        self.scores.pop(record.key, None)

    def grade(self, key: Key, scores: Scores) -> None:
        self._write({"kind": "grade", "item": key[0], "sample": key[1], "scores": scores})
        self.scores[key] = scores

    def take_over(self, line: Mapping[str, Any]) -> None:
        """Write a line of another file of these settings, unless what it says is known."""
        key = (line["item"], line["sample"])
        known = self.records.get(key)
        if line["kind"] == "answer" and known is not None and known.asked == line["asked"]:
            return
        if line["kind"] == "grade" and key in self.scores:
            return
        self._write(line)
        self._take(dict(line))

    def keep(self, items: Iterable[str]) -> None:
        """Forget the answers to other items, in memory: a run with fewer reports on these."""
        kept = set(items)
        self.records = {key: value for key, value in self.records.items() if key[0] in kept}
        self.scores = {key: value for key, value in self.scores.items() if key[0] in kept}

    def ungraded(self) -> list[Record]:
        return [record for key, record in self.records.items() if key not in self.scores]

    def _write(self, line: Mapping[str, Any]) -> None:
        with self.file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line, ensure_ascii=False) + "\n")

    def _read(self) -> None:
        text = self.file.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):  # a line that was being written when its run was killed
            with self.file.open("r+b") as out:
                out.truncate(len(whole))
        for line in whole.decode().split("\n")[1:-1]:
            self._take(_object(self.file, line))

    def _take(self, line: dict[str, Any]) -> None:
        kind = line.pop("kind", "")
        if kind == "answer":
            record = _record(line)
            self.records[record.key] = record
            self.scores.pop(record.key, None)
        elif kind == "grade":
            self.scores[line["item"], line["sample"]] = line["scores"]


def _object(file: Path, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
        if isinstance(value, dict):
            return value
    except ValueError:
        pass
    raise BadOption(
        f"{file} has a line that is no JSON object: take it away, or use another --out."
    )


def _record(line: dict[str, Any]) -> Record:
    answer = line.pop("answer")
    answer["logprobs"] = tuple(answer["logprobs"])
    answer["greedy"] = tuple(answer["greedy"])
    return Record(**{**line, "answer": Answer(**answer), "cost": Cost(**line["cost"])})
