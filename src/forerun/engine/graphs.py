"""How forwards are run: one by one by their plain code, or as CUDA graphs, captured once per size
and replayed.

A captured forward reads its integers from fixed memory: the rows, what they see, where they live,
which of them are read, and how attention is cut into tiles. Any batch that fits the sizes can run
in it, whatever the lanes and however long the texts, because kernels take the lengths of their
loops from those integers too. Sizes are rounded up, so that few captures serve all batches. Padding
rows are written to the scratch slot, which no row sees.

Every capture is checked once: its logits must be those of the forward's plain code. If a capture
fails, or fails that check, one warning names it, and the model goes on without captures.
"""

from __future__ import annotations

import gc
import logging
import os
import statistics
import sys
import threading
import time
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Generic, NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.engine.backbone import Backbone, SlotStorage
from forerun.engine.cache import Slots
from forerun.engine.pack import (
    SECTION,
    SLOTS,
    TILE_COUNTS,
    TILE_ROWS,
    Batch,
    Moved,
    MovedOn,
    Placed,
    Tiles,
    make_tiles,
    round_up,
)
from forerun.engine.pages import PageTable
from forerun.errors import NotAble
from forerun.sequence.rows import HI, HORIZON, POSITION, TOKEN

if TYPE_CHECKING:
    # the memory pool that all captures of a model share
    from torch.cuda import _POOL_HANDLE as PoolHandle

# Every combination of sizes is a capture of its own, so each list is short. A size has many steps
# only where rounding up costs much.
SIZES = (1, 4, 8, 16, 32, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 640)
FEW_SIZES = (1, 4, 8, 16, 32, 64, 128, 256, SIZES[-1])  # of rows that are read, if they are few
CUBLASLT_ROWS = range(17, 161)  # where cuBLASLt is faster, by `bench/gpu.py --blas`
MOST_GRAPHS = 128
LOGIT_SHARE = 1 / 32  # of a GPU's memory that the logits of captures take at most, all together
LOGIT_BYTES = 1 << 30  # the same elsewhere
CHEAP_ROWS = 64  # so many take hardly longer than one
FEW_SPLITS = 8  # of short texts
MUCH_LARGER = 1.5  # times the rows: so large a capture does not serve a batch of more rows
SEEN_BEFORE = 1  # times that a size is met before it is captured: a prompt's may never come again
COVERED_BEFORE = 64  # the same, if a capture of more rows serves meanwhile
TOLERANCE = {torch.float32: 2e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}  # of the largest logit
ENOUGH_ROWS = 16  # that are compared before a capture is refused
log = logging.getLogger("forerun")

OnStart = Callable[[], None]  # called when the device is about to be set to work


def _ignore() -> None:
    """The `OnStart` of a caller who does not ask."""


class CaptureSize(NamedTuple):
    """What a captured forward has room for."""

    rows: int
    reads: int
    tiles: int
    height: int
    splits: int
    by_section: bool

    @classmethod
    def of(cls, batch: Batch, tiles: Tiles[np.ndarray]) -> CaptureSize | None:
        """The size that holds a batch; None where the batch is too large to be worth a capture.

        Of rows there are many sizes, because a row costs. An empty tile costs nothing, and reading
        a row that was computed anyway costs little: so the reads are rounded to the number of
        rows, or to one of a few sizes.
        """
        rows = len(batch.slots)
        reads = len(batch.reads)
        if max(rows, reads, tiles.count) > SIZES[-1]:
            return None
        few = 2 * reads <= rows
        return cls(
            rows=round_up(rows, SIZES),
            reads=round_up(reads, FEW_SIZES) if few else round_up(max(rows, reads), SIZES),
            tiles=round_up(tiles.count, TILE_COUNTS),
            height=tiles.height,
            splits=tiles.splits,
            by_section=tiles.by_section,
        )

    @property
    def longest(self) -> int:
        """Slots that a row may look at."""
        if self.splits == 1:
            return sys.maxsize
        return self.splits * SLOTS * (SECTION if self.by_section else 1)

    def covers(self, other: CaptureSize, most_rows: float) -> bool:
        """Has it room for all that another has room for, in so many rows at most? Empty tiles and
        splits cost next to nothing."""
        same_kind = (self.height, self.by_section) == (other.height, other.by_section)
        return (
            same_kind
            and other.rows <= self.rows <= most_rows
            and self.reads >= other.reads
            and self.tiles >= other.tiles
            # without splits one program looks at all, which takes long if that is much
            and (self.splits >= other.splits or (self.splits == 1 and other.splits <= FEW_SPLITS))
        )


class StaticBatch(Batch):
    """A batch in fixed memory, filled anew for every replay.

    It has no segments: what is known of them at capture would be wrong at the next replay.
    """

    def __init__(self, size: CaptureSize, table: PageTable, device: torch.device):
        self.device = device
        self.segments = []
        self.table = table
        on_gpu = device.type == "cuda"
        parts = [7 * size.rows, size.reads, 6 * size.tiles, size.rows, size.rows, size.tiles]
        self._host = torch.zeros(sum(parts), dtype=torch.long, pin_memory=on_gpu)
        self._device = torch.zeros_like(self._host, device=device)
        self._copied = torch.cuda.Event() if on_gpu else None
        self.fills = 0  # times that it was filled
        split = np.split(self._host.numpy(), np.cumsum(parts)[:-1])
        rows, self._host_reads, bounds, self._host_sources, *self._host_sequences = split
        self._host_rows = rows.reshape(7, -1)
        self._host_bounds = bounds.reshape(6, -1)
        rows_7T, self.reads_R, bounds_6N, self.sources_T, *sequences = self._device.split(parts)
        self._sequence_T, self._sequence_N = sequences  # of every row and tile, where they move
        # How far each sequence moves; behind them all, of what pads.
        self._steps_S = torch.zeros(size.rows + 1, dtype=torch.long, device=device)
        self._rows_7T = rows_7T.view(7, -1)  # five integers, where it lives, its lane's pages
        self._bounds_6N = bounds_6N.view(6, -1)
        self.tokens_T, self.positions_T, *_, self.slots_T, self._pages_T = self._rows_7T
        spans_3T = self._rows_7T[HORIZON : HI + 1]
        cut = (size.height, size.splits, size.by_section)
        self.tiles = Tiles(self._bounds_6N, spans_3T, *cut)

    def set_tokens(self, tokens_T: Tensor, steps: int) -> None:
        """Give rows of plain text, one per sequence, other tokens, so many positions on. Padding
        stays where it is."""
        self.tokens_T.copy_(tokens_T)
        if steps:
            on_T = (self._pages_T != self.table.padding).long() * steps
            on_N = (self._bounds_6N[1] > 0).long() * steps
            self._rows_7T[POSITION : HORIZON + 1] += on_T
            self._find_slots()
            self._bounds_6N[3:] += on_N

    def _find_slots(self) -> None:
        """Find where rows of plain text live: the slot of each is its position."""
        size = self.table.size
        starts_T = self.table.on_device[self._pages_T + self.positions_T // size]
        torch.add(starts_T, self.positions_T % size, out=self.slots_T)

    def _move(self, batch: Batch, moved: Moved, placed: Placed | None = None) -> None:
        """Move rows on, as far as only the device knows, and give them tokens. All that they see
        moves with them."""
        rows = len(batch.slots)
        if self.device.type == "cuda":
            from forerun.engine.moving_kernel import move_rows

            sequences = self._sequence_T, self._sequence_N
            numbers = self._rows_7T, self._bounds_6N, self.sources_T, sequences
            move_rows(*numbers, self.table, batch.source_table, moved, placed, rows)
            return
        if placed is not None:
            self._place(placed, rows)
        self._steps_S[: len(moved.steps_B)] = moved.steps_B + moved.more
        self._move_by_steps(batch.source_table)

    def _place(self, placed: Placed, rows: int) -> None:
        """Write tokens at the same places of all sequences."""
        tokens_BL = self.tokens_T[:rows].view(len(placed.token_B), -1)
        tokens_BL[:, placed.first] = placed.token_B
        if placed.behind_BK is not None:
            tokens_BL[:, placed.first + 1 :] = placed.behind_BK.clamp(min=0)

    def _move_by_steps(self, source_table: PageTable | None) -> None:
        # Intervals of plain text are empty, wherever they are. Rows of context, which see only
        # themselves, see the first slots, too, when they are moved: nobody reads them.
        self._rows_7T[POSITION : HI + 1] += self._steps_S[self._sequence_T]
        self._find_slots()
        self._bounds_6N[3:] += self._steps_S[self._sequence_N]
        if source_table is not None:
            self._find_sources(source_table)

    def _find_sources(self, table: PageTable) -> None:
        """Find where another model keeps what rows are made of, at the positions that they have
        now."""
        pages_T = self._pages_T // self.table.per_lane * table.per_lane
        starts_T = table.on_device[pages_T + self.positions_T // table.size]
        found_T = starts_T + self.positions_T % table.size
        made_of_nothing_T = self.sources_T == table.scratch_slot
        self.sources_T.copy_(torch.where(made_of_nothing_T, self.sources_T, found_T))

    def move_on(self, batch: MovedOn) -> None:
        """Move the rows that it holds on, with other tokens."""
        assert batch.moved is not None
        self._move(batch, batch.moved, batch.placed)

    def fill(self, batch: Batch, tiles: Tiles[np.ndarray]) -> None:
        self.fills += 1
        if self._copied is not None:
            self._copied.synchronize()  # the last replay's integers may still be on their way
        rows = len(batch.slots)
        reads = len(batch.reads)
        self._host_rows[:5, :rows] = batch.rows_5T
        self._host_rows[5, :rows] = batch.slots
        self._host_rows[6, :rows] = batch.lanes * self.table.per_lane
        self._host_rows[:5, rows:] = 0
        self._host_rows[5, rows:] = self.table.scratch_slot
        self._host_rows[6, rows:] = self.table.padding
        self._host_reads[:reads] = batch.reads
        self._host_reads[reads:] = 0
        self._host_bounds[:, : tiles.count] = tiles.bounds_6N
        self._host_bounds[:, tiles.count :] = 0
        if batch.sources is not None:
            self._host_sources[:rows] = batch.sources
            self._host_sources[rows:] = 0
        if batch.moved is not None:
            sequence_T = np.repeat(np.arange(len(batch.row_counts)), batch.row_counts)
            sequence_N = sequence_T[tiles.bounds_6N[0]]
            for numbers, own in zip(self._host_sequences, (sequence_T, sequence_N)):
                numbers[: len(own)] = own
                numbers[len(own) :] = len(self._steps_S) - 1
        self._device.copy_(self._host, non_blocking=True)
        if batch.drawn_T is not None:
            self.tokens_T[: len(batch.drawn_T)] = batch.drawn_T
        if batch.moved is not None:
            self._move(batch, batch.moved)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self.device))


class ForwardRunner(Generic[SlotStorage]):
    """Runs a backbone's forwards in the fastest way that works here. `graphs=False` runs them by
    their plain code; `graphs=True` uses fixed memory even where there is no GPU."""

    def __init__(
        self, backbone: Backbone[SlotStorage], slots: SlotStorage, graphs: bool | None = None
    ):
        self.backbone = backbone
        self.slots = slots
        has_kernels = can_run_kernels(backbone, forced=bool(graphs))
        self.capture_enabled = graphs is not False and has_kernels
        # Do forwards take rows that the host moves on by itself, as on a CPU?
        self.moves_rows = graphs is not False and getattr(backbone, "moves_rows", False)
        self._always_by_kernels = backbone.deterministic and has_kernels
        self.captured: OrderedDict[CaptureSize, CapturedForward] = OrderedDict()
        self.seconds = 0.0  # spent on captures
        self.is_warm = True  # or was the last forward one that will be captured, or just was?
        self.replayed: Replayed | None = None  # the last forward, if it was a replay
        self._seen: Counter[CaptureSize] = Counter()
        device = backbone.device
        # In float32 a large tile would not fit into registers.
        large_heads = backbone.dtype == torch.float32 and backbone.head_dim >= 64
        self._tile_rows = 16 if has_kernels and large_heads else TILE_ROWS
        on_gpu = has_kernels and device.type == "cuda"
        self._programs = attention_programs(device) if on_gpu else 16
        self._pool: PoolHandle | None = torch.cuda.graph_pool_handle() if on_gpu else None
        self._most_bytes = LOGIT_BYTES
        if on_gpu:
            memory = torch.cuda.get_device_properties(device).total_memory
            self._most_bytes = int(LOGIT_SHARE * memory)

    def forward(self, batch: Batch, on_start: OnStart = _ignore) -> Tensor:
        """Logits of the rows that are read."""
        if torch.is_inference_mode_enabled():  # as in every step of an engine
            return self._forward(batch, on_start)
        with torch.inference_mode():  # fixed memory must not become part of a graph of gradients
            return self._forward(batch, on_start)

    def _forward(self, batch: Batch, on_start: OnStart) -> Tensor:
        if self.capture_enabled:
            try:
                with current_device(batch.device):
                    return self._forward_captured(batch, on_start)
            except Exception as error:
                batch.tiles = None
                self._stop_capturing(error)
                if batch.moved is not None:  # it does not know where these rows stand
                    raise
        on_start()
        if self._always_by_kernels:
            with current_device(batch.device):
                return self._forward_by_kernels(batch, self.tiles(batch))
        return self._forward_plain(batch)

    def tiles(self, batch: Batch, ahead: int = 0) -> Tiles[np.ndarray]:
        """How attention takes a batch, also when its texts are so many tokens longer."""
        heads = (self.backbone.heads, self.backbone.key_heads)
        return make_tiles(batch, *heads, self._programs, self._tile_rows, ahead)

    def _forward_plain(self, batch: Batch) -> Tensor:
        return self.backbone.forward(batch, self.slots)

    def has_captured(self, batch: Batch) -> bool:
        """Would a forward of this batch be a replay? Not if it is time to capture its own size."""
        if not self.capture_enabled:
            return False
        _, size = self._size(batch)
        found = None if size is None else self._find(size)
        if size is None or found is None:
            return False
        return found == size or not self._is_time_to_capture(size, found)

    def _find(self, size: CaptureSize) -> CaptureSize | None:
        """This size if it is captured, else the least that is and covers it."""
        if size in self.captured:
            return size
        most = max(CHEAP_ROWS, MUCH_LARGER * size.rows)
        return min((one for one in self.captured if one.covers(size, most)), default=None)

    def _size(self, batch: Batch) -> tuple[Tiles[np.ndarray], CaptureSize | None]:
        tiles = batch.host_tiles
        if tiles is None:
            most = batch.moved.most if batch.moved is not None else 0
            tiles = batch.host_tiles = self.tiles(batch, most + batch.ahead)
        return tiles, CaptureSize.of(batch, tiles)

    def hold(self, batch: Batch) -> bool:
        """Fill the capture of a batch, if there is one, and leave running it to another program."""
        tiles, size = self._size(batch)
        found = None if size is None else self._find(size)
        if size is None or found is None:
            return False
        self.captured.move_to_end(found)
        captured = self.captured[found]
        with current_device(batch.device):
            captured.fixed.fill(batch, tiles)
        self.replayed = Replayed(captured, captured.fixed.fills, batch, size, found)
        return True

    def _forward_captured(self, batch: Batch, on_start: OnStart) -> Tensor:
        if isinstance(batch, MovedOn):
            assert self.replayed is not None, "whoever moves on says what"
            self.is_warm = True
            self._seen[self.replayed.size] += 1
            return self.replayed.captured.replay_moved(batch, on_start)
        self.replayed = None
        tiles, size = self._size(batch)
        if size is None:
            self.is_warm = True
            on_start()
            return self._forward_by_kernels(batch, tiles)
        found = self._find(size)
        # Where rows stand is known to the device alone: the plain code cannot check a capture.
        moves = batch.moved is not None
        capture_now = not moves and self._is_time_to_capture(size, found)
        self.is_warm = found is not None and not capture_now
        if found is not None and not capture_now:
            self.captured.move_to_end(found)
            captured = self.captured[found]
            logits_RV = captured.replay(batch, tiles, on_start)
            self.replayed = Replayed(captured, captured.fixed.fills, batch, size, found)
            return logits_RV
        on_start()
        if capture_now:
            return self._capture(size, batch, tiles)
        return self._forward_by_kernels(batch, tiles)

    def had_better_capture(self, replayed: Replayed) -> bool:
        """Was a larger size replayed often enough in place of its own?"""
        size = replayed.size
        return size.rows != replayed.found.rows and self._seen[size] > COVERED_BEFORE

    def can_capture(self, batch: Batch) -> bool:
        """Is there a size for it?"""
        return self.capture_enabled and self._size(batch)[1] is not None

    def capture_unmoved(self, batch: Batch) -> None:
        """Capture a forward for rows that the device will move on, with the rows where they are."""
        tiles, size = self._size(batch)
        assert size is not None, "of what can be captured"
        self.is_warm = False
        try:
            with current_device(batch.device):
                self._capture(size, batch.with_tokens(batch.rows_5T[TOKEN]), tiles)
        except Exception as error:
            self._stop_capturing(error)

    def _stop_capturing(self, error: Exception) -> None:
        """Whatever stands in the way, the plain code can do it."""
        lost = ", and its bits hang on the batch" if self._always_by_kernels else ""
        self.capture_enabled = False
        self._always_by_kernels = False
        self.captured.clear()
        warn_not_captured("forwards", error, lost)

    def _is_time_to_capture(self, size: CaptureSize, found: CaptureSize | None) -> bool:
        """Is a size met often enough, given what else would serve?"""
        if found is not None and found.rows == size.rows:
            return False
        self._seen[size] += 1
        return self._seen[size] > (SEEN_BEFORE if found is None else COVERED_BEFORE)

    def _forward_by_kernels(self, batch: Batch, tiles: Tiles[np.ndarray]) -> Tensor:
        """What a capture would do, launched one by one: a forward has the same bits either way."""
        batch.tiles = tiles.to(batch.device)
        return self._forward_plain(batch)

    def _capture(self, size: CaptureSize, batch: Batch, tiles: Tiles[np.ndarray]) -> Tensor:
        """Capture a size, and check it against the plain code on rows like these."""
        start = time.perf_counter()
        assert isinstance(self.slots, Slots), "a capturable backbone keeps its keys in Slots"
        fixed = StaticBatch(size, self.slots.table, self.backbone.device)
        fixed.fill(batch, tiles)
        captured = CapturedForward(self._forward_plain, fixed, size.rows, self._pool)
        self._check(captured, batch, tiles)
        logits = captured.replay(batch, tiles)
        self.captured[size] = captured
        self._drop_oldest()
        self.seconds += time.perf_counter() - start
        report_progress(
            f"captured a forward of {size.rows} rows: {len(self.captured)} so far, "
            f"{self.seconds:.1f} s in all"
        )
        return logits

    def _check(self, captured: CapturedForward, batch: Batch, tiles: Tiles[np.ndarray]) -> None:
        """Refuse a capture that differs from the plain code on rows with random tokens: what a text
        begins with may be a token after which rounding alone makes a large difference.

        In half precision that happens after random tokens, too, to a row now and then. So there
        the middle row of several counts, or one draw without such a row: a wrong kernel is wrong
        in most of them. Long texts count apart: they are looked at in another way.
        """
        is_long = [slots > SECTION * SLOTS for slots in batch.slot_counts]
        long_R = np.repeat(is_long, batch.read_counts).tolist()
        found: dict[bool, list[float]] = {kind: [] for kind in long_R}
        draws = 0
        while not draws or min(map(len, found.values())) < ENOUGH_ROWS:
            like_it = batch.with_tokens(self._random_tokens(batch.rows_5T[TOKEN], draws))
            pair = self._forward_plain(like_it), captured.replay(like_it, tiles)
            try:
                return check_logits(*pair)
            except RuntimeError:
                if self.backbone.dtype == torch.float32:
                    raise
            for kind, error in zip(long_R, row_errors(*pair)):
                found[kind].append(error)
            draws += 1
        middle = max(map(statistics.median, found.values()))
        if not middle <= TOLERANCE[self.backbone.dtype]:
            raise RuntimeError(f"half of their logits came out more than {middle:.1%} off")

    def _random_tokens(self, tokens: np.ndarray, draw: int) -> np.ndarray:
        """Other tokens, but for those that are no tokens of the vocabulary."""
        vocab = self.backbone.vocab
        drawn = np.random.default_rng([len(tokens), draw]).integers(0, vocab, len(tokens))
        return np.where(tokens < vocab, drawn, tokens)

    def forget_captures(self) -> None:
        """Capture anew what is met again: a forward has something more to do."""
        self.captured.clear()
        if self._pool is not None:  # nobody may use a pool again whose last capture is gone
            self._pool = torch.cuda.graph_pool_handle()

    def _drop_oldest(self) -> None:
        """Drop the captures that were used least recently, until the rest is within bounds."""
        while len(self.captured) > MOST_GRAPHS or (
            len(self.captured) > 1 and self._logit_bytes() > self._most_bytes
        ):
            self.captured.popitem(last=False)

    def _logit_bytes(self) -> int:
        reads = sum(size.reads for size in self.captured)
        return reads * self.backbone.vocab * self.backbone.dtype.itemsize


def warn_not_captured(what: str, error: Exception, lost: str = "") -> None:
    warnings.warn(
        f"{what} of this model are not captured as graphs, which makes it slower{lost}: {error}",
        stacklevel=3,
    )


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the current one: captures and Triton's kernels use that, and it need not be
    the model's."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def attention_programs(device: torch.device) -> int:
    """Into how many programs attention is cut on a GPU. With more, each would finish sooner, but
    joining their results would take longer: here the two balance."""
    return 3 * torch.cuda.get_device_properties(device).multi_processor_count // 2


_capturing = threading.Lock()  # two at once would mix up what they set for the whole process


def capturing_alone() -> AbstractContextManager[object]:
    """For the time of a capture."""
    return _capturing


class CapturedForward:
    """One forward of a fixed size: on CUDA a graph, elsewhere the same code over fixed memory."""

    def __init__(
        self,
        forward: Callable[[Batch], Tensor],
        fixed: StaticBatch,
        rows: int,
        pool: PoolHandle | None,
    ):
        self.fixed = fixed
        self._rows = rows
        self._forward = partial(forward, fixed)
        self._run: Callable[[], Tensor] = self._forward
        if fixed.device.type == "cuda":
            with capturing_alone(), fastest_blas(rows):
                self._run = capture_graph(self._forward, pool)

    def replay(self, batch: Batch, tiles: Tiles[np.ndarray], on_start: OnStart = _ignore) -> Tensor:
        self.fixed.fill(batch, tiles)
        on_start()
        return self._run()[: len(batch.reads)].clone()  # the next replay writes over it

    def replay_moved(self, batch: MovedOn, on_start: OnStart = _ignore) -> Tensor:
        """The same for the rows that it was filled with, further on."""
        self.fixed.move_on(batch)
        on_start()
        return self._run()[: len(batch.reads)].clone()

    def run_moved_within(self, batch: MovedOn) -> Tensor:
        """The same as a part of another program."""
        self.fixed.move_on(batch)
        with fastest_blas(self._rows) if batch.device.type == "cuda" else nullcontext():
            return self._forward()[: len(batch.reads)]


class Replayed(NamedTuple):
    """A forward that was replayed, and what it was filled with."""

    captured: CapturedForward
    fills: int
    batch: Batch
    size: CaptureSize  # that it needs
    found: CaptureSize  # that it has

    def can_move(self, slots: int) -> bool:
        """Does it still hold these rows, and has it room for so many slots?"""
        return self.captured.fixed.fills == self.fills and slots <= self.found.longest


@contextmanager
def fastest_blas(rows: int) -> Iterator[None]:
    """Use the faster of torch's two libraries of matrix products for so many rows."""
    chosen = torch.backends.cuda.preferred_blas_library()
    if rows in CUBLASLT_ROWS:
        # torch warns every time that this choice is experimental; each capture is checked
        with suppress_stderr():
            torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(chosen)


@contextmanager
def suppress_stderr() -> Iterator[None]:
    """Drop what libraries write to standard error without asking Python."""
    try:
        stderr = os.dup(2)
        devnull = os.open(os.devnull, os.O_WRONLY)
    except OSError:  # there is none, as in a daemon
        yield
        return
    os.dup2(devnull, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(devnull)


def capture_graph(
    run: Callable[[], Tensor], pool: PoolHandle | None, ready: bool = False
) -> Callable[[], Tensor]:
    """Capture what `run` launches, to launch it again at once. It runs once before, so that
    whatever is compiled or chosen on the first run is ready; unless that is so."""
    torch.cuda.synchronize()
    if not ready:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream()
    collects = gc.isenabled()
    gc.disable()  # freeing a graph of another model now would spoil this one
    try:
        # What other threads do meanwhile, such as another model's engine, does not concern it.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            logits = run()
    except Exception:
        torch.cuda.set_stream(stream)  # a capture that fails leaves its own stream behind
        raise
    finally:
        if collects:
            gc.enable()

    def replay() -> Tensor:
        graph.replay()
        return logits

    return replay


def can_run_kernels(backbone: Backbone[SlotStorage], forced: bool = False) -> bool:
    """Can our kernels run a backbone's forwards here, and its forwards be captured? It must be
    made for it, in a precision that kernels have, on a GPU with Triton. `forced` also runs it over
    fixed memory where there is no GPU, as tests do."""
    if not backbone.capturable or backbone.dtype not in TOLERANCE:
        return False
    return (forced or backbone.device.type == "cuda") and find_spec("triton") is not None


def choose_kernels(backbone: Backbone, deterministic: bool | None, name: str) -> None:
    """Have a backbone use kernels that give a row the same bits in any company: if that is asked
    for, or in half precision, where bits decide and such kernels cost next to nothing."""
    offered = backbone.has_fixed_kernels and can_run_kernels(backbone)
    if deterministic and not offered:
        raise NotAble(
            f"deterministic=True: '{name}' cannot keep its bits here. That needs a model of the "
            "Llama shape in bfloat16, float16 or float32 on a CUDA device with Triton."
        )
    wanted = backbone.dtype.itemsize < 4 if deterministic is None else deterministic
    backbone.deterministic = offered and wanted


def check_logits(plain: Tensor, replayed: Tensor) -> None:
    """Refuse a capture whose logits are not those of the plain code."""
    finite = plain.isfinite()  # tokens that another vocabulary does not have are impossible
    error = ((plain - replayed)[finite].abs().max() / plain[finite].abs().max()).item()
    if not error <= TOLERANCE[plain.dtype] or not torch.equal(finite, replayed.isfinite()):
        raise RuntimeError(f"their logits came out {error:.1%} off")


def row_errors(plain_RV: Tensor, replayed_RV: Tensor) -> list[float]:
    """Of every row the largest difference, as a share of its largest logit; infinite where other
    tokens are possible."""
    finite_RV = plain_RV.isfinite()
    apart_RV = torch.where(finite_RV, (plain_RV - replayed_RV).abs(), 0)
    largest_R = torch.where(finite_RV, plain_RV, 0).abs().amax(-1)
    error_R = (apart_RV.amax(-1) / largest_R).float()
    same_R = (finite_RV == replayed_RV.isfinite()).all(-1)
    found: list[float] = torch.where(same_R, error_R, torch.inf).tolist()
    return found


def report_progress(line: str) -> None:
    """Show one line that replaces the last one, if standard error is a terminal; log it too."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{line}")
        sys.stderr.flush()
    log.info(line)
