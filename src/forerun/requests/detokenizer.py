"""From tokens to text as they come: no half characters, and nothing that a stop string will take
back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are not a whole character
LONGEST_CHARACTER = 4  # bytes: at most so many byte-level tokens wait for the rest of a character
NEIGHBOURS = 16  # tokens that are decoded again with each new one, before all but the last go
MOST_NEIGHBOURS = 64  # where there is no place to cut


class Detokenizer:
    """The text of one request, grown token by token.

    `text` is all that is certain. `safe_text` leaves out a tail that may turn out to begin a stop
    string.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()):
        self.decode = decode
        self.stops = stops
        self.text = ""
        self.stopped_by: str | None = None
        # The last tokens, some already in the text: decoders need their left neighbours.
        self._window: list[int] = []
        self._written = 0  # how many tokens of the window are in the text
        self._before = ""  # and what they say

    def begin_after(self, tokens: Sequence[int], said: str) -> None:
        """What comes follows these tokens, of which this much is said and not to be written."""
        self._window = list(tokens)
        self._written = len(tokens)
        self._before = said

    def push(self, token: int) -> None:
        self._window.append(token)
        whole = self.decode(self._window)
        while self._waiting() >= LONGEST_CHARACTER and self._is_broken(whole):
            # The first byte that waits cannot begin a character that is still to be completed.
            self._write_up_to(self._written + 1, self.decode(self._window[: self._written + 1]))
            whole = self.decode(self._window)
        if not self._is_broken(whole):
            self._write_up_to(len(self._window), whole)

    def _waiting(self) -> int:
        return len(self._window) - self._written

    def _is_broken(self, whole: str) -> bool:
        """Does what is new end inside a character?"""
        return whole[len(self._before) :].endswith(REPLACEMENT)

    def push_all(self, tokens: list[int]) -> None:
        """All tokens of a text at once, which is much faster than one after the other."""
        whole = self.decode([*self._window, *tokens])[len(self._before) :]
        if REPLACEMENT in whole:  # broken characters depend on what they were decoded with
            for token in tokens:
                self.push(token)
        else:
            self._write(whole)
            self._window = []

    def _write_up_to(self, count: int, said: str) -> None:
        self._write(said[len(self._before) :])
        self._written = count
        self._before = said
        if count > NEIGHBOURS:  # of what is written only the last tokens stay
            self._let_go(count)

    def _let_go(self, count: int) -> None:
        """Of `count` tokens that are written keep the last ones, beginning with a whole character:
        some decoders find every byte broken that stands beside a broken one."""
        most = 2 * LONGEST_CHARACTER - 1
        for kept in range(LONGEST_CHARACTER, most + 1):
            said = self.decode(self._window[count - kept : count])
            forced = count > MOST_NEIGHBOURS and kept == most
            if REPLACEMENT not in said or forced:
                self._window = self._window[count - kept :]
                self._written = kept
                self._before = said
                return

    def finish(self) -> None:
        """No token follows: write what is whole of the rest."""
        if self._window:
            rest = self.decode(self._window)[len(self._before) :]
            self._write(rest.rstrip(REPLACEMENT))
        self._window = []
        self._written = 0
        self._before = ""

    @property
    def safe_text(self) -> str:
        if self.stopped_by is not None:
            return self.text
        held = max((_overlap(self.text, stop) for stop in self.stops), default=0)
        return self.text[: len(self.text) - held]

    def _write(self, piece: str) -> None:
        if self.stopped_by is not None:
            return
        longest = max((len(stop) for stop in self.stops), default=0)
        searched = max(0, len(self.text) - longest)
        self.text += piece
        hits = [(self.text.find(stop, searched), stop) for stop in self.stops]
        found = [(at, stop) for at, stop in hits if at >= 0]
        if found:
            at, self.stopped_by = min(found)
            self.text = self.text[:at]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of the text that begins the stop string."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
