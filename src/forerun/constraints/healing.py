"""Token healing: a text may end where no token does.

The tokenizer writes `def f():\\n` with a line break for its last token. A model that was trained on
whole files has rarely seen that token before an indentation, as the break and the spaces after it
are one token. So the last tokens of a prompt are taken back, and chosen anew among all that have
its bytes.

**The healing point** is the earliest boundary between two tokens, at most `MOST_BACK` before the
end, from which some token writes all the rest of the prompt and more. The tokens before it are
kept. If there is none, the prompt needs no healing.

**A cover** of the rest is a spelling of a beginning of it, and one token that writes what is left
and maybe more. The spellings are those that the tokenizer has: for every beginning of the rest, cut
between two characters, what it writes in this place; those that the prompt itself begins with; and
every beginning of these.

**The law** of covers is the model's: each has the probability that the model writes its tokens
after the kept ones, divided by that of all covers together. `probability/covers.py` says what
sampling parameters do to it.

The text after a hole may begin where no token does. Its first tokens are healed in the same way,
read from the end: tokens, their bytes and spellings are all in reverse (`backward`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from forerun.constraints.spelling import Spelling, spelling_of
from forerun.constraints.vocabulary import Vocabulary
from forerun.errors import NotAble

MOST_BACK = 4  # tokens that may be taken back
MOST_SPELLINGS = 32
MOST_TRIED = 64  # added tokens, to see what they write
NONE = np.zeros(0, np.int64)
WINDOW = 8  # tokens beyond the healing point that the tokenizer is shown again
# Before a text that stands inside another, where the tokenizer takes it for a beginning. One is
# enough if no token holds its end and the beginning of the text.
ANCHORS = ("\n", ".", "a", "1")


class TokenIndex:
    """Which tokens begin with some bytes; `backward`, which end with them, all in reverse."""

    def __init__(self, spelling: Spelling, backward: bool = False):
        if backward:
            spelling = Spelling([text and text[::-1] for text in spelling.tokens])
        self.spelling = spelling
        self.backward = backward
        ids = [token for token, text in enumerate(spelling.tokens) if text]
        ids.sort(key=lambda token: spelling.tokens[token] or b"")
        self._ids = np.array(ids, np.int64)
        self._texts = [spelling.tokens[token] or b"" for token in ids]
        exact: dict[bytes, list[int]] = {}
        for token, text in zip(ids, self._texts):
            exact.setdefault(text, []).append(token)
        self._exact = {text: np.array(tokens, np.int64) for text, tokens in exact.items()}

    def spelled(self, token: int) -> bytes:
        """What a token writes; nothing where it stands for no text."""
        known = 0 <= token < len(self.spelling)
        return (self.spelling.tokens[token] or b"") if known else b""

    def writing(self, text: bytes) -> np.ndarray:
        """The tokens that write this and nothing else."""
        return self._exact.get(text, NONE)

    def beyond(self, text: bytes) -> np.ndarray:
        """The tokens that write this and more."""
        first = bisect_left(self._texts, text + b"\0")
        # Text is UTF-8, in which no byte is 255.
        last = bisect_left(self._texts, text[:-1] + bytes([text[-1] + 1]))
        return self._ids[first:last]

    def read(self, said: bytes) -> str | None:
        """Bytes of this index as text; None where they begin or end inside a character."""
        try:
            return (said[::-1] if self.backward else said).decode()
        except UnicodeDecodeError:
            return None


def token_index(vocabulary: Vocabulary, backward: bool = False) -> TokenIndex:
    """The index of a model's tokens, made once."""
    return vocabulary.once(
        (TokenIndex, backward), lambda: TokenIndex(spelling_of(vocabulary), backward)
    )


def known_tokens(vocabulary: Vocabulary) -> TokenIndex | None:
    """The index of a model's tokens, if it is known what each writes, wherever it stands."""
    try:
        index = token_index(vocabulary)
    except NotAble:
        return None
    plain = vocabulary.once(known_tokens, lambda: _writes_plainly(vocabulary.tokenizer))
    return index if plain else None


def _writes_plainly(tokenizer: Any) -> bool:
    """Do added tokens write themselves between words? Some tokenizers make white space of them."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    names = {token: str(one) for token, one in added.items() if not one.special}
    words = tokenizer("a", add_special_tokens=False).input_ids if names else []
    for token in [*names][:MOST_TRIED]:
        ids = [*words, token, *words]
        said = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if names[token] not in said:
            return False
    return True


def encode_inside(vocabulary: Vocabulary, text: str) -> list[int]:
    """A text as the tokenizer writes it behind other text: many put a space before what they take
    for a beginning. Where that cannot be found out, as it writes it alone."""
    alone = vocabulary.encode(text)
    index = known_tokens(vocabulary)
    if index is None or _ending(index, alone, text) == alone:
        return alone
    for anchor in ANCHORS:
        found = _ending(index, vocabulary.encode(anchor + text), text)
        if found is not None:
            return found
    return alone


def _ending(index: TokenIndex, tokens: list[int], text: str) -> list[int] | None:
    """The last of some tokens that write a text, if they do."""
    said = text.encode()
    left = len(said)
    start = len(tokens)
    while left > 0 and start:
        start -= 1
        left -= len(index.spelled(tokens[start]))
    found = tokens[start:]
    return found if b"".join(map(index.spelled, found)) == said else None


@dataclass(frozen=True, eq=False)
class Healing:
    """A prompt whose last tokens are chosen anew."""

    index: TokenIndex
    kept: list[int]
    taken: list[int]  # back: what the tokenizer wrote behind the healing point
    rest: bytes  # and what that says
    # Spellings of beginnings of the rest, each behind its own beginnings.
    spellings: Sequence[tuple[int, ...]]

    @cached_property
    def parents(self) -> list[int]:
        """For each spelling, the one that is a token shorter; of none at all, itself."""
        number = {spelling: i for i, spelling in enumerate(self.spellings)}
        return [number[spelling[:-1]] for spelling in self.spellings]

    @cached_property
    def left(self) -> list[bytes]:
        """What of the rest each spelling leaves."""
        spell = self.index.spelling.spell
        return [self.rest[len(spell(spelling)) :] for spelling in self.spellings]

    def over(self, spelling: int, token: int) -> bytes:
        """What a token that covers what a spelling leaves writes beyond the prompt."""
        return self.index.spelled(token)[len(self.left[spelling]) :]

    def chains(self) -> list[tuple[int, ...]]:
        """Spellings that, with their beginnings, are all spellings. The prompt's own comes first:
        what is computed for it is kept."""
        own = tuple(self.taken[:-1])
        shorter = {one[:i] for one in self.spellings for i in range(len(one))}
        return [own, *(one for one in self.spellings if one not in shorter and one != own)]

    def within(self, most: int) -> Healing:
        """The same with covers of so many tokens at most."""
        return replace(self, spellings=[one for one in self.spellings if len(one) < most])


def healing_of(
    vocabulary: Vocabulary, ids: Sequence[int], least: int, backward: bool = False
) -> Healing | None:
    """How the end of a text is healed, `least` tokens being kept in any case; None where nothing
    is to be healed, or what tokens write is not known. `backward`, how its beginning is."""
    if known_tokens(vocabulary) is None:
        return None
    index = token_index(vocabulary, backward)
    if backward:
        ids = ids[::-1]
    point = _healing_point(index, ids, least)
    if point is None:
        return None
    kept = list(ids[:point])
    taken = list(ids[point:])
    rest = index.spelling.spell(taken)
    return Healing(index, kept, taken, rest, _spellings(vocabulary, index, kept, taken, rest))


def _healing_point(index: TokenIndex, ids: Sequence[int], least: int) -> int | None:
    found = None
    rest = b""
    for point in range(len(ids) - 1, max(least, len(ids) - MOST_BACK) - 1, -1):
        text = index.spelled(ids[point])
        if not text:  # a special token: nothing is taken back across it
            break
        rest = text + rest
        if index.read(rest) is not None and len(index.beyond(rest)):
            found = point
    return found


def _spellings(
    vocabulary: Vocabulary,
    index: TokenIndex,
    kept: Sequence[int],
    taken: Sequence[int],
    rest: bytes,
) -> list[tuple[int, ...]]:
    """The prompt's own spelling and the tokenizer's of every beginning, with all their beginnings,
    shorter ones first."""
    own = tuple(taken[:-1])
    found = {own[:i] for i in range(len(own) + 1)}
    theirs = sorted(_cut_spellings(vocabulary, index, kept, taken, rest), key=len)
    for spelling in theirs:
        more = {spelling[:i] for i in range(len(spelling) + 1)}
        if len(found | more) <= MOST_SPELLINGS:
            found |= more
    return sorted(found, key=lambda one: (len(one), one))


def _cut_spellings(
    vocabulary: Vocabulary,
    index: TokenIndex,
    kept: Sequence[int],
    taken: Sequence[int],
    rest: bytes,
) -> Iterable[tuple[int, ...]]:
    """What the tokenizer writes between the healing point and a cut inside the rest, if the text
    ends there; for an index that reads backward, if it begins there."""
    near = _text_near(index, kept)
    text = index.read(rest) or ""

    def tokens_of(part: str) -> list[int]:
        if index.backward:
            return encode_inside(vocabulary, part + near)[::-1]
        return encode_inside(vocabulary, near + part)

    whole = tokens_of(text)
    point = len(whole) - len(taken)
    if whole[point:] != list(taken):  # it writes otherwise here: nothing is known of cuts
        return
    for length in range(1, len(text)):
        part = text[-length:] if index.backward else text[:length]
        cut = tokens_of(part)
        behind = tuple(cut[point:])
        if cut[:point] == whole[:point] and index.read(index.spelling.spell(behind)) == part:
            yield behind


def _text_near(index: TokenIndex, kept: Sequence[int]) -> str:
    """Some text beyond the healing point, which tells the tokenizer where it is."""
    said = b""
    for token in reversed(kept[-WINDOW:]):
        text = index.spelled(token)
        if not text:
            break
        said = text + said
    while index.read(said) is None:
        said = said[1:]  # the rest of a character of which the other bytes are further away
    return index.read(said) or ""
