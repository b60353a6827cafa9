"""From tokens to text as they come: no half characters, and nothing shown that a stop string will take back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

HALF = "\ufffd"  # what a decoder writes for bytes that are not a whole character
LONGEST_CHARACTER = 4  # bytes, so at most this many byte-level tokens wait for the rest of their character
NEIGHBOURS = 16  # tokens that are decoded again with each new one, before all but the last are let go
MOST_NEIGHBOURS = 64  # where there is no place to cut


class Writer:
    """The text of one request, grown token by token.

    `text` is all that is certain; `shown` leaves out a tail that may turn out to begin a stop string.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()):
        self.decode, self.stops = decode, stops
        self.text = ""
        self.stopped_by: str | None = None
        self._window: list[int] = []  # the last tokens, some already in the text: decoders need their left neighbours
        self._written, self._before = 0, ""  # how many tokens of the window are in the text, and what they say

    def push(self, token: int) -> None:
        self._window.append(token)
        whole = self.decode(self._window)
        while len(self._window) - self._written >= LONGEST_CHARACTER and whole[len(self._before) :].endswith(HALF):
            # Its first byte cannot begin a character that is still to be completed.
            self._write_up_to(self._written + 1, self.decode(self._window[: self._written + 1]))
            whole = self.decode(self._window)
        if not whole[len(self._before) :].endswith(HALF):
            self._write_up_to(len(self._window), whole)

    def push_all(self, tokens: list[int]) -> None:
        """All tokens of a text that nobody watches, which is much faster than one after the other."""
        whole = self.decode(tokens)
        if HALF in whole:  # what becomes of broken characters depends on what they were decoded with
            for token in tokens:
                self.push(token)
        else:
            self._write(whole)

    def _write_up_to(self, count: int, said: str) -> None:
        self._write(said[len(self._before) :])
        self._written, self._before = count, said
        if count > NEIGHBOURS:  # of what is written only the last tokens stay
            self._let_go(count)

    def _let_go(self, count: int) -> None:
        """Of `count` tokens that are written keep the last ones, beginning with a whole character: some decoders find every byte
        broken that stands beside a broken one."""
        for kept in range(LONGEST_CHARACTER, 2 * LONGEST_CHARACTER):
            said = self.decode(self._window[count - kept : count])
            if HALF not in said or (count > MOST_NEIGHBOURS and kept == 2 * LONGEST_CHARACTER - 1):
                self._window, self._written, self._before = self._window[count - kept :], kept, said
                return

    def finish(self) -> None:
        """No token follows: write what is whole of the rest."""
        if self._window:
            self._write(self.decode(self._window)[len(self._before) :].rstrip(HALF))
        self._window, self._written, self._before = [], 0, ""

    @property
    def shown(self) -> str:
        held = max((_overlap(self.text, stop) for stop in self.stops), default=0) if self.stopped_by is None else 0
        return self.text[: len(self.text) - held]

    def _write(self, piece: str) -> None:
        if self.stopped_by is not None:
            return
        searched = max(0, len(self.text) - max((len(s) for s in self.stops), default=0))
        self.text += piece
        hits = [(self.text.find(stop, searched), stop) for stop in self.stops]
        found = [(at, stop) for at, stop in hits if at >= 0]
        if found:
            at, self.stopped_by = min(found)
            self.text = self.text[:at]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of the text that begins the stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
