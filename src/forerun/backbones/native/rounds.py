"""Rounds of drafts and verdicts in one call of C++ (`rounds.cpp`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_double, c_int64, c_void_p
from itertools import accumulate
from typing import Any

import numpy as np

from forerun.engine.backbone import DraftingText, Forwards, RoundsAsked, RoundsMade, TextRound

NUMBERS = 3  # of a text in a round, before its draft: drafted tokens, accepted ones, token


class RunnerFields(ctypes.Structure):
    _fields_ = [
        ("model", c_void_p), ("rows", c_void_p), ("most_rows", c_int64), ("slots", c_int64),
        ("threads", c_void_p), ("seconds", c_void_p), ("forwards", c_void_p),
        ("attended", c_void_p), ("impossible", c_void_p), ("impossible_count", c_int64),
        ("looking", c_void_p),
    ]  # fmt: skip


class RoundsFields(ctypes.Structure):
    _fields_ = [
        ("texts", c_int64), ("vocab", c_int64), ("rounds", c_int64), ("longest", c_int64),
        ("first_ends", c_int64), ("seconds", c_double), ("tokens", c_void_p), ("pitch", c_int64),
        ("length", c_void_p), ("reach", c_void_p), ("held", c_void_p), ("lanes", c_void_p),
        ("wanted", c_void_p), ("room", c_void_p), ("draft_room", c_void_p), ("most", c_void_p),
        ("run", c_void_p),
        ("mask", c_void_p), ("shifted", c_void_p),
        ("ends", c_void_p), ("ends_until", c_void_p), ("found", c_void_p), ("stop", c_void_p),
    ]  # fmt: skip


class Runner:
    """A model that takes part, and what is told of its forwards."""

    def __init__(
        self,
        model: int,
        rows: ctypes.Structure,
        slots: int,
        threads: Sequence[int],
        impossible: Sequence[int],
        alive: object,  # what the rows point to
    ):
        self._alive = alive
        most = len(threads) - 1
        self._rows = rows
        self._threads = np.array(threads, np.int64)
        self._impossible = np.array(impossible, np.int64)
        self._seconds = np.zeros(most + 1)
        self._forwards = np.zeros(most + 1, np.int64)
        self._attended = np.zeros(2, np.int64)
        arrays = (self._threads, self._seconds, self._forwards, self._attended, self._impossible)
        at = [array.ctypes.data for array in arrays]
        self.given = RunnerFields(
            model, ctypes.addressof(rows), most, slots, *at, len(self._impossible)
        )

    @property
    def rows(self) -> int:
        """Where it is written where its slots are."""
        return ctypes.addressof(self._rows)

    def look(self, looking: int, alive: object) -> None:
        """Have it look into its target, in the way that is written there."""
        self._alive = self._alive, alive
        self.given.looking = looking

    def forwards(self) -> Forwards:
        """What it was made to do."""
        pairs, slots = self._attended.tolist()
        return Forwards(self._forwards.tolist(), self._seconds.tolist(), pairs, slots)


def go_on(
    functions: Any, vocab: int, target: Runner, drafter: Runner | None, asked: RoundsAsked
) -> RoundsMade:
    """Let texts go on, with copies of their own or with what a second model drafts."""
    texts = asked.texts
    longest = max(text.most for text in texts)
    pitch = 1 + max(max(text.room, len(text.tokens)) for text in texts)
    tokens = np.zeros((len(texts), pitch), np.int32)
    for row, text in zip(tokens, texts):
        row[: len(text.tokens)] = text.tokens
    numbers = np.array([_numbers(text) for text in texts], np.int64).T.copy()
    ends = np.array([token for text in texts for token in text.ends], np.int64)
    until = np.array(list(accumulate(len(text.ends) for text in texts)), np.int64)
    found = np.empty((asked.rounds, len(texts), NUMBERS + longest), np.int64)
    columns = [column.ctypes.data for column in numbers]
    given = RoundsFields(
        len(texts), vocab, asked.rounds, longest, asked.first_ends, asked.seconds,
        tokens.ctypes.data, pitch, *columns, ends.ctypes.data, until.ctypes.data,
        found.ctypes.data, asked.stop.address,
    )  # fmt: skip
    drafting = None if drafter is None else byref(drafter.given)
    made = functions.go_on(byref(target.given), drafting, byref(given))
    lengths, _, held, *_ = numbers.tolist()
    return RoundsMade(
        _by_text(found[:made].tolist(), len(texts)),
        [row[:length] for row, length in zip(tokens, lengths)],
        held,
        target.forwards(),
        None if drafter is None else drafter.forwards(),
    )


def _numbers(text: DraftingText) -> tuple[int, ...]:
    """As `Rounds` has them."""
    return (
        len(text.tokens),
        -1 if text.reach is None else text.reach,
        text.held,
        text.lane,
        text.wanted,
        text.room,
        text.draft_room,
        text.most,
        text.run,
        -1 if text.mask is None else text.mask,
        text.shifted,
    )


def _by_text(found: list[list[list[int]]], texts: int) -> list[list[TextRound]]:
    rounds: list[list[TextRound]] = [[] for _ in range(texts)]
    for each in found:
        for own, (drafted, accepted, token, *draft) in zip(rounds, each):
            if drafted >= 0:
                own.append(TextRound(draft[:drafted], accepted, token))
    return rounds
