"""Prompt lookup that knows how well it does: where the text seems to repeat itself, how long it has
done so, and how often such a copy went on.

Every decided token is compared with the copy, drafted or not. So it costs nothing to learn whether
drafting would pay.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forerun.drafters.base import Draft
from forerun.drafters.lookup import last_occurrence
from forerun.drafters.odds import Odds, Trend
from forerun.sequence.canvas import Canvas

# How often a copy goes on, by how many tokens before it agree (from 0), before anything was seen.
FIRST_ODDS = (0.0, 0.15, 0.35, 0.5, 0.6, 0.65, 0.7, 0.75, 0.78, 0.8, 0.82, 0.84, 0.86, 0.88, 0.9)
FIRST_SHARE = (0.3,)  # of all tokens, those that a copy has right; likewise
LONGEST = len(FIRST_ODDS) - 1  # agreement that is told apart
LONGEST_RUN = 3  # tokens of a run that is looked up
HARDLY = 0.03  # a chance that is not worth a row anywhere
AT_ONCE = 4096  # tokens that are read in one step, so that a long prompt stops nobody
PAUSE = 24  # tokens that nobody looked at: after more of them only the last ones are learnt from
LEARNT = 4
WIDTH = 4  # bytes of a token


class Copying:
    """Follows a text and the place in it that it seems to repeat.

    After a run of up to three tokens that stood somewhere before, that place is followed until it
    disagrees.
    """

    def __init__(self, odds: Odds, share: Odds):
        self.odds = odds
        self._share = share  # of all tokens: were they copied right?
        self._trend = Trend()
        self._text: list[int] = []
        self._bytes = bytearray()  # of the text: runs are searched for in them
        self.place = 0  # in the text, of the token that comes next if it repeats; 0: nowhere
        self.agrees = 0  # tokens before it that agree

    def follow(self, seq: Canvas) -> bool:
        """Read what was decided since. Has all been read?"""
        start = len(self._text)
        new = seq.tokens[start : min(seq.known, start + AT_ONCE)].tolist()
        unlearnt = max(0, min(seq.blanks[0] - start, len(new)) - 1)  # of the prompt, but its last
        if len(new) > PAUSE:
            unlearnt = max(unlearnt, len(new) - LEARNT)
        self._skip(new[:unlearnt])
        for token in new[unlearnt:]:
            self._read(token, learns=len(self._text) >= seq.blanks[0])
        return len(self._text) == seq.known

    def _skip(self, tokens: Sequence[int]) -> None:
        """Read tokens of which nothing is learned, without following any copy."""
        if tokens:
            self._text += tokens
            self._bytes += np.array(tokens, "<i4").tobytes()
            self.place = 0
            self.agrees = 0

    @property
    def share_right(self) -> float:
        """Of all tokens of late, those that the copy would have had right."""
        return self._share.chance(0)

    def _read(self, token: int, learns: bool) -> None:
        if learns:
            self._share.count(0, bool(self.place) and self._text[self.place] == token)
        if self.place:
            right = self._text[self.place] == token
            if learns:
                self._trend.count(right, self.odds.chance(self.agrees))
                self.odds.count(self.agrees, right)
            self.agrees = self.agrees + 1 if right else 0
            self.place = self.place + 1 if right else 0
        self._text.append(token)
        self._bytes += token.to_bytes(WIDTH, "little", signed=True)
        if not self.place:
            self._find()

    def _find(self) -> None:
        """The place where the longest run of last tokens stood last."""
        for n in range(min(LONGEST_RUN, len(self._text) - 1), 0, -1):
            start = last_occurrence(self._bytes, n, WIDTH)
            if start >= 0:
                self.place = start + n
                self.agrees = self._agreement(self.place)
                return

    def _agreement(self, place: int) -> int:
        """How many tokens before a place are those at the end of the text."""
        text = self._text
        most = min(place, LONGEST)
        for count in range(most):
            if text[place - 1 - count] != text[-1 - count]:
                return count
        return most

    def chances(self, most: int) -> list[float]:
        """Of the next tokens of the copy, each given those before it, as far as that may happen."""
        found: list[float] = []
        if not self.place:
            return found
        reached = 1.0
        trend = self._trend.factor
        for agrees in range(self.agrees, self.agrees + most):
            chance = trend * self.odds.chance(agrees)
            reached *= chance
            if reached < HARDLY:
                break
            found.append(chance)
        return found

    def draft(self, seq: Canvas, k: int) -> Draft:
        """The next k tokens of the copy, which may go on with what it has copied."""
        period = len(self._text) - self.place
        copied = [self._text[self.place + i % period] for i in range(k)]
        tokens = seq.up_to_end(copied)
        return Draft(seq.next(len(tokens)), tokens)
