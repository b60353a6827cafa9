"""Products and forwards on a CPU in C++, where a compiler is found: `forward.cpp` has the forward,
`products.cpp` and `attention.cpp` its parts, `packing.cpp` what products take; `writing.cpp` and
`rounds.cpp` run several in a row.

It is compiled once per machine, in some seconds, into the folder where what was measured is kept.
Without a compiler, or where nothing is kept, torch's own operations serve.

T rows, I inputs, O outputs, G groups of inputs, R rows read, V vocabulary.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ctypes import byref, c_int64, c_void_p
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.backbones import blocks as in_blocks
from forerun.backbones.blocks import Blocks
from forerun.backbones.measure import cache_folder, instruction_sets, machine
from forerun.backbones.native.looking import BlockRows
from forerun.backbones.native.rounds import Runner, go_on
from forerun.backbones.native.structures import (
    LayerFields,
    MatrixFields,
    ModelFields,
    RowsFields,
    TextsFields,
    pointer,
)
from forerun.backbones.products import (
    GROUP,
    NIBBLE,
    WEIGHTS_AT_ONCE,
    Codes,
    Layout,
    quantised,
)
from forerun.backbones.quantised import Quantised
from forerun.engine.backbone import LikeliestText, RoundsAsked, RoundsMade, WrittenText
from forerun.engine.cache import Slots
from forerun.engine.pack import Batch
from forerun.engine.pages import PageTable
from forerun.sequence.rows import HI, HORIZON, POSITION

SOURCES = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ["-std=c++17", "-O3", "-march=native", "-fPIC", "-pthread"]
FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
# Code that is no slower, in four fifths of the time; not every compiler knows them.
QUICKER = ["-fno-unswitch-loops", "-fno-split-loops"]
OWN_FLAGS = {
    "rounds.cpp": ["-O2"],  # little time is spent in these: compiled in two thirds of the time
    "writing.cpp": ["-O2"],
    "packing.cpp": ["-ffp-contract=off", "-O2", "-ftree-vectorize"],
}
MOST_SECONDS = 120  # of compiling
MOST_HEAD = 512  # numbers of a head, in fours
STRIP = 16  # outputs of a strip of float32
FLOATS = 32  # bits
IN_FLOATS = 0  # among the kinds of blocks that files number
log = logging.getLogger("forerun")
_compiling = threading.Lock()


class Compiled(NamedTuple):
    """The functions, if there are any here, and in words what was found."""

    functions: Any | None
    words: str


def library() -> Any | None:
    """The compiled functions, if there are any here."""
    return compiled().functions


def runs_floats(dtype: torch.dtype) -> bool:
    """Do matrices of floats run here, fast?"""
    functions = library() if dtype == torch.float32 else None
    return functions is not None and bool(functions.is_fast())


def compiled() -> Compiled:
    """What can be had here, with the folder that is named now."""
    return _compiled_in(cache_folder())


def _compiled_in(folder: Path | None) -> Compiled:
    with _compiling:  # whoever asks while it is compiled waits
        return compiled_in(folder)


def begin_compiling(dtype: torch.dtype | None, quantize: str | None) -> None:
    """Have it compiled while a checkpoint is read that may need it."""
    if dtype == torch.float32 or quantize:
        threading.Thread(target=_compile_ahead, args=(cache_folder(),), daemon=True).start()


def _compile_ahead(folder: Path | None) -> None:
    """Only that: a program that ends meanwhile stops this thread wherever it is, which torch, if it
    were called here, would not survive. What goes wrong is said to whoever needs it."""
    if folder is None or (file := _file_in(folder)).exists():
        return
    with _compiling, suppress(OSError, subprocess.SubprocessError):
        if not file.exists():
            _compile(file)


def _forget_who_compiles() -> None:
    """A process that is forked off has no thread that would let go of the lock."""
    global _compiling
    _compiling = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_who_compiles)


@cache
def compiled_in(folder: Path | None) -> Compiled:
    if folder is None:
        return Compiled(None, "not compiled: FORERUN_CACHE=off keeps nothing")
    file = _file_in(folder)
    try:
        if not file.exists():
            _compile(file)
        found = _typed(ctypes.CDLL(str(file)))
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        return Compiled(None, f"not compiled: {error}")
    if not _is_right(found):
        log.warning("products in C++ are not used: %s multiplies wrongly.", file)
        return Compiled(None, f"{file} multiplies wrongly")
    return Compiled(found, f"compiled, {file}")


def _file_in(folder: Path) -> Path:
    compiled_for = " ".join([*FLAGS, str(OWN_FLAGS), machine(), instruction_sets()])
    code = [source.read_bytes() for source in sorted(SOURCES.glob("*.[ch]*"))]
    key = hashlib.sha256(b"".join([*code, compiled_for.encode()])).hexdigest()
    return folder / "native" / f"{key[:16]}.so"


def _typed(found: Any) -> Any:
    found.forward.argtypes = [c_void_p, c_void_p, c_int64]
    found.forward.restype = None
    found.forward_memory.argtypes = [c_void_p, c_int64, c_int64, c_int64]
    found.forward_memory.restype = c_int64
    found.write_on.argtypes = [c_void_p, c_void_p, c_void_p, c_int64]
    found.write_on.restype = c_int64
    found.go_on.argtypes = [c_void_p, c_void_p, c_void_p]
    found.go_on.restype = c_int64
    found.look.argtypes = [c_void_p, c_void_p, c_void_p]
    found.look.restype = None
    found.look_memory.argtypes = [c_void_p, c_void_p, c_int64]
    found.look_memory.restype = c_int64
    found.product.argtypes = [c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p]
    found.product.restype = None
    found.pack.argtypes = [c_void_p, *[c_int64] * 6, c_void_p]
    found.pack.restype = None
    found.widen.argtypes = [c_void_p, *[c_int64] * 4, c_void_p]
    found.widen.restype = None
    found.packed_bytes.argtypes = [c_int64, c_int64]
    found.packed_bytes.restype = c_int64
    found.is_fast.restype = c_int64
    found.side.restype = c_int64
    return found


def _compile(file: Path) -> None:
    named = os.environ.get("CXX")
    compilers = [named] if named else COMPILERS
    compiler = next((found for name in compilers if (found := shutil.which(name))), None)
    if compiler is None:
        raise OSError(f"no C++ compiler ({', '.join(compilers)}) is found")
    file.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(file.parent)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder) / file.name
        for flags in ([*FLAGS, *QUICKER], FLAGS):
            complaint = _build([compiler, *flags], made)
            if not complaint:
                break
        if complaint:
            raise OSError(f"{compiler} does not compile it: {complaint[:200]}")
        made.replace(file)


def _build(compiler: list[str], made: Path) -> str:
    """Compile all files side by side, and link them. What the compiler complains of."""
    steps = [
        (source, made.with_name(f"{source.stem}.o")) for source in sorted(SOURCES.glob("*.cpp"))
    ]
    running = [
        subprocess.Popen(
            [*compiler, *OWN_FLAGS.get(source.name, []), "-c", source, "-o", to],
            stderr=subprocess.PIPE,
            text=True,
        )
        for source, to in steps
    ]
    try:
        said = [one.communicate(timeout=MOST_SECONDS)[1] for one in running]
    finally:
        for one in running:
            one.kill()
    if any(one.returncode for one in running):
        return "".join(said) or "no word"
    command = [*compiler, "-shared", *(str(to) for _, to in steps), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=MOST_SECONDS)
    return (done.stderr or "no word") if done.returncode else ""


def _remove_leftovers(folder: Path) -> None:
    """Remove what processes left that ended while they compiled."""
    for left in folder.glob("tmp*"):
        with suppress(OSError):  # its owner may just be done
            if time.time() - left.stat().st_mtime > MOST_SECONDS:
                shutil.rmtree(left)


def _is_right(functions: Any) -> bool:
    """Do products come out as they should, however it was compiled?"""
    made = torch.Generator().manual_seed(0)
    x_TI = torch.randn(11, 2 * GROUP, generator=made)
    weight_OI = torch.randn(9, 2 * GROUP, generator=made)
    kinds = [
        (_packed(weight_OI, bits, functions), weight_OI, bits, most)
        for bits, most in ((FLOATS, 1e-5), (8, 0.02), (4, 0.2))
    ]
    codes = quantised(weight_OI, NIBBLE, GROUP)
    kinds.append((_blocks(codes, None, 4, functions.side()), codes.widened(), 4, 0.02))
    for blocks, widened_OI, bits, most in kinds:
        product = NativeProduct(blocks, (9, 2 * GROUP), None, bits, functions)
        expected = x_TI @ widened_OI.t()
        near = most * float(expected.abs().max())
        for rows in range(
            1, len(x_TI) + 1
        ):  # as many as meet a block at once have code of their own
            if not torch.allclose(product(x_TI[:rows]), expected[:rows], rtol=0, atol=near):
                return False
    return True


class NativeProduct:
    """A matrix of 4 bits with a scale and an offset per group of 32, or of 8 bits with a scale,
    times rows whose groups become 8-bit numbers; or a matrix of float32 times rows as they are."""

    def __init__(
        self,
        blocks: Tensor,
        shape: tuple[int, int],  # outputs, inputs
        bias: Tensor | None,
        bits: int,
        functions: Any,
    ):
        self.functions = functions  # blocks are as these take them
        self.outputs, inputs = shape
        self.layout = Layout(inputs)
        self.bits = bits
        self._blocks = blocks
        self._bias = None if bias is None else bias.float().contiguous()
        self.bytes = self._blocks.nbytes
        self.matrix = MatrixFields(
            self._blocks.data_ptr(), pointer(self._bias), self.outputs, inputs, bits
        )
        self._address = ctypes.addressof(self.matrix)

    def multiply(self, x_TI: Tensor) -> Tensor:
        x_TI = x_TI.contiguous()
        rows = len(x_TI)
        y_TO = x_TI.new_empty(rows, self.outputs)
        memory = torch.empty_like(x_TI)
        self.functions.product(
            self._address, x_TI.data_ptr(), rows, memory.data_ptr(), torch.get_num_threads(),
            y_TO.data_ptr(),
        )  # fmt: skip
        return y_TO

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self.multiply(x_TI.float())


def native_product(
    weight: Tensor | Blocks, bias: Tensor | None, bits: str | None
) -> NativeProduct | None:
    """A matrix in 4 or 8 bits, or as it is; None where nothing is compiled, or its groups do not
    fit."""
    outputs, inputs = weight.shape
    functions = library()
    if functions is None or inputs % GROUP:
        return None
    kept = FLOATS if bits is None else int(bits.removeprefix("int"))
    blocks = _packed(weight, kept, functions)
    return NativeProduct(blocks, (outputs, inputs), bias, kept, functions)


def _packed(weight: Tensor | Blocks, bits: int, functions: Any) -> Tensor:
    """Strips or blocks of a matrix, in the nearest numbers of so many bits."""
    outputs, inputs = weight.shape
    rows = weight.float() if isinstance(weight, Tensor) else weight.rows_OB
    rows = rows.contiguous()
    kind = IN_FLOATS if isinstance(weight, Tensor) else in_blocks.KINDS[weight.kind].number
    side = STRIP if bits == FLOATS else functions.side()
    count = -(-outputs // side)
    made = torch.empty(count, functions.packed_bytes(inputs, bits), dtype=torch.uint8)

    def pack(first: int, end: int) -> None:
        functions.pack(rows.data_ptr(), kind, outputs, inputs, bits, first, end, made.data_ptr())

    _in_parts(pack, count, side * inputs)
    return made


def widened(weight: Blocks) -> Tensor:
    """The values of a matrix; by torch, where nothing is compiled."""
    functions = library()
    if functions is None:
        return weight.widened()
    outputs, inputs = weight.shape
    rows = weight.rows_OB.contiguous()
    kind = in_blocks.KINDS[weight.kind].number
    made = torch.empty(outputs, inputs)

    def widen(first: int, end: int) -> None:
        functions.widen(rows.data_ptr(), kind, inputs, first, end, made.data_ptr())

    _in_parts(widen, outputs, inputs)
    return made


def _in_parts(work: Callable[[int, int], None], count: int, weights: int) -> None:
    """Do it from a first to an end, by several threads, of things with so many weights each."""
    step = max(1, WEIGHTS_AT_ONCE // weights)
    firsts = range(0, count, step)
    ends = [min(first + step, count) for first in firsts]
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list(threads.map(work, firsts, ends))


def native_product_of(matrix: Quantised, bias: Tensor | None) -> NativeProduct | None:
    """A 4-bit matrix with the codes that it has."""
    functions = library()
    if functions is None or matrix.bits != "int4" or matrix.group % GROUP:
        return None
    codes, offsets_OG = matrix.in_groups(GROUP)
    outputs, inputs = codes.codes_OI.shape
    blocks = _blocks(codes, offsets_OG, 4, functions.side())
    return NativeProduct(blocks, (outputs, inputs), bias, 4, functions)


def _blocks(codes: Codes, offsets_OG: Tensor | None, bits: int, side: int) -> Tensor:
    """Blocks of `side` outputs by 32 inputs, as `packing.cpp` makes them, but of codes: those come
    first, four inputs of each output at a time; then scales, and in 4 bits offsets, as bfloat16."""
    outputs, inputs = codes.codes_OI.shape
    more = -outputs % side
    codes_OI = F.pad(codes.codes_OI, (0, 0, 0, more))
    scales_OG = F.pad(codes.scales_OG, (0, 0, 0, more))
    groups = inputs // GROUP
    # [block of outputs, group, four inputs, output, input]
    order = codes_OI.view(-1, side, groups, GROUP // 4, 4).permute(0, 2, 3, 1, 4)
    parts = [order.reshape(-1, groups, side * GROUP)]
    numbers = [scales_OG]
    if bits == 4:
        above = (parts[0] + 8).to(torch.uint8)
        low, high = above.split(side * GROUP // 2, -1)
        parts = [low | (high << 4)]
        shift_OG = -8 * scales_OG  # codes are kept as 0 to 15
        if offsets_OG is not None:
            shift_OG = shift_OG + F.pad(offsets_OG, (0, 0, 0, more))
        numbers.append(shift_OG)
    for number_OG in numbers:
        halves = number_OG.bfloat16().view(-1, side, groups).transpose(1, 2).contiguous()
        parts.append(halves.view(torch.uint8).view(-1, groups, 2 * side))
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1).contiguous()


class NativeLayer(NamedTuple):
    """The weights of one layer."""

    norm_attn: Tensor
    qkv: NativeProduct
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: NativeProduct
    norm_mlp: Tensor
    gate_up: NativeProduct
    down: NativeProduct


class NativeShape(NamedTuple):
    """The sizes of a decoder."""

    heads: int
    key_heads: int
    head_dim: int
    eps: float

    @property
    def fits(self) -> bool:
        return self.head_dim % 4 == 0 and self.head_dim <= MOST_HEAD


class _Addresses(NamedTuple):
    """Where the integers of a forward's rows lie."""

    tokens: int
    positions: int
    slots: int
    lanes: int
    horizon: int
    lo: int
    hi: int
    reads: int


class _Scratch(threading.local):
    """What forwards of one thread are laid out in. Engines that share a model's weights run it at
    the same time, each in a thread of its own."""

    def __init__(self) -> None:
        self.memory = torch.empty(0)
        self.logits = torch.empty(0)
        self._longs = np.empty(0, np.int64)
        self._spans = np.empty(0, np.int32)
        self._at = (0, 0)
        self.places: tuple[tuple[Slots, int, PageTable], Any, Any, int] | None = None

    def lay_out(self, batch: Batch | BlockRows) -> _Addresses:
        """The integers of a batch's rows."""
        rows = len(batch.slots)
        self._make_room(rows, len(batch.reads))
        numbers_4T = self._longs[: 4 * rows].reshape(4, rows)
        numbers_4T[:2] = batch.rows_5T[: POSITION + 1]
        if batch.drawn_T is not None:
            numbers_4T[0, : len(batch.drawn_T)] = batch.drawn_T
        numbers_4T[2] = batch.slots
        numbers_4T[3] = batch.lanes
        self._longs[4 * rows : 4 * rows + len(batch.reads)] = batch.reads
        self._spans[: 3 * rows].reshape(3, rows)[:] = batch.rows_5T[HORIZON : HI + 1]
        longs, spans = self._at
        tokens, positions, slots, lanes, reads = range(longs, longs + 40 * rows, 8 * rows)
        horizon, lo, hi = range(spans, spans + 12 * rows, 4 * rows)
        return _Addresses(tokens, positions, slots, lanes, horizon, lo, hi, reads)

    def _make_room(self, rows: int, reads: int) -> None:
        if len(self._longs) >= 4 * rows + reads and len(self._spans) >= 3 * rows:
            return
        self._longs = np.empty(2 * (4 * rows + reads), np.int64)
        self._spans = np.empty(6 * rows, np.int32)
        self._at = self._longs.ctypes.data, self._spans.ctypes.data


class NativeForward:
    """A whole forward in one call. Heads have their two halves interleaved, and values lie behind
    keys."""

    def __init__(
        self,
        layers: Sequence[NativeLayer],
        ends: tuple[Tensor, Tensor, NativeProduct],  # embedding, last norm, last matrix
        turns_CD: Tensor,  # complex
        shape: NativeShape,
    ):
        embed, norm, head = ends
        self.functions = head.functions
        self.vocab = head.outputs
        # what the structures point to
        self._alive = (layers, ends, turns := torch.view_as_real(turns_CD).contiguous())
        stack = (LayerFields * len(layers))(*map(_layer, layers))
        inner = layers[0].down.layout.inputs
        self._model = ModelFields(
            len(layers), shape.heads, shape.key_heads, shape.head_dim, embed.shape[1], inner,
            shape.eps, stack, embed.data_ptr(), turns.data_ptr(), norm.data_ptr(), head.matrix,
        )  # fmt: skip
        self.address = ctypes.addressof(self._model)
        self._scratch = _Scratch()

    def __call__(self, batch: Batch | BlockRows, slots: Slots) -> Tensor:
        logits_RV = torch.empty(len(batch.reads), self.vocab)
        seen = batch.longest
        rows = self._rows(batch, slots, seen, self._scratch.lay_out(batch), logits_RV)
        self.functions.forward(self.address, byref(rows), seen)
        return logits_RV

    def write_on(self, batch: Batch, slots: Slots, asked: LikeliestText) -> WrittenText:
        """Write on after rows of plain text, one of each."""
        count = len(batch.slots)
        steps = max(asked.wanted)
        logits_kBV = torch.empty(steps if asked.keeps_logits else 1, count, self.vocab)
        logits_kBV[0] = asked.first_BV
        seen = batch.longest + steps
        at = self._scratch.lay_out(batch)
        rows = self._rows(batch, slots, seen, at, logits_kBV)
        ends = [token for some in asked.ends for token in some]
        until = accumulate(map(len, asked.ends))
        given = np.array([*asked.wanted, *until, *ends, *asked.impossible], np.int64)
        drawn = np.empty((steps, count), np.int64)
        wanted_at = given.ctypes.data
        until_at = wanted_at + 8 * count
        ends_at = until_at + 8 * count
        texts = TextsFields(
            steps, self.vocab, asked.keeps_logits, at.tokens, at.positions, at.slots, at.horizon,
            wanted_at, ends_at, until_at, ends_at + 8 * len(ends), len(asked.impossible),
            drawn.ctypes.data, logits_kBV.data_ptr(),
            0 if asked.stop is None else asked.stop.address,
        )  # fmt: skip
        written = self.functions.write_on(self.address, byref(rows), byref(texts), seen)
        return WrittenText(drawn[:written], logits_kBV[:written])

    def _rows(
        self, batch: Batch | BlockRows, slots: Slots, seen: int, at: _Addresses, logits: Tensor
    ) -> RowsFields:
        """What a forward is given, with memory for what is in between."""
        threads = torch.get_num_threads()
        rows = len(batch.slots)
        reads = len(batch.reads)
        memory = self._memory(max(rows, reads), seen, threads)
        table = batch.table
        kept, features, pages = self._places_in(slots, table)
        return RowsFields(
            rows, reads, threads, *at, pages, table.size, table.per_lane, kept, features,
            memory, logits.data_ptr(),
        )  # fmt: skip

    def _memory(self, rows: int, seen: int, threads: int) -> int:
        """Where there is room for what is in between."""
        scratch = self._scratch
        needed = self.functions.forward_memory(self.address, rows, seen, threads)
        if needed > len(scratch.memory):
            scratch.memory = torch.empty(needed)
        return scratch.memory.data_ptr()

    def go_on(self, target: Runner, drafter: Runner | None, asked: RoundsAsked) -> RoundsMade:
        """Let texts go on by rounds of this model, with drafts of another one if there is one."""
        return go_on(self.functions, self.vocab, target, drafter, asked)

    def runner(
        self, slots: Slots, seen: int, threads: Sequence[int], impossible: Sequence[int]
    ) -> Runner:
        """This model as it takes part in rounds: with forwards that look at so many slots, on so
        many `threads` by rows, all of which may be read."""
        most = len(threads) - 1
        scratch = self._scratch
        if most * self.vocab > len(scratch.logits):
            scratch.logits = torch.empty(most * self.vocab)
        memory = self._memory(most, seen, max(threads))
        kept, features, pages = self._places_in(slots, slots.table)
        at = _Addresses(*[0] * len(_Addresses._fields))
        rows = RowsFields(
            0, 0, 0, *at, pages, slots.table.size, slots.table.per_lane, kept, features,
            memory, scratch.logits.data_ptr(),
        )  # fmt: skip
        alive = scratch.memory, scratch.logits, scratch.places
        return Runner(self.address, rows, seen, threads, impossible, alive)

    def kept_in(self, slots: Slots) -> int:
        """Where it is written where each layer keeps keys and values."""
        return self._places_in(slots, slots.table)[0]

    def _places_in(self, slots: Slots, table: PageTable) -> tuple[int, int, int]:
        """Where it is written where each layer keeps keys and values, and features if it does; and
        where pages begin."""
        key = slots, len(slots.features), table
        places = self._scratch.places
        if places is None or places[0] != key:
            layers = range(self._model.layers)
            kept = [slots.flat(index)[0].data_ptr() for index in layers]
            features = [pointer(slots.features.get(index)) for index in layers]
            array = c_void_p * len(kept)
            pages = table.starts_LP.ctypes.data
            places = key, array(*kept), array(*features), pages
            self._scratch.places = places
        return ctypes.addressof(places[1]), ctypes.addressof(places[2]), places[3]


def _layer(layer: NativeLayer) -> LayerFields:
    return LayerFields(
        layer.norm_attn.data_ptr(), layer.qkv.matrix, pointer(layer.q_norm),
        pointer(layer.k_norm), layer.out.matrix, layer.norm_mlp.data_ptr(),
        layer.gate_up.matrix, layer.down.matrix,
    )  # fmt: skip
