"""Prompt lookup: copy what followed the last tokens where they stood before. It is free, and strong
where text repeats (edits, code)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from forerun.drafters.base import Draft
from forerun.options import check_flag, check_whole
from forerun.sequence.canvas import Canvas, Copies


@dataclass(frozen=True)
class LookupDrafter:
    """A point mass on the continuation of the latest earlier occurrence of the longest known run of
    last tokens."""

    drafts_alike: ClassVar[bool] = True
    ngram: int = field(default=3, metadata={"help": "longest run of last tokens that is looked up"})

    adapt: bool = field(
        default=True,
        metadata={"help": "draft longer while copies are accepted and shorter while they are not"},
    )

    def __post_init__(self) -> None:
        check_whole("ngram", self.ngram)
        check_flag("adapt", self.adapt)

    async def propose(self, seq: Canvas, k: int) -> Draft:
        reach = self._adapted(seq) if self.adapt else None
        count = k if reach is None else min(k, reach)
        seq.copies = Copies(seq.known, self.ngram, count, k, reach)
        found = seq.take_begun_draft()
        if found is None:
            found = continuation(seq.text, self.ngram, count)
        tokens = seq.up_to_end(found[:k])
        return Draft(seq.next(len(tokens)), tokens)

    @staticmethod
    def _adapted(seq: Canvas) -> int:
        """Twice what was accepted last time and one more: a few steps reach a long copy, and a
        wrong guess costs little."""
        for event in reversed(seq.trace.events):
            if event.drafted:
                return 2 * len(event.tokens) + 1
        return 3


def continuation(text: np.ndarray, longest: int, k: int) -> list[int]:
    """k tokens that followed the latest earlier occurrence of the text's last tokens; none if even
    the last one is new."""
    data = text.tobytes()
    for n in range(min(longest, len(text) - 1), 0, -1):
        start = last_occurrence(data, n, text.itemsize)
        if start >= 0:
            first = start + n
            # A copy that reaches the end of the text goes on with what it has copied: the text
            # repeats with this period.
            copied: list[int] = text[first : first + k].tolist()
            while len(copied) < k:
                copied += copied[: k - len(copied)]
            return copied
    return []


def last_occurrence(data: bytes | bytearray, n: int, width: int) -> int:
    """Where the last n numbers of so many bytes stood last before; -1: nowhere. Searching bytes
    takes a tenth of the time that comparing arrays does."""
    run = data[-n * width :]
    at = data.rfind(run, 0, len(data) - width)
    while at % width and at >= 0:  # between two numbers
        at = data.rfind(run, 0, at + len(run) - 1)
    return at // width if at >= 0 else -1
