"""What a request needs of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from forerun.constraints.vocabulary import Vocabulary
from forerun.families.base import Family, ModelHandle

Tokenizer = Any  # of `transformers`, which gives its tokenizers no common type


class DecodableModel(Protocol):
    """A model that is ready to decode, as far as requests need to know it."""

    name: str
    family: Family
    tokenizer: Tokenizer | None
    vocab: int
    context: int
    eos: frozenset[int]
    weights: str  # " in int4": what they were made, if they were

    @property
    def vocabulary(self) -> Vocabulary | None:
        """What its tokens spell, if that is known."""
        ...

    def handle(self) -> ModelHandle:
        """What a method holds of this model."""
        ...

    def decode(self, tokens: Sequence[int], special: bool = False) -> str:
        """The text of some tokens, with or without those that stand for no text."""
        ...
