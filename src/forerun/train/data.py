"""Text to tokens: documents from files, packed end to end into one long array with an end token after each."""

from __future__ import annotations

import hashlib
import json
import lzma
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.errors import BadOption
from forerun.noise import mix

VALID_SHARE = 50  # one document in this many is held out, by a hash of its text
LONGEST = 400_000  # characters; longer files are generated tables more often than code


@dataclass(frozen=True)
class Corpus:
    """Token arrays to train on and to hold out."""

    train: np.ndarray
    valid: np.ndarray

    def batch(self, step: int, size: int, length: int, seed: int) -> Tensor:
        """Random windows. They depend on the step and the seed alone, so that a resumed run sees what it would have seen."""
        starts = np.random.default_rng(mix(seed, step)).integers(0, len(self.train) - length, size)
        return torch.from_numpy(np.stack([self.train[s : s + length] for s in starts]).astype(np.int64))

    def held_out(self, size: int, length: int) -> Tensor:
        """Evenly spaced windows, always the same."""
        if len(self.valid) < length:
            raise BadOption(
                f"the data holds out {len(self.valid)} tokens, fewer than context={length}: give more of it, or a smaller context."
            )
        starts = np.linspace(0, len(self.valid) - length, min(size, len(self.valid) // length)).astype(int)
        return torch.from_numpy(np.stack([self.valid[s : s + length] for s in starts]).astype(np.int64))


@dataclass(frozen=True)
class Mixed:
    """A corpus of which a share of every batch is taken from sequences that a model wrote."""

    corpus: Corpus
    written_NL: np.ndarray
    share: float

    def batch(self, step: int, size: int, length: int, seed: int) -> Tensor:
        tokens_BL = self.corpus.batch(step, size, length, seed)
        rng = np.random.default_rng(mix(seed, step, 1))
        chosen_B = np.flatnonzero(rng.random(size) < self.share)
        rows = self.written_NL[rng.integers(0, len(self.written_NL), len(chosen_B)), :length]
        tokens_BL[chosen_B] = torch.from_numpy(rows.astype(np.int64))
        return tokens_BL

    def held_out(self, size: int, length: int) -> Tensor:
        return self.corpus.held_out(size, length)


def documents(source: str | None) -> Iterator[tuple[str, bool]]:
    """(text, held out) of every document: of a folder of .py files, a .jsonl or .jsonl.xz file with "text", or, without a
    source, the standard library and the packages installed. A text that came before is left out."""
    seen = set()
    for text, split in _read(source):
        key = hashlib.sha256(text.encode("utf-8", "replace")).digest()
        if key not in seen and 0 < len(text) <= LONGEST:
            seen.add(key)
            yield text, split == "valid" if split else key[0] % VALID_SHARE == 0


def _read(source: str | None) -> Iterator[tuple[str, str | None]]:
    if source is None:
        paths = sysconfig.get_paths()
        folders = [Path(paths["stdlib"]), Path(paths["purelib"])]
    elif Path(source).is_dir():
        folders = [Path(source)]
    elif Path(source).is_file() and ".jsonl" in Path(source).name:
        opener: Any = lzma.open if source.endswith(".xz") else open
        with opener(source, "rt", encoding="utf-8") as lines:
            for line in lines:
                entry = json.loads(line)
                yield entry["text"], entry.get("split")
        return
    else:
        raise BadOption(f"data={source!r} is no folder of .py files and no .jsonl or .jsonl.xz file.")
    files = sorted({file for folder in folders for file in folder.rglob("*.py")})
    if not files:
        raise BadOption(f"data={source!r} has no .py files in it.")
    for file in files:
        yield file.read_text(encoding="utf-8", errors="replace"), None


def held_out_corpus(source: str | None, tokenizer: Any) -> Corpus:
    """The held-out documents alone."""
    parts = []
    for text, held_out in documents(source):
        if held_out:
            parts += [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    return Corpus(np.array(parts), np.array(parts))


def held_out_windows(source: str | None, tokenizer: Any, count: int, length: int) -> np.ndarray:
    """Evenly spaced windows of held-out documents, [count, length]."""
    corpus = held_out_corpus(source, tokenizer)
    if len(corpus.valid) < count * length:
        raise BadOption(f"data={source!r} holds out {len(corpus.valid)} tokens, too few for {count} windows of {length}.")
    return corpus.held_out(count, length).numpy()


def tokenise(source: str | None, tokenizer: Any, cache: Path) -> Corpus:
    """All documents as tokens, kept in a file so that a resumed run does not do it again."""
    if not cache.exists():
        parts: dict[bool, list[np.ndarray]] = {True: [], False: []}
        pending = list(documents(source))
        small = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
        for start in range(0, len(pending), 512):
            some = pending[start : start + 512]
            encoded = tokenizer.backend_tokenizer.encode_batch([text for text, _ in some], add_special_tokens=False)
            for (_, held_out), one in zip(some, encoded, strict=True):
                parts[held_out].append(np.array([*one.ids, tokenizer.eos_token_id], small))
        if not parts[False] or not parts[True]:
            raise BadOption(f"data={source!r} is too small: it leaves no documents to train on or to hold out.")
        cache.parent.mkdir(parents=True, exist_ok=True)
        np.savez(cache, train=np.concatenate(parts[False]), valid=np.concatenate(parts[True]))
    arrays = np.load(cache)
    return Corpus(arrays["train"], arrays["valid"])
