"""What a benchmark is: items that ask something of a model, and how an answer is graded.

There are four things to ask, and every benchmark asks one of them. None of this needs a network:
`evaluate.asking` turns what is asked into requests to a model.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from forerun.errors import BadOption

Message = Mapping[str, str]
Scores = dict[str, float]  # by the name of the measure


@dataclass(frozen=True)
class Write:
    """Text after a prompt. For a model with a chat template there may be a `chat`; its answer
    begins with `opening`, which is no part of what it writes."""

    prompt: str
    chat: Sequence[Message] = ()
    opening: str = ""
    stop: tuple[str, ...] = ()
    chat_stop: tuple[str, ...] = ()
    max_tokens: int = 256


@dataclass(frozen=True)
class Fill:
    """A text with a hole, and what stood there: models that fill blanks are told how many tokens
    it had. `ends` cuts what a left-to-right model writes: ("lines" or "sentences", how many)."""

    prefix: str
    truth: str
    suffix: str
    ends: tuple[str, int]
    max_tokens: int = 256


@dataclass(frozen=True)
class Choose:
    """How likely is each continuation of a context?"""

    context: str
    choices: tuple[str, ...]


@dataclass(frozen=True)
class Read:
    """How likely is a whole text?"""

    text: str


Ask = Write | Fill | Choose | Read


@dataclass(frozen=True)
class Item:
    """One question of a benchmark. `facts` are what grading needs; all is plain data.

    With `after`, the id of an earlier item of a conversation, that item's chat and the model's own
    answer come before this one's chat.
    """

    id: str
    ask: Ask
    facts: Mapping[str, Any] = field(default_factory=dict)
    group: str = ""
    after: str | None = None


@dataclass(frozen=True)
class Answer:
    """What a model answered: a text, or log-probabilities of what was asked about."""

    text: str = ""
    whole: str | None = None  # a text with a hole, all of it, where the model filled blanks
    logprobs: tuple[float, ...] = ()
    greedy: tuple[bool, ...] = ()  # is each continuation what greedy decoding would write?
    chatted: bool = False  # was the chat asked, and not the plain prompt?
    before: str = ""  # the conversation before it


@dataclass(frozen=True)
class Data:
    """Where a benchmark's files are, and how its prompt is made."""

    path: str
    shots: int | None = None  # examples in the prompt; None: as published
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def shots_or(self, published: int) -> int:
        return published if self.shots is None else self.shots


class Examiner(Protocol):
    """What grading may need besides the answer: programs that are run, and a judge."""

    def passes(self, program: str, test: str, entry_point: str, given: str = "") -> bool:
        """Does a program pass its tests?"""

    def rate(self, question: str, answer: str) -> float | None:
        """A judge's rating of an answer; None without a judge."""


@dataclass(frozen=True)
class Benchmark:
    """A published benchmark.

    `metric` is the measure that a method is judged by; `percent` says that it is a share.
    `combine` names measures that are no means over items, and makes them of all scores.
    """

    name: str
    summary: str
    source: str  # what the file is, and where it comes from
    files: tuple[str, ...]  # names tried where a folder is given
    metric: str
    read: Callable[[Data], list[Item]]
    grade: Callable[[Item, Answer, Examiner], Scores]
    percent: bool = True
    lower_is_better: bool = False
    runs_code: bool = False
    combine: Callable[[Sequence[Scores]], Scores] | None = None


def find_file(benchmark: Benchmark, path: str) -> str:
    """The benchmark's file: the path itself, or one of its names in that folder."""
    place = Path(path)
    if place.is_file():
        return str(place)
    for name in benchmark.files:
        for candidate in (place / name, place / benchmark.name / name):
            if candidate.is_file():
                return str(candidate)
    raise BadOption(
        f"data={path!r} has no file of {benchmark.name!r}: give the file itself, or a folder with "
        f"{' or '.join(benchmark.files)} in it. It is {benchmark.source}"
    )


def read_lines(file: str) -> list[str]:
    try:
        # by line breaks only: JSON may hold other characters that `splitlines` takes for one
        return Path(file).read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise BadOption(f"data={file!r} cannot be read: {error}") from error


def parse_object(file: str, number: int, line: str) -> dict[str, Any]:
    """The JSON object in one line of a file."""
    try:
        value = json.loads(line)
    except ValueError as error:
        raise BadOption(f"{file}:{number} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadOption(f"{file}:{number} is no JSON object.")
    return value


def read_objects(file: str, fields: Sequence[str]) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, each of which has these fields."""
    text = "\n".join(read_lines(file))
    if text.lstrip().startswith("["):
        objects = _array(file, text)
    else:
        lines = enumerate(text.split("\n"), 1)
        objects = [parse_object(file, number, line) for number, line in lines if line.strip()]
    for number, one in enumerate(objects, 1):
        absent = set(fields) - one.keys()
        if absent:
            raise BadOption(f"{file}: entry {number} has no {', '.join(sorted(absent))}.")
    if not objects:
        raise BadOption(f"{file} is empty.")
    return objects


def _array(file: str, text: str) -> list[dict[str, Any]]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise BadOption(f"{file} is not JSON: {error}") from error
    if not all(isinstance(value, dict) for value in values):
        raise BadOption(f"{file} must be a list of JSON objects.")
    return values


def examples(objects: Sequence[dict[str, Any]], count: int, seed: int) -> list[dict[str, Any]]:
    """So many examples for a prompt: the first ones with seed 0, else a seeded choice."""
    if count > len(objects):
        raise BadOption(f"shots={count}: there are only {len(objects)} examples.")
    if seed == 0:
        return list(objects[:count])
    return random.Random(seed).sample(list(objects), count)


def seed_of(seed: int, item: str, sample: int) -> int:
    """The seed of one answer: a function of what is asked, not of the batch that it is in."""
    digest = hashlib.sha256(f"{seed}/{item}/{sample}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def user(text: str) -> tuple[Message, ...]:
    """A chat of one message."""
    return ({"role": "user", "content": text},)
