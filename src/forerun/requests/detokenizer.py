"""From tokens to text as they come: no half characters, and nothing that a stop string will take
back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are not a whole character
LONGEST_CHARACTER = 4  # bytes: at most so many byte-level tokens wait for the rest of a character
NEIGHBOURS = 16  # tokens, after every so many of which all but the last go
MOST_NEIGHBOURS = 64  # where there is no place to cut


class Detokenizer:
    """The text of one request, grown token by token.

    `text` is all that is certain. `safe_text` leaves out a tail that may turn out to begin a stop
    string. Tokens are read when somebody looks, and together if they can be: calling a decoder
    takes far longer than what it does for a token more. Only stop strings are looked for at once.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()):
        self.decode = decode
        self.stops = stops
        self._text = ""
        self._unread: list[int] = []
        self.stopped_by: str | None = None
        # The last tokens, some already in the text: decoders need their left neighbours.
        self._window: list[int] = []
        self._written = 0  # how many tokens of the window are in the text
        self._before = ""  # and what they say
        self._count = 0  # tokens read

    def begin_after(self, tokens: Sequence[int], said: str) -> None:
        """What comes follows these tokens, of which this much is said and not to be written."""
        self._window = list(tokens)
        self._written = len(tokens)
        self._before = said

    def push(self, *tokens: int) -> None:
        self._unread += tokens
        if self.stops:
            self._read()

    @property
    def text(self) -> str:
        if self._unread:
            self._read()
        return self._text

    def _read(self) -> None:
        """Read what has come. What broken characters say depends on their neighbours, so these go
        after as many tokens, whenever somebody looks."""
        unread = self._unread
        self._unread = []
        while unread:
            room = NEIGHBOURS - self._count % NEIGHBOURS
            together = 1 if self._waiting() else room
            some = unread[:together]
            self._read_some(some)
            self._count += len(some)
            unread = unread[together:]
            if self._count % NEIGHBOURS == 0:
                self._let_go()

    def _read_some(self, tokens: list[int]) -> None:
        if len(tokens) > 1:
            together = [*self._window, *tokens]
            whole = self.decode(together)
            if REPLACEMENT not in whole:
                self._window = together
                self._write_up_to(len(together), whole)
                return
        for token in tokens:
            self._read_one(token)

    def _read_one(self, token: int) -> None:
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

    def _write_up_to(self, count: int, said: str) -> None:
        self._write(said[len(self._before) :])
        self._written = count
        self._before = said

    def _let_go(self) -> None:
        """Of the tokens that are written keep the last ones, beginning with a whole character: some
        decoders find every byte broken that stands beside a broken one."""
        most = 2 * LONGEST_CHARACTER - 1
        count = self._written
        for kept in range(LONGEST_CHARACTER, min(most, count - 1) + 1):
            said = self.decode(self._window[count - kept : count])
            forced = count > MOST_NEIGHBOURS and kept == most
            if REPLACEMENT not in said or forced:
                self._window = self._window[count - kept :]
                self._written = kept
                self._before = said
                return

    def finish(self) -> None:
        """No token follows: write what is whole of the rest."""
        if self._waiting():
            self._read()
        left = [*self._window, *self._unread]
        whole = self.decode(left) if left else ""
        if REPLACEMENT in whole and self._unread:
            self._read()
            whole = self.decode(self._window)
        self._write(whole[len(self._before) :].rstrip(REPLACEMENT))
        self._window = []
        self._unread = []
        self._written = 0
        self._before = ""

    @property
    def safe_text(self) -> str:
        text = self.text
        if self.stopped_by is not None:
            return text
        held = max((_overlap(text, stop) for stop in self.stops), default=0)
        return text[: len(text) - held]

    def _write(self, piece: str) -> None:
        if self.stopped_by is not None:
            return
        longest = max((len(stop) for stop in self.stops), default=0)
        searched = max(0, len(self._text) - longest)
        self._text += piece
        hits = [(self._text.find(stop, searched), stop) for stop in self.stops]
        found = [(at, stop) for at, stop in hits if at >= 0]
        if found:
            at, self.stopped_by = min(found)
            self._text = self._text[:at]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of the text that begins the stop string."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
