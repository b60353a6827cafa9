"""GGUF files, read quickly: `transformers` knows their architectures and tokenizers; what was slow
in it is replaced while it reads, and what it made is kept for the next time.

The values are the library's own, bit for bit: blocks are widened by the same arithmetic
(`backbones/blocks.py`), and names are mapped once instead of once per module.

What took long is kept in the user's cache folder (`FORERUN_CACHE` names another; 'off' keeps
nothing): the tokenizer, and of models that are not of the Llama shape (`gguf_plain.py`) a plain
checkpoint. An entry is found by the file's path, size, time and ends, and by the versions that made
it. One that is damaged is made anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast
from unittest.mock import patch

import numpy as np
import torch

from forerun.backbones import blocks
from forerun.backbones.measure import cache_folder
from forerun.checkpoints.files import quiet
from forerun.checkpoints.gguf_header import read_header
from forerun.errors import BadCheckpoint

FORMAT = 3  # of what is kept
CONTROL = 3  # the kind of tokens that no text spells
ENDS = 1 << 20  # bytes at either end of a file by which it is known
MOST_BYTES = 16 << 30  # that is kept in all; the entries used least recently go first
MANIFEST = "forerun_gguf.json"
Made = TypeVar("Made")


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """While this is open, the library reads GGUF files quickly."""
    import gguf
    from transformers import modeling_gguf_pytorch_utils as library

    own_parse = library._gguf_parse_value

    def parse(value: Any, kinds: Any) -> Any:
        return value if isinstance(value, str | int | float) else own_parse(value, kinds)

    names = lru_cache(maxsize=8)(gguf.get_tensor_name_map)
    with (
        patch.object(gguf, "GGUFReader", cache(_reader_class())),
        patch.object(gguf, "dequantize", widen),
        patch.object(gguf, "get_tensor_name_map", names),
        patch.object(library, "_gguf_parse_value", parse),
        _metadata_read_once(),
    ):
        yield


def widen(data: np.ndarray, kind: Any) -> np.ndarray:
    """As `gguf.dequantize`, which is taken for kinds of blocks that are not ours."""
    import gguf.quants

    data = np.array(data)  # from the file, which may change
    if kind.name not in blocks.KINDS:
        return gguf.quants.dequantize(data, kind)
    values = blocks.widened(torch.from_numpy(data), kind.name)
    return values.numpy().reshape(*data.shape[:-1], -1)


@contextlib.contextmanager
def _metadata_read_once() -> Iterator[None]:
    """The library's own reader, in versions that have one: it goes through a file's vocabulary for
    the config, the tokenizer and the weights."""
    try:
        from transformers.integrations.gguf import reader
    except ImportError:
        yield
        return
    mapped, read = reader._mapped, reader._read_metadata
    kept: dict[tuple[str, ...], tuple[dict[str, Any], int, int]] = {}

    def plain(path: str) -> np.ndarray:
        return mapped(path).view(np.ndarray)  # slices of a memmap cost ten times as much

    def once(blob: np.ndarray, path: str, arrays: Collection[str] = ()) -> Any:
        key = (str(path), *sorted(arrays))
        if key not in kept:
            kept[key] = read(blob, path, arrays)
        found, *others = kept[key]
        return {**found}, *others

    with patch.object(reader, "_mapped", plain), patch.object(reader, "_read_metadata", once):
        yield


@cache
def _reader_class() -> Callable[..., Any]:
    from gguf import GGUFReader, GGUFValueType

    class QuickReader(GGUFReader):
        """The package's reader, with arrays of strings and numbers taken in one go: a vocabulary is
        three of them, with up to a million values."""

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            # plain memory: slices of a memmap cost ten times as much
            self.data = cast("Any", np.asarray(self.data).view(np.ndarray))
            kind = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
            count = int(self._get(orig_offs + 4, np.uint64)[0])
            begin = orig_offs + 12
            if kind == GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            if kind == GGUFValueType.STRING:
                parts, end = self._strings(begin, count)
            else:
                values = self._get(begin, self.gguf_scalar_to_np[kind], count)
                parts = values.tolist()
                end = begin + values.nbytes
            types = [GGUFValueType.ARRAY, kind] if count else [GGUFValueType.ARRAY]
            return end - orig_offs, parts, list(range(count)), types

        def _strings(self, begin: int, count: int) -> tuple[list[str], int]:
            order = "little" if self._get(begin, np.uint16).dtype.byteorder in "<=|" else "big"
            memory = memoryview(cast("Any", self.data))
            parts = []
            end = begin
            for _ in range(count):
                start = end + 8
                end = start + int.from_bytes(memory[start - 8 : start], cast("Any", order))
                if end > len(memory):
                    raise ValueError("an array of strings ends behind the file")
                parts.append(str(memory[start:end], "utf-8"))
            return parts, end

    return QuickReader


def control_tokens(path: Path) -> list[str]:
    """Tokens of a file's vocabulary that stand for no text: turns of a chat, parts of a file."""
    words, kinds = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
    said = read_header(path, (words, kinds)).said
    pairs = zip(said.get(words, []), said.get(kinds, []))
    return [word for word, kind in pairs if kind == CONTROL]


def entry_of(path: Path, what: str) -> Path | None:
    """The folder in which something made from a file is kept, whether or not it is there yet."""
    import transformers

    folder = cache_folder()
    if folder is None:
        return None
    path = path.resolve()
    about = path.stat()
    known_by = [str(path), about.st_size, about.st_mtime_ns, FORMAT, transformers.__version__]
    digest = hashlib.sha256(json.dumps([*known_by, what]).encode())
    digest.update(_ends(path))
    return folder / "gguf" / f"{path.stem}-{digest.hexdigest()[:20]}"


def _ends(path: Path) -> bytes:
    with path.open("rb") as file:
        first = file.read(ENDS)
        file.seek(max(0, path.stat().st_size - ENDS))
        return first + file.read(ENDS)


def is_whole(entry: Path) -> bool:
    """Are all files of an entry there, as long as they were, with the ends that they had?"""
    try:
        manifest = json.loads((entry / MANIFEST).read_text())
        for name, (size, ends) in manifest.items():
            file = entry / name
            if file.stat().st_size != size or zlib.crc32(_ends(file)) != ends:
                return False
    except (OSError, ValueError, TypeError, AttributeError):
        return False
    return bool(manifest)


def kept_or_made(
    entry: Path | None,
    read: Callable[[Path], Made],
    make: Callable[[], Made],
    write: Callable[[Made, Path], None],
) -> Made:
    """What was kept in an entry; where that is not whole, it is made, and kept for next time."""
    if entry is not None and is_whole(entry):
        with contextlib.suppress(BadCheckpoint):  # damaged all the same: it is made anew
            found = read(entry)
            touch(entry)
            return found
    made = make()
    if entry is not None:
        with quiet():
            _keep(entry, lambda folder: write(made, folder))
    return made


def _keep(entry: Path, write: Callable[[Path], None]) -> None:
    """Keep what is written. Where it cannot be, nothing is kept."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=entry.parent))
    except OSError:
        return
    try:
        write(part)
        files = [file for file in part.iterdir() if file.is_file()]
        manifest = {file.name: [file.stat().st_size, zlib.crc32(_ends(file))] for file in files}
        (part / MANIFEST).write_text(json.dumps(manifest))
        if entry.exists():  # damaged
            shutil.rmtree(entry)
        part.rename(entry)
        _forget_oldest(entry)
    except OSError:  # no room, or another process was first
        pass
    finally:
        shutil.rmtree(part, ignore_errors=True)


def as_plain(network: Any) -> Any:
    """A network that was read from a file, as one that the library trains and writes: its weights
    are numbers like any others."""
    network.config.__dict__.pop("quantization_config", None)
    network.__dict__.pop("hf_quantizer", None)
    return network


def write_network(network: Any, folder: Path) -> None:
    """Write a network that was read from a file as a plain checkpoint."""
    named = network.config.__dict__.pop("quantization_config", None)
    quantizer = network.__dict__.pop("hf_quantizer", None)
    try:
        network.save_pretrained(folder, max_shard_size="2GB")
    finally:
        if named is not None:
            network.config.quantization_config = named
        if quantizer is not None:
            network.hf_quantizer = quantizer


def _forget_oldest(newest: Path) -> None:
    """Drop the entries that were used least recently, until the rest is within bounds."""
    entries = [folder for folder in newest.parent.iterdir() if (folder / MANIFEST).is_file()]
    entries.sort(key=lambda folder: (folder == newest, (folder / MANIFEST).stat().st_mtime))
    sizes = {e: sum(file.stat().st_size for file in e.iterdir()) for e in entries}
    while len(entries) > 1 and sum(sizes[entry] for entry in entries) > MOST_BYTES:
        shutil.rmtree(entries.pop(0), ignore_errors=True)


def touch(entry: Path) -> None:
    """Note that an entry was used."""
    with contextlib.suppress(OSError):
        (entry / MANIFEST).touch()
