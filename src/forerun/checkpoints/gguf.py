"""GGUF files, read quickly: `transformers` knows their architectures and tokenizers; what was slow
in it is replaced while it reads, and what it made is kept for the next time.

The values are the library's own, bit for bit: blocks are widened by the same arithmetic, only more
of them at a time, and names are mapped once instead of once per module.

What was read is kept as a plain checkpoint in the user's cache folder (`FORERUN_CACHE` names
another; 'off' keeps nothing). An entry is found by the file's path, size, time and ends, and by the
versions that made it. One that is damaged is made anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np

from forerun.backbones.measure import cache_folder

FORMAT = 2  # of what is kept
CONTROL = 3  # the kind of tokens that no text spells
ENDS = 1 << 20  # bytes at either end of a file by which it is known
MOST_BYTES = 16 << 30  # that is kept in all; the entries used least recently go first
BLOCKS_AT_ONCE = 1 << 14
MANIFEST = "forerun_gguf.json"


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
    fields = _reader_class()(path).fields

    def values(name: str) -> list[Any]:
        found = fields.get(f"tokenizer.ggml.{name}")
        return [] if found is None else [found.parts[place] for place in found.data]

    return [word for word, kind in zip(values("tokens"), values("token_type")) if kind == CONTROL]


def widen(data: np.ndarray, kind: Any) -> np.ndarray:
    """The float32 values of a tensor's blocks: as `gguf.dequantize`, many blocks at a time and on
    all threads."""
    import gguf.quants
    import torch

    traits = gguf.quants._type_traits.get(kind)
    if traits is None:  # not in blocks
        return gguf.quants.dequantize(data, kind)
    traits.init_grid()
    blocks = np.asarray(data).view(np.ndarray).reshape(-1, traits.type_size)
    out = np.empty((len(blocks), traits.block_size), np.float32)
    # so that what is made in between stays in the processor's cache
    step = max(1, BLOCKS_AT_ONCE * 32 // traits.block_size)

    def fill(first: int) -> None:
        some = slice(first, first + step)
        out[some] = traits.dequantize_blocks(blocks[some])

    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        list(pool.map(fill, range(0, len(blocks), step)))
    return out.reshape(*data.shape[:-1], -1)


def entry_of(path: Path, precision: str) -> Path | None:
    """The folder in which the checkpoint of a file is kept, whether or not it is there yet."""
    import transformers

    folder = cache_folder()
    if folder is None:
        return None
    path = path.resolve()
    about = path.stat()
    known_by = [str(path), about.st_size, about.st_mtime_ns, FORMAT, transformers.__version__]
    digest = hashlib.sha256(json.dumps([*known_by, precision]).encode())
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


def keep(entry: Path, network: Any, tokenizer: Any) -> None:
    """Keep a checkpoint that was read from a file. Where it cannot be written, nothing is kept."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=entry.parent))
    except OSError:
        return
    try:
        _write(part, network, tokenizer)
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


def _write(folder: Path, network: Any, tokenizer: Any) -> None:
    named = network.config.__dict__.pop("quantization_config", None)
    quantizer = network.__dict__.pop("hf_quantizer", None)
    try:
        network.save_pretrained(folder, max_shard_size="2GB")
    finally:
        if named is not None:
            network.config.quantization_config = named
        if quantizer is not None:
            network.hf_quantizer = quantizer
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    files = [file for file in folder.iterdir() if file.is_file()]
    manifest = {file.name: [file.stat().st_size, zlib.crc32(_ends(file))] for file in files}
    (folder / MANIFEST).write_text(json.dumps(manifest))


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
