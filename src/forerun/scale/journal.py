"""What was answered so far, and a result that is there whole or not at all.

While a run goes on its answers are appended to `FILE.part`, whose first line says how they are
made. At the end the result is written beside it and renamed. So a run that was stopped, however,
goes on from what it has, and nobody ever reads half a result.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from forerun.errors import BadOption
from forerun.scale.work import Answered, Part

JOURNAL = ".part"


def file_digest(file: str | Path) -> str:
    with Path(file).open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def check_target(file: str | Path, *, resume: bool) -> None:
    """Refuse a result that is there already or cannot be written, before the work."""
    target = Path(file)
    journal = target.with_name(target.name + JOURNAL)
    if target.exists():
        raise BadOption(f"{target} exists already: choose another name, or remove it first.")
    if not target.resolve().parent.is_dir():
        raise BadOption(f"{target}: there is no folder {str(target.parent)!r}.")
    if journal.exists() and journal.stat().st_size and not resume:
        raise BadOption(
            f"{journal} holds what an earlier run answered: --resume goes on from there; remove it "
            "to begin anew."
        )


class Journal:
    """The answers of one run, by the names of its parts. Each is kept once."""

    def __init__(self, file: str | Path, made_by: Mapping[str, Any], *, resume: bool = False):
        """`made_by` is all that the answers hang on: those that were made otherwise are refused.
        Without `resume`, so are any."""
        self.target = Path(file)
        self.file = self.target.with_name(self.target.name + JOURNAL)
        self.made_by = json.loads(json.dumps(made_by))
        self._places: dict[str, int] = {}  # of answers in the file, by name
        check_target(self.target, resume=resume)
        self._file = self.file.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadOption(f"another run writes {self.target} now.") from None
        self._read()

    def _read(self) -> None:
        """Find what is there. A line that was being written when its run was killed goes away."""
        self._file.seek(0)
        place = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                self._file.truncate(place)
                break
            if place:
                self._places[json.loads(line)["part"]] = place
            else:
                self._check(json.loads(line))
            place += len(line)
        if not place:
            self._write({"made_by": self.made_by})

    def _check(self, first: dict[str, Any]) -> None:
        before = first.get("made_by", {})
        changed = [name for name, value in self.made_by.items() if before.get(name) != value]
        if changed:
            raise BadOption(
                f"{self.file} was made otherwise (it differs in {', '.join(changed)}): use the "
                "same flags, or remove it to begin anew."
            )

    def _write(self, line: Mapping[str, Any]) -> int:
        self._file.seek(0, 2)
        place = self._file.tell()
        self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        return place

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __len__(self) -> int:
        return len(self._places)

    def left(self, parts: Iterable[Part]) -> list[Part]:
        """The parts that have no answer yet."""
        return [part for part in parts if part.name not in self]

    def add(self, answered: Answered) -> None:
        """Keep an answer; a second one to the same part is dropped."""
        if answered.name not in self:
            line = {"part": answered.name, "answer": answered.answer}
            self._places[answered.name] = self._write(line)

    def answers(self, names: Sequence[str]) -> Iterator[Any]:
        """The answers to some parts, in this order, one at a time in memory."""
        for name in names:
            self._file.seek(self._places[name])
            yield json.loads(self._file.readline())["answer"]

    def finish(self, lines: Iterable[Any]) -> None:
        """Write the result, a JSON object a line, and do without the journal."""
        unfinished = self.target.with_name(self.target.name + ".tmp")
        with unfinished.open("w", encoding="utf-8") as out:
            for line in lines:
                out.write(json.dumps(line, ensure_ascii=False) + "\n")
        unfinished.replace(self.target)
        self.remove()

    def remove(self) -> None:
        self.file.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        self._file.close()
