"""What every token of a tokenizer writes, as bytes, and the tree of all of them.

V tokens, N nodes of one level of the tree.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from forerun.constraints.vocabulary import Vocabulary
from forerun.errors import NotAble

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
WORD_START = "\u2581"  # what SentencePiece writes for a space


class Level(NamedTuple):
    """The nodes of one depth: each is a node of the level before it and one byte more."""

    parent_N: np.ndarray  # index into the level before
    byte_N: np.ndarray
    node_T: np.ndarray  # the nodes where tokens end, and which tokens
    token_T: np.ndarray


class Spelling:
    """The bytes of every token; None where a token stands for no text."""

    def __init__(self, tokens: Sequence[bytes | None]):
        self.tokens = tokens

    @cached_property
    def levels(self) -> list[Level]:
        """The tree of all tokens, which only canvases need."""
        return _levels(self.tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def spell(self, tokens: Sequence[int]) -> bytes:
        """The text of some tokens."""
        return b"".join(self.tokens[token] or b"" for token in tokens)


def _levels(tokens: Sequence[bytes | None]) -> list[Level]:
    """The tree of all tokens, level by level: what tokens share is walked once."""
    ids = np.array([i for i, token in enumerate(tokens) if token], np.int64)
    node_I = np.zeros(len(ids), np.int64)  # where each token's way has come to
    levels = []
    for depth in range(max((len(tokens[i] or b"") for i in ids), default=0)):
        byte_I = np.array([(tokens[i] or b"")[depth] for i in ids], np.int64)
        key, node_I = np.unique(node_I * 256 + byte_I, return_inverse=True)
        ends_I = np.array([len(tokens[i] or b"") == depth + 1 for i in ids], bool)
        levels.append(Level(key // 256, key % 256, node_I[ends_I], ids[ends_I]))
        ids = ids[~ends_I]
        node_I = node_I[~ends_I]
    return levels


def spelling_of(vocabulary: Vocabulary) -> Spelling:
    """What the tokens of a model spell, made once."""
    return vocabulary.once(Spelling, lambda: _spelling(vocabulary))


def _spelling(vocabulary: Vocabulary) -> Spelling:
    if vocabulary.spelled is not None:
        return Spelling([text or None for text in vocabulary.spelled])
    backend = getattr(vocabulary.tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise NotAble(
            f"a constraint needs a fast tokenizer, whose tokens are known byte by byte; this one "
            f"is a {type(vocabulary.tokenizer).__name__}."
        )
    settings = json.loads(backend.to_str())
    read = _reader(settings.get("decoder") or {})
    added = {int(one["id"]): one for one in settings.get("added_tokens", ())}
    tokens: list[bytes | None] = [None] * vocabulary.size
    for text, token in backend.get_vocab(with_added_tokens=True).items():
        if token >= vocabulary.size:
            continue
        if token not in added:
            tokens[token] = read(text)
        elif not added[token]["special"]:  # written as it is
            tokens[token] = text.encode()
    return Spelling(tokens)


def _reader(decoder: dict[str, Any]) -> Any:
    """How a token's name becomes bytes: byte by byte, or as SentencePiece writes it."""
    kinds = {decoder.get("type"), *(one["type"] for one in decoder.get("decoders", ()))}
    if "ByteLevel" in kinds:
        return _byte_level
    if kinds & {"Metaspace", "Replace", "ByteFallback"}:
        return _sentence_piece
    raise NotAble(
        f"a constraint needs to know what each token writes, and of a tokenizer with the decoder "
        f"{decoder.get('type')!r} that is not known."
    )


def _sentence_piece(text: str) -> bytes:
    found = BYTE_TOKEN.fullmatch(text)
    if found:
        return bytes([int(found[1], 16)])
    return text.replace(WORD_START, " ").encode()


def _byte_level(text: str) -> bytes | None:
    try:
        return bytes(BYTE_OF[character] for character in text)
    except KeyError:  # no token of the model's own: it was added to the list as it is
        return text.encode()


def _byte_alphabet() -> dict[str, int]:
    """The letters that byte-level tokenizers write for bytes (GPT-2's table): printable bytes stand
    for themselves, the others follow from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
