"""Where a request's prompt is healed, and what becomes of its sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forerun.constraints.base import BITS, Constraint
from forerun.constraints.healing import Healing, healing_of
from forerun.constraints.left_to_right import LeftToRight
from forerun.methods.healing import Healed
from forerun.options import Sampling
from forerun.requests.model import DecodableModel
from forerun.requests.prompts import Tokenised
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


def said_before(
    model: DecodableModel, healing: Healing, tokens: Sequence[int]
) -> tuple[list[int], str]:
    """The tokens that the output follows, from before the healing point on, and what the prompt
    says there. A token that goes beyond it is not among them."""
    before = healing.kept[-1:]
    return [*before, *tokens], model.decode(before) + healing.rest.decode()


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
