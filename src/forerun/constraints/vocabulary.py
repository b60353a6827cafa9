"""What tokens spell, for engines that read grammars."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from forerun.errors import BadOption

Made = TypeVar("Made")

MOST_KEPT = 256  # things made for one vocabulary, such as compiled grammars


class Vocabulary:
    """The tokens of a model: its tokenizer, or the bytes that each token spells.

    `size` is how many tokens the model has. What engines make of a vocabulary is kept with it.
    """

    def __init__(
        self,
        size: int,
        tokenizer: Any | None = None,
        spelled: Sequence[bytes] | None = None,
    ):
        self.size = size
        self.tokenizer = tokenizer
        self.spelled = spelled
        self._made: dict[Hashable, Any] = {}
        self._lock = threading.RLock()

    @property
    def end(self) -> int:
        """The token that engines take for the end of a text: one that spells none; without a
        tokenizer, one more than there are."""
        if self.tokenizer is None:
            return self.size
        special = [self.tokenizer.eos_token_id, *self.tokenizer.all_special_ids]
        end = next((token for token in special if token is not None), None)
        if end is None:
            raise BadOption(
                "the model's tokenizer has no special token: grammars need one that ends a text."
            )
        return end

    def encode(self, text: str) -> list[int]:
        """A text as this model usually spells it; without a tokenizer, by the longest tokens."""
        if self.tokenizer is not None:
            return list(self.tokenizer(text, add_special_tokens=False).input_ids)
        return longest_first(text.encode(), self.spelled or ())

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` returns, made once for this vocabulary."""
        with self._lock:
            made = self._made.pop(key) if key in self._made else make()
            while len(self._made) >= MOST_KEPT:  # the one that was not used for the longest time
                self._made.pop(next(iter(self._made)))
            self._made[key] = made
            return made


def longest_first(text: bytes, spelled: Sequence[bytes]) -> list[int]:
    """Tokens that spell a text, the longest that fits first; up to where none fits."""
    found: list[int] = []
    while text:
        fitting = [token for token, piece in enumerate(spelled) if piece and text.startswith(piece)]
        if not fitting:
            break
        best = max(fitting, key=lambda token: len(spelled[token]))
        found.append(best)
        text = text[len(spelled[best]) :]
    return found
