"""Where a request's prompt or its holes are healed, and what becomes of its sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from forerun.constraints.base import BITS, Constraint
from forerun.constraints.healing import Healing, TokenIndex, healing_of, known_tokens, token_index
from forerun.constraints.holes import Hole
from forerun.constraints.left_to_right import LeftToRight
from forerun.methods.healing import Healed
from forerun.options import Sampling
from forerun.requests.detokenizer import LONGEST_CHARACTER, REPLACEMENT
from forerun.requests.model import DecodableModel
from forerun.requests.prompts import Tokenised
from forerun.sequence.canvas import BLANK
from forerun.sequence.logprobs import TokenLogprob


def healing_of_prompt(
    model: DecodableModel, sampling: Sampling, ids: Sequence[int], longest: int
) -> Healing | None:
    """How the end of a text is healed; None for token ids, and where no token goes beyond it.
    Spelled otherwise a prompt may have more tokens, at most `longest`."""
    if not sampling.heal or not isinstance(ids, Tokenised) or model.vocabulary is None:
        return None
    found = healing_of(model.vocabulary, ids, least=1 if model.family.needs_prompt else 0)
    if found is None or len(found.kept) + len(found.rest) > longest:
        return None
    return found


class OpenHole(NamedTuple):
    """Places [start, end) of a canvas that are blank: a hole, and the tokens beside it that are
    chosen anew."""

    start: int
    end: int
    tokens: TokenIndex
    before: Healing | None  # of the text that ends where the hole begins
    after: Healing | None  # of the text that begins where it ends, backward

    @property
    def borders(self) -> list[tuple[Healing, int, int]]:
        """What is healed, where its first token stands, and the step from there to the next."""
        found = [(self.before, self.start, 1), (self.after, self.end - 1, -1)]
        return [(healing, first, step) for healing, first, step in found if healing is not None]

    @property
    def size(self) -> int:
        """How many blanks there are beyond those of tokens that were taken back."""
        return self.end - self.start - sum(len(one.taken) for one, _, _ in self.borders)

    def fill(self, canvas: np.ndarray) -> tuple[bytes, list[int]]:
        """What is written into the hole, and the tokens that write some of it."""
        tokens = [int(token) for token in canvas[self.start : self.end] if token != BLANK]
        said = b""
        ends = []
        for token in tokens:
            said += self.tokens.spelled(token)
            ends.append(len(said))
        first = len(self.before.rest) if self.before else 0
        last = len(said) - (len(self.after.rest) if self.after else 0)
        spans = zip(tokens, [0, *ends], ends)
        inside = [token for token, start, end in spans if end > first and start < last]
        return said[first:last], inside


def open_holes(
    model: DecodableModel,
    sampling: Sampling,
    pieces: Sequence[Sequence[int]],
    holes: Sequence[Hole],
) -> list[OpenHole | None]:
    """The holes of a text, each with what is healed beside it; None where nothing is: token ids are
    taken as they are, and a hole that must hold something holds it in tokens of its own."""
    found: list[OpenHole | None] = []
    taken = 0  # by the hole before, of the text between
    kept = sum(map(len, pieces))
    for hole, left, right in zip(holes, pieces, pieces[1:]):
        heals = sampling.heal and hole.spec is None
        before = _border(model, left, taken) if heals else None
        after = _border(model, right, 0, backward=True) if heals else None
        start = hole.start - (len(before.taken) if before else 0)
        end = hole.end + (len(after.taken) if after else 0)
        kept -= end - start - (hole.end - hole.start)
        taken = end - hole.end
        opened = None
        if model.vocabulary is not None and (before or after):
            opened = OpenHole(start, end, token_index(model.vocabulary), before, after)
        found.append(opened)
    if model.family.needs_prompt and not kept:  # it must see something from the first question on
        return [None] * len(found)
    return found


def _border(
    model: DecodableModel, piece: Sequence[int], least: int, backward: bool = False
) -> Healing | None:
    if not isinstance(piece, Tokenised) or model.vocabulary is None:
        return None
    return healing_of(model.vocabulary, piece, least, backward)


def drops_first_space(model: DecodableModel) -> bool:
    """Does the tokenizer drop a space where it takes tokens for the beginning of a text?"""
    if model.vocabulary is None:
        return False
    index = known_tokens(model.vocabulary)
    if index is None:
        return False

    def tried() -> bool:
        spaced = [*index.writing(b" "), *index.beyond(b" ")][:1]
        return any(model.decode([int(t)]).encode() == index.spelled(t)[1:] for t in spaced)

    return model.vocabulary.once(drops_first_space, tried)


def text_before(
    model: DecodableModel, ids: Sequence[int], healing: Healing | None
) -> tuple[list[int], str]:
    """The last tokens of the text that what is generated, or healed, follows, and what they say;
    none where the tokenizer need not see them: it drops no space, or token ids were given."""
    if not isinstance(ids, Tokenised) or not drops_first_space(model):
        return [], ""
    text: Sequence[int] = ids if healing is None else healing.kept
    if ids.text is not None:
        text = ids.text
    for count in range(1, min(len(text), LONGEST_CHARACTER) + 1):
        last = list(text[-count:])
        said = model.decode(last)
        if said and REPLACEMENT not in said:
            return last, said
    return [], ""


def said_before(
    model: DecodableModel,
    healing: Healing,
    tokens: Sequence[int],
    before: tuple[Sequence[int], str],
) -> tuple[list[int], str]:
    """The tokens that the output follows, from before the healing point on, and what the prompt
    says there. A token that goes beyond it is not among them."""
    kept, said = before
    if not kept:
        kept = healing.kept[-1:]
        said = model.decode(kept)
    rest = healing.rest
    if not said and rest.startswith(b" ") and drops_first_space(model):
        rest = rest[1:]
    return [*kept, *tokens], said + rest.decode()


def respelled(healing: Healing, healed: Healed, tokens: Sequence[int]) -> list[TokenLogprob]:
    """The log-probabilities of tokens that a prompt's end was chosen to be, without
    alternatives."""
    number = {spelling: i for i, spelling in enumerate(healing.spellings)}
    found: list[TokenLogprob] = []
    for i, token in enumerate(tokens):
        logits_V = healed.logits_NV[number[tuple(tokens[:i])]].double()
        logprob = float(logits_V.log_softmax(-1)[token])
        found.append({"token": token, "logprob": logprob, "sampled_logprob": logprob, "top": []})
    return found


class Onset:
    """What a constraint says of the text that the last token of a cover writes beyond the prompt:
    tokens must spell it that may come one after the other, the longest first. They are what the
    constraint is told of."""

    def __init__(self, healing: Healing, constraint: Constraint):
        self.healing = healing
        # On a canvas a text begins with a blank of its own: nothing is written beyond the prompt.
        self._constraint = constraint if isinstance(constraint, LeftToRight) else None
        self._allowed: dict[tuple[int, ...], np.ndarray] = {}

    def usable(self) -> list[np.ndarray]:
        """For every spelling, the tokens beyond the prompt that may end it."""
        if self._constraint is None:
            return self._usable()
        return self._constraint.once(tuple(self.healing.left), self._usable)

    def _usable(self) -> list[np.ndarray]:
        found = []
        for i, left in enumerate(self.healing.left):
            beyond = self.healing.index.beyond(left)
            kept = [token for token in beyond if self.spell(self.healing.over(i, int(token)))]
            found.append(np.array(kept, np.int64))
        return found

    def spell(self, over: bytes) -> list[int]:
        """The tokens that spell a text; none where the constraint does not allow it."""
        tokens: list[int] = []
        while over and self._constraint is not None:
            fitting = self._longest(tuple(tokens), over)
            if fitting is None:
                return []
            tokens.append(fitting)
            over = over[len(self.healing.index.spelled(fitting)) :]
        return tokens

    def _longest(self, before: tuple[int, ...], text: bytes) -> int | None:
        """The longest token that a text begins with and that may follow some others."""
        assert self._constraint is not None
        if before not in self._allowed:
            self._allowed[before] = self._constraint.first(before)
        allowed_W = self._allowed[before]
        for length in range(len(text), 0, -1):
            for token in self.healing.index.writing(text[:length]).tolist():
                if allowed_W[token // BITS] >> (token % BITS) & 1:
                    return int(token)
        return None
