"""How forwards are run: one after the other by their own code, or as CUDA graphs, captured once per size and replayed.

A captured forward reads its integers from fixed memory: rows, what they see, where they live and which of them are read, and how
attention is cut into tiles. Any batch that fits the sizes can run in it, whatever the lanes and however long the texts, because
kernels take their loops' lengths from those integers too. Sizes are rounded up, so that few captures serve all; rows that only fill
up are written nowhere and seen by nobody.

Every capture is checked once: its logits must be those of the forward's plain code. One that cannot be captured, or fails that
check, is named in one warning, and the model goes on without.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
import warnings
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.engine.pack import TILE_ROWS, Batch, Tiles, tiled
from forerun.rows import HI, HORIZON

# Every combination of sizes is a capture of its own: each list is as short as what it rounds up costs little.
SIZES = (1, 4, 8, 16, 32, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 640)
FEW_SIZES = (1, 4, 8, 16, 32, 64, 128, 256, SIZES[-1])  # of tiles, and of rows that are read where they are few
FASTER_BY_LT = range(17, 161)  # rows, by `bench/gpu.py --blas`
MOST_GRAPHS = 128
MOST_BYTES = 1 << 30  # of logits that captures keep, all together
TOLERANCE = {torch.float32: 2e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}  # of the largest logit
log = logging.getLogger("forerun")


@dataclass(frozen=True)
class Size:
    """What a captured forward has room for."""

    rows: int
    reads: int
    tiles: int
    height: int
    splits: int

    @classmethod
    def of(cls, batch: Batch, tiles: Tiles) -> Size | None:
        """One that holds a batch; None where it is too large to be worth capturing.

        Of rows there are many sizes, because a row costs. A tile that does nothing costs nothing, and reading a row that was
        computed anyway little: what is read is about all rows or a few, and not another size for every number of them.
        """
        rows, reads, count = len(batch.slots), len(batch.reads), tiles.numbers.shape[1]
        if max(rows, reads, count) > SIZES[-1]:
            return None
        read = rounded(max(rows, reads)) if 2 * reads > rows else rounded(reads, FEW_SIZES)
        return cls(rounded(rows), read, rounded(count, FEW_SIZES), tiles.height, tiles.splits)


def rounded(count: int, sizes: Sequence[int] = SIZES) -> int:
    return sizes[bisect_left(sizes, count)]


class Fixed:
    """A batch in fixed memory, filled anew for every replay."""

    segments: Sequence[Any] = ()  # what is known of them at capture would be wrong at the next replay

    def __init__(self, size: Size, nowhere: int, device: torch.device):
        self.device, self._nowhere, on_gpu = device, nowhere, device.type == "cuda"
        parts = [6 * size.rows, size.reads, 6 * size.tiles]
        self._sent = torch.zeros(sum(parts), dtype=torch.long, pin_memory=on_gpu)
        self._kept = torch.zeros_like(self._sent, device=device)
        self._filled = torch.cuda.Event() if on_gpu else None
        rows, self._reads, tiles = np.split(self._sent.numpy(), np.cumsum(parts)[:-1])
        self._rows, self._tiles = rows.reshape(6, -1), tiles.reshape(6, -1)
        rows_6T, self.reads_R, tiles_6N = self._kept.split(parts)
        self.tokens_T, self.positions_T, *_, self.slots_T = rows_6T = rows_6T.view(6, -1)
        self.tiles = Tiles(tiles_6N.view(6, -1), rows_6T[HORIZON : HI + 1], size.height, size.splits)

    def fill(self, batch: Batch, tiles: Tiles) -> None:
        if self._filled is not None:
            self._filled.synchronize()  # the last replay's numbers may still be on their way
        count = len(batch.slots)
        self._rows[:5, :count], self._rows[5, :count] = batch.rows_5T, batch.slots
        self._rows[:5, count:], self._rows[5, count:] = 0, self._nowhere
        self._reads[: len(batch.reads)] = batch.reads
        self._reads[len(batch.reads) :] = 0
        self._tiles[:, : tiles.numbers.shape[1]] = tiles.numbers
        self._tiles[:, tiles.numbers.shape[1] :] = 0
        self._kept.copy_(self._sent, non_blocking=True)
        if batch.drawn_T is not None:
            self.tokens_T[:count] = batch.drawn_T
        if self._filled is not None:
            self._filled.record(torch.cuda.current_stream(self.device))


class Runner:
    """Runs a backbone's forwards in the fastest way that is right here. `graphs=False` runs them by their plain code."""

    def __init__(self, backbone: Any, slots: Any, graphs: bool | None = None):
        self.backbone, self.slots = backbone, slots
        self.captures = graphs is not False and able(backbone, forced=bool(graphs))
        self.captured: OrderedDict[Size, Captured] = OrderedDict()
        self.seconds = 0.0  # spent on captures
        self._met: set[Size] = set()
        device = backbone.device
        wide = self.captures and backbone.dtype == torch.float32 and backbone.head_dim >= 64
        self._tile_rows = 16 if wide else TILE_ROWS  # larger ones in float32 would not fit into registers
        on_gpu = self.captures and device.type == "cuda"
        self._programs = programs_for(device) if on_gpu else 16
        self._pool = torch.cuda.graph_pool_handle() if on_gpu else None

    @torch.inference_mode()  # fixed memory must not be a part of anybody's graph of gradients
    def forward(self, batch: Batch, began: Callable[[], None] = lambda: None) -> Tensor:
        """Logits of the rows that are read. `began` is called when the device is about to be set to work."""
        if self.captures:
            try:
                with made_current(batch.device):
                    return self._captured(batch, began)
            except Exception as error:  # whatever stands in the way, the plain code can do it
                self.captures, batch.tiles = False, None
                self.captured.clear()
                warnings.warn(f"forwards of this model are not captured as graphs, which makes it slower: {error}", stacklevel=2)
        began()
        return self.backbone.forward(batch, self.slots)

    def _captured(self, batch: Batch, began: Callable[[], None]) -> Tensor:
        tiles = tiled(batch, self.backbone.fold, self.backbone.key_heads, self._programs, self._tile_rows)
        size = Size.of(batch, tiles)
        if size is None:
            batch.tiles = tiles.to(batch.device)
            began()
            return self.backbone.forward(batch, self.slots)
        if size in self.captured:
            self.captured.move_to_end(size)
            return self.captured[size].replay(batch, tiles, began)
        began()
        if size in self._met:
            return self._capture(size, batch, tiles)
        self._met.add(size)  # a prompt's size may never come again
        return self.backbone.forward(batch, self.slots)

    def _capture(self, size: Size, batch: Batch, tiles: Tiles) -> Tensor:
        """Capture a size, and check it against the plain code on this very batch."""
        began = time.perf_counter()
        plain = self.backbone.forward(batch, self.slots)
        captured = Captured(self.backbone, self.slots, size, self._pool, batch, tiles)
        logits = captured.replay(batch, tiles)
        check(plain, logits)
        self.captured[size] = captured
        while len(self.captured) > MOST_GRAPHS or (len(self.captured) > 1 and self._bytes() > MOST_BYTES):
            self.captured.popitem(last=False)
        self.seconds += time.perf_counter() - began
        say(f"captured a forward of {size.rows} rows: {len(self.captured)} so far, {self.seconds:.1f} s in all")
        return logits

    def _bytes(self) -> int:
        return sum(size.reads for size in self.captured) * self.backbone.vocab * self.backbone.dtype.itemsize


def made_current(device: torch.device) -> AbstractContextManager[Any]:
    """Captures and Triton's kernels are of the current device, which need not be the model's."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def programs_for(device: torch.device) -> int:
    """Into how many programs attention is cut on a GPU. With more, each would finish sooner, but what they bring must be joined:
    this is about where it balances."""
    return 3 * torch.cuda.get_device_properties(device).multi_processor_count // 2


class Captured:
    """One forward of a fixed size. On CUDA a graph; elsewhere the same code over the same fixed memory."""

    def __init__(self, backbone: Any, slots: Any, size: Size, pool: Any, batch: Batch, tiles: Tiles):
        self.fixed = Fixed(size, slots.nowhere, backbone.device)
        self.fixed.fill(batch, tiles)

        def run() -> Tensor:
            return backbone.forward(self.fixed, slots)

        if backbone.device.type == "cuda":
            with products_for(size.rows):
                self._run: Callable[[], Tensor] = on_cuda(run, pool)
        else:
            self._run = run

    def replay(self, batch: Batch, tiles: Tiles, began: Callable[[], None] = lambda: None) -> Tensor:
        self.fixed.fill(batch, tiles)
        began()
        return self._run()[: len(batch.reads)].clone()  # the next replay writes over it


@contextmanager
def products_for(rows: int) -> Iterator[None]:
    """Whose matrix products are captured: of the two libraries that torch has, that which is faster with so many rows."""
    chosen = torch.backends.cuda.preferred_blas_library()
    if rows in FASTER_BY_LT:
        with unheard():  # torch says every time that this choice is experimental; each capture is checked
            torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(chosen)


@contextmanager
def unheard() -> Iterator[None]:
    """Drop what is written to standard error, by libraries that know no other way to warn."""
    try:
        there, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    except OSError:  # there is none, as in a daemon
        yield
        return
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(there, 2)
        os.close(there)
        os.close(nowhere)


def on_cuda(run: Callable[[], Tensor], pool: Any) -> Callable[[], Tensor]:
    """Capture what `run` launches, to launch it again at once. It runs once before, so that whatever is compiled or chosen on the
    first run is ready."""
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph, stream, collects = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), gc.isenabled()
    gc.disable()  # a graph of another model that is freed now would spoil this one
    try:
        with torch.cuda.graph(graph, pool=pool):
            logits = run()
    except Exception:
        torch.cuda.set_stream(stream)  # a capture that fails leaves its own behind
        raise
    finally:
        if collects:
            gc.enable()

    def replay() -> Tensor:
        graph.replay()
        return logits

    return replay


def able(backbone: Any, forced: bool) -> bool:
    """Whether a backbone's forwards can be captured here: it must be made for it, in a precision that kernels have, on a GPU with
    Triton. `forced` also runs it over fixed memory where there is no GPU, as tests do."""
    if not getattr(backbone, "capturable", False) or backbone.dtype not in TOLERANCE:
        return False
    return (forced or backbone.device.type == "cuda") and find_spec("triton") is not None


def check(plain: Tensor, replayed: Tensor) -> None:
    there = plain.isfinite()  # tokens that another vocabulary does not have are impossible
    off = ((plain - replayed)[there].abs().max() / plain[there].abs().max()).item()
    if not off <= TOLERANCE[plain.dtype] or not torch.equal(there, replayed.isfinite()):
        raise RuntimeError(f"their logits came out {off:.1%} off")


def say(line: str) -> None:
    """One line that replaces the last one, where somebody watches; else to the log."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
    log.info(line)
