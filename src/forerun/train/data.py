"""Text to tokens. Documents come from files and are packed end to end into one long array, with an
end token after each.

B sequences of a batch, L tokens of each, N sequences that a model wrote.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from forerun.errors import BadOption
from forerun.probability.noise import mix

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

VALID_SHARE = 50  # one document in this many is held out, by a hash of its text
LONGEST = 400_000  # characters; longer files are generated tables more often than code
ENCODED_TOGETHER = 512  # documents

BatchT_co = TypeVar("BatchT_co", covariant=True)


class TokenSource(Protocol[BatchT_co]):
    """Where training batches and held-out text come from."""

    def batch(self, step: int, size: int, length: int, seed: int) -> BatchT_co:
        """`size` sequences of `length` tokens. They depend on the step and the seed alone, so a
        resumed run sees what it would have seen."""

    def held_out(self, size: int, length: int) -> Tensor:
        """At most `size` windows of `length` held-out tokens, always the same."""


@dataclass(frozen=True)
class Corpus:
    """Token arrays to train on and to hold out."""

    train: np.ndarray
    valid: np.ndarray

    def batch(self, step: int, size: int, length: int, seed: int) -> Tensor:
        """Random windows."""
        rng = np.random.default_rng(mix(seed, step))
        return _windows(self.train, rng.integers(0, len(self.train) - length, size), length)

    def held_out(self, size: int, length: int) -> Tensor:
        """Evenly spaced windows."""
        if len(self.valid) < length:
            raise BadOption(
                f"the data holds out {len(self.valid)} tokens, fewer than context={length}: give "
                "more of it, or a smaller context."
            )
        count = min(size, len(self.valid) // length)
        starts = np.linspace(0, len(self.valid) - length, count).astype(int)
        return _windows(self.valid, starts, length)


def _windows(tokens: np.ndarray, starts: np.ndarray, length: int) -> Tensor:
    windows_BL = np.stack([tokens[start : start + length] for start in starts])
    return torch.from_numpy(windows_BL.astype(np.int64))


@dataclass(frozen=True)
class MixedCorpus:
    """A corpus with a share of every batch taken from sequences that a model wrote."""

    corpus: Corpus
    written_NL: np.ndarray
    share: float

    def batch(self, step: int, size: int, length: int, seed: int) -> Tensor:
        tokens_BL = self.corpus.batch(step, size, length, seed)
        rng = np.random.default_rng(mix(seed, step, 1))
        replaced = np.flatnonzero(rng.random(size) < self.share)
        rows = self.written_NL[rng.integers(0, len(self.written_NL), len(replaced)), :length]
        tokens_BL[replaced] = torch.from_numpy(rows.astype(np.int64))
        return tokens_BL

    def held_out(self, size: int, length: int) -> Tensor:
        return self.corpus.held_out(size, length)


def documents(source: str | None) -> Iterator[tuple[str, bool]]:
    """(text, held out) of every document, each text once.

    The source is a folder of .py files, or a .jsonl or .jsonl.xz file with "text". Without one, the
    standard library and the installed packages are read.
    """
    seen = set()
    for text, split in _read(source):
        key = hashlib.sha256(text.encode("utf-8", "replace")).digest()
        if key in seen or not 0 < len(text) <= LONGEST:
            continue
        seen.add(key)
        yield text, split == "valid" if split else key[0] % VALID_SHARE == 0


def _read(source: str | None) -> Iterator[tuple[str, str | None]]:
    """(text, split) of every document; files of code have no split."""
    if source is None:
        paths = sysconfig.get_paths()
        yield from _read_code(source, [Path(paths["stdlib"]), Path(paths["purelib"])])
    elif Path(source).is_dir():
        yield from _read_code(source, [Path(source)])
    elif Path(source).is_file() and ".jsonl" in Path(source).name:
        yield from _read_json_lines(source)
    else:
        raise BadOption(
            f"data={source!r} is no folder of .py files and no .jsonl or .jsonl.xz file."
        )


def _read_code(source: str | None, folders: list[Path]) -> Iterator[tuple[str, None]]:
    files = sorted({file for folder in folders for file in folder.rglob("*.py")})
    if not files:
        raise BadOption(f"data={source!r} has no .py files in it.")
    for file in files:
        yield file.read_text(encoding="utf-8", errors="replace"), None


def _read_json_lines(source: str) -> Iterator[tuple[str, str | None]]:
    opener = lzma.open if source.endswith(".xz") else open
    with opener(source, "rt", encoding="utf-8") as lines:
        for line in lines:
            entry = json.loads(line)
            yield entry["text"], entry.get("split")


def held_out_corpus(source: str | None, tokenizer: PreTrainedTokenizerBase) -> Corpus:
    """The held-out documents alone."""
    tokens: list[int] = []
    for text, held_out in documents(source):
        if held_out:
            tokens += tokenizer(text, add_special_tokens=False).input_ids
            tokens.append(tokenizer.eos_token_id)
    return Corpus(np.array(tokens), np.array(tokens))


def held_out_windows(
    source: str | None, tokenizer: PreTrainedTokenizerBase, count: int, length: int
) -> np.ndarray:
    """Evenly spaced windows of held-out documents, [count, length]."""
    corpus = held_out_corpus(source, tokenizer)
    if len(corpus.valid) < count * length:
        raise BadOption(
            f"data={source!r} holds out {len(corpus.valid)} tokens, too few for {count} windows of "
            f"{length}."
        )
    return corpus.held_out(count, length).numpy()


def tokenise(source: str | None, tokenizer: PreTrainedTokenizerFast, cache: Path) -> Corpus:
    """All documents as tokens, kept in the file `cache` so that a resumed run reads them there."""
    if not cache.exists():
        corpus = _encode(source, tokenizer)
        cache.parent.mkdir(parents=True, exist_ok=True)
        # several processes may make it at once: each writes its own and renames it
        unfinished = cache.with_name(f"{cache.stem}.{os.getpid()}.tmp.npz")
        np.savez(unfinished, train=corpus.train, valid=corpus.valid)
        unfinished.replace(cache)
    arrays = np.load(cache)
    return Corpus(arrays["train"], arrays["valid"])


def _encode(source: str | None, tokenizer: PreTrainedTokenizerFast) -> Corpus:
    train: list[np.ndarray] = []
    valid: list[np.ndarray] = []
    pending = list(documents(source))
    dtype = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
    for first in range(0, len(pending), ENCODED_TOGETHER):
        some = pending[first : first + ENCODED_TOGETHER]
        encodings = tokenizer.backend_tokenizer.encode_batch(
            [text for text, _ in some], add_special_tokens=False
        )
        for (_, held_out), encoding in zip(some, encodings, strict=True):
            tokens = np.array([*encoding.ids, tokenizer.eos_token_id], dtype)
            (valid if held_out else train).append(tokens)
    if not train or not valid:
        raise BadOption(
            f"data={source!r} is too small: it leaves no documents to train on or to hold out."
        )
    return Corpus(np.concatenate(train), np.concatenate(valid))
