"""What a GGUF file says of itself, and where its tensors lie. Lists, the vocabulary among them, are
passed over: the package `gguf` makes an object of every token, which takes half a second.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
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
    said: dict[str, Any]  # but for lists
    tensors: list[GGUFTensor]


def read_header(path: Path) -> GGUFFile:
    """A ValueError for what is no GGUF file or ends too early."""
    data: Any = np.memmap(path, np.uint8, "r").view(np.ndarray)
    reader = _Reader(memoryview(data))
    try:
        magic, version, tensors, settings = reader.numbers("4sIQQ")
        if magic != b"GGUF" or version not in VERSIONS:
            raise ValueError("no GGUF file of a version that is known")
        said = {}
        for _ in range(settings):
            name = reader.string()
            value = reader.value(reader.number("I"))
            if value is not None:
                said[name] = value
        places = [reader.tensor() for _ in range(tensors)]
    except struct.error as error:
        raise ValueError("it ends too early") from error
    step = said.get("general.alignment", 32)
    begin = -(-reader.at // step) * step
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
        """None for a list."""
        if kind == STRING:
            return self.string()
        if kind == LIST:
            self.skip(self.number("I"), self.number("Q"))
            return None
        return self.number(NUMBERS[kind])

    def skip(self, kind: int, count: int) -> None:
        """Pass over the values of a list."""
        if kind in NUMBERS:
            self.at += count * struct.calcsize(f"<{NUMBERS[kind]}")
            return
        if kind != STRING:
            raise ValueError("lists of lists are not known")
        size_at, data, at = struct.Struct("<Q").unpack_from, self.data, self.at
        for _ in range(count):
            at += 8 + size_at(data, at)[0]
        self.at = at

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
