"""What a GGUF file says of itself, and where its tensors lie. Lists, the vocabulary among them, are
passed over unless they are asked for: the package `gguf` makes several objects of every token, in
half a second.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

VERSIONS = (2, 3)
NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
STRING, LIST = 8, 9


@dataclass(frozen=True)
class GGUFTensor:
    name: str
    shape: tuple[int, ...]
    kind: Any  # of blocks: a GGMLQuantizationType
    data: np.ndarray  # bytes


@dataclass(frozen=True)
class GGUFFile:
    said: dict[str, Any]
    tensors: list[GGUFTensor]


def read_header(path: Path, lists: Collection[str] = ()) -> GGUFFile:
    """With the lists of these names. A ValueError for what is no GGUF file or ends too early."""
    data: Any = np.memmap(path, np.uint8, "c").view(np.ndarray)
    reader = _Reader(memoryview(data))
    try:
        magic, version, tensors, settings = reader.numbers("4sIQQ")
        if magic != b"GGUF" or version not in VERSIONS:
            raise ValueError("no GGUF file of a version that is known")
        said = {}
        for _ in range(settings):
            name = reader.string()
            kind = reader.number("I")
            if kind != LIST:
                said[name] = reader.value(kind)
            elif name in lists:
                said[name] = reader.values()
            else:
                reader.skip_list()
        places = [reader.tensor() for _ in range(tensors)]
        step = said.get("general.alignment", 32)
        begin = -(-reader.at // step) * step
    except (struct.error, ArithmeticError, KeyError) as error:  # a KeyError: a list of lists
        raise ValueError(f"it cannot be read: {error!r}") from error
    return GGUFFile(said, [_tensor(data[begin:], *place) for place in places])


class _Reader:
    def __init__(self, data: memoryview):
        self.data = data
        self.at = 0

    def numbers(self, kinds: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{kinds}", self.data, self.at)
        self.at += struct.calcsize(f"<{kinds}")
        return found

    def number(self, kind: str) -> Any:
        return self.numbers(kind)[0]

    def string(self) -> str:
        size = self.number("Q")
        self.at += size
        return str(self.data[self.at - size : self.at], "utf-8")

    def value(self, kind: int) -> Any:
        return self.string() if kind == STRING else self.number(NUMBERS[kind])

    def values(self) -> list[Any]:
        kind, count = self.numbers("IQ")
        if kind != STRING:
            return list(self.numbers(f"{count}{NUMBERS[kind]}"))
        ends = pairwise(self._ends(count))
        return [str(self.data[begin + 8 : end], "utf-8") for begin, end in ends]

    def skip_list(self) -> None:
        kind, count = self.numbers("IQ")
        if kind != STRING:
            self.at += count * struct.calcsize(f"<{NUMBERS[kind]}")
            return
        self._ends(count)

    def _ends(self, count: int) -> list[int]:
        """Pass over so many strings: where the first begins, and where each ends."""
        size_at, data, found = struct.Struct("<Q").unpack_from, self.data, [self.at]
        at = self.at
        for _ in range(count):
            at += 8 + size_at(data, at)[0]
            found.append(at)
        self.at = at
        return found

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, kind of blocks, and where it begins."""
        name = self.string()
        shape = self.numbers(f"{self.number('I')}Q")
        return name, shape[::-1], *self.numbers("IQ")


def _tensor(data: np.ndarray, name: str, shape: tuple[int, ...], kind: int, at: int) -> GGUFTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    blocks = GGMLQuantizationType(kind)
    values, size = GGML_QUANT_SIZES[blocks]
    count = int(np.prod(shape)) // values * size
    if at + count > len(data):
        raise ValueError(f"{name} ends behind the file")
    return GGUFTensor(name, shape, blocks, data[at : at + count])
