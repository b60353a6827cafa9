"""Every kernel of a layer alone, beside its floor. The numbers in forerun/backbones/kernels were
chosen by this.

    python bench/gpu_kernels.py [--shape qwen2.5-7b] [--tune SHAPE ...]      (needs a CUDA device)

Each kernel is launched many times in one graph, over so many copies of its data that the cache
cannot serve it. `--tune` tries other tilings of the products; compiling them takes minutes, on all
cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forerun.backbones.kernels import matmul
from forerun.backbones.kernels.attention import attention
from forerun.backbones.kernels.elementwise import RMSNorm, Rotary, norm, rotate_and_keep, swiglu
from forerun.backbones.kernels.launch import launch_options
from forerun.backbones.kernels.matmul import ProductTiling
from forerun.backbones.kernels.packed import PLAIN
from forerun.engine.cache import Slots, SlotShape
from forerun.engine.graphs import attention_programs
from forerun.engine.pack import AT_ONCE, SLOTS, Batch, Tiles, make_tiles
from forerun.profile.forward import bandwidth
from forerun.profile.shapes import SHAPES
from forerun.sequence.rows import Plan, causal_rows

CUDA = torch.device("cuda")
LONG = 8192  # slots of the one long text among short ones
COPIES = 1 << 28  # bytes that the copies of one operand take together: several times the cache
ROWS = (1, 16, 32, 64, 128, 512)
TILE_HEIGHTS = (16, 32, 64, 128)
BITS_ROWS = (64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 640, 1000, 1024)
SHARED = 220_000  # bytes of shared memory that a program may use


def tilings(rows: int, gated: bool) -> list[ProductTiling]:
    """What may be worth trying for so many rows."""
    heights = [height for height in TILE_HEIGHTS if height >= min(rows, 128)][:1]
    outputs_inputs = ((32, 64, 128), (128, 256))
    if rows > 64:  # several low tiles, too
        heights = [64, 128]
        outputs_inputs = ((64, 128, 256), (64, 128))
    found = []
    for height, outputs, inputs, stages, transposed, warps in itertools.product(
        heights, *outputs_inputs, (3, 4, 5), (False, True), (4, 8)
    ):
        matrix = outputs * inputs * 2 * (1 + gated)
        numbers = height * outputs * (1 + gated)  # that are added up, in registers
        if (
            (matrix + height * inputs * 2) * stages <= SHARED
            and 16384 <= matrix * (stages - 1) <= 131072
            and (outputs >= 64 or not transposed)
            and numbers <= 16384 * warps // 4
            and (warps == 4 or height >= 64)
        ):
            found.append(ProductTiling(height, outputs, inputs, stages, transposed, warps))
    return found


def microseconds(run: Callable[[int], object], turns: int = 5) -> float:
    """Of one call: twenty in a graph, eight replays at a time, the median of some such times. The
    argument says which copy of the data to take."""
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(20):
            run(i)
    seconds = []
    for _ in range(turns + 1):  # the first one warms up
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(8):
            graph.replay()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end))
    return 1e3 * statistics.median(seconds[1:]) / 160


class DecoderSizes:
    """The sizes of a decoder, and its matrices."""

    def __init__(self, name: str):
        shape = SHAPES[name]
        self.hidden = shape.hidden
        self.inner = shape.inner
        self.heads = shape.heads
        self.groups = shape.key_heads
        self.dim = shape.head_dim or self.hidden // self.heads
        self.vocab = shape.vocab
        heads = self.heads * self.dim
        self.matrices = {  # outputs, inputs, and what else the product does
            "qkv": (heads + 2 * self.groups * self.dim, self.hidden, dict(normed=True)),
            "out": (self.hidden, heads, dict(onto=True)),
            "gate_up": (2 * self.inner, self.hidden, dict(normed=True, gated=True)),
            "down": (self.hidden, self.inner, dict(onto=True)),
            "head": (self.vocab, self.hidden, dict(normed=True)),
        }


class Product:
    """One matrix product of a layer, with copies of its matrix."""

    def __init__(self, outputs: int, inputs: int, also: dict[str, bool]):
        copies = max(1, COPIES // (outputs * inputs * 2))
        self.weights = [
            torch.randn(outputs, inputs, device=CUDA, dtype=torch.bfloat16) for _ in range(copies)
        ]
        self.norm = RMSNorm(torch.ones(inputs, device=CUDA, dtype=torch.bfloat16), 1e-6)
        self.outputs = outputs
        self.inputs = inputs
        self.also = also

    def arguments(self, rows: int) -> tuple[torch.Tensor, dict]:
        x = torch.randn(rows, self.inputs, device=CUDA, dtype=torch.bfloat16)
        onto = (
            torch.zeros(rows, self.outputs, device=CUDA, dtype=torch.bfloat16)
            if self.also.get("onto")
            else None
        )
        return x, dict(
            normed=self.norm if self.also.get("normed") else None,
            gated=self.also.get("gated", False),
            onto=onto,
        )

    def fixed(self, rows: int, tiling: ProductTiling) -> float:
        """By our kernel, which gates and adds too, but does not norm."""
        x, options = self.arguments(rows)
        options.pop("normed")
        return microseconds(
            lambda i: matmul.fixed_product(
                x, self.weights[i % len(self.weights)], tiling, **options
            )
        )

    def has_other_bits(self, tiling: ProductTiling) -> bool:
        """Does a tiling give a row other bits than the first one of few rows does?"""
        torch.manual_seed(0)
        x = torch.randn(130, self.inputs, device=CUDA, dtype=torch.bfloat16)
        gated = self.also.get("gated", False)
        weight = self.weights[0]
        alone = matmul.fixed_product(x[:1], weight, tilings(1, gated)[0], gated=gated)
        among = matmul.fixed_product(x, weight, tiling, gated=gated)
        return not torch.equal(alone[0], among[0])

    def library_keeps_bits(self, rows: int) -> bool:
        x, options = self.arguments(rows)
        added = options["onto"] is not None
        return matmul.library_keeps_bits(x, self.weights[0].t(), None, options["gated"], added)

    def whole(self, rows: int, **how: bool) -> float:
        """With everything that belongs to it, as forwards do it."""
        x, options = self.arguments(rows)
        return microseconds(
            lambda i: matmul.product(x, self.weights[i % len(self.weights)].t(), **options, **how)
        )

    def by_library(self, rows: int) -> float:
        faster = matmul.ours_is_faster_up_to
        matmul.ours_is_faster_up_to = lambda *matrix: 0
        try:
            return self.whole(rows)
        finally:
            matmul.ours_is_faster_up_to = faster

    def bare(self, rows: int) -> float:
        x, _ = self.arguments(rows)
        return microseconds(lambda i: x @ self.weights[i % len(self.weights)].t())


def compile_one(job: tuple[bool, bool, int, ProductTiling]) -> str | None:
    gated, added, parts, tiling = job
    x = torch.zeros(16, 256, device=CUDA, dtype=torch.bfloat16)
    sums = torch.zeros(16, device=CUDA)
    rows = 16 if tiling.rows == 16 else 17  # kernels of few rows begin early
    flags = dict(BIASED=False, GATED=gated, ADDED=added, TRANSPOSED=tiling.transposed)
    flags |= dict(BITS=PLAIN, GROUP=1)
    sizes = dict(PARTS=parts, BM=tiling.rows, BN=tiling.outputs, BK=tiling.inputs)
    options = dict(num_warps=tiling.warps, num_stages=tiling.stages, **launch_options(x, rows))
    extra = (sums, matmul.arrival_counts(CUDA)) if parts > 1 else (x, x)
    try:
        matmul._product.warmup(
            x, x, x, x, x, *extra, rows, 256, 256, 256, **flags, **sizes, **options, grid=(1, 1, 1)
        )
    except Exception as error:
        return str(error)
    return None


def tune(names: Sequence[str], rows: Sequence[int], speed: float, path: Path | None) -> None:
    """Try all tilings for the matrices of some shapes."""
    kinds = {
        (gated, bool(also.get("onto")), matmul.parts_of(outputs, inputs, gated)[0])
        for name in names
        for outputs, inputs, also in DecoderSizes(name).matrices.values()
        for gated in [bool(also.get("gated"))]
    }
    jobs = [
        (*kind, tiling)
        for kind in kinds
        for tiling in {tiling for count in rows for tiling in tilings(count, kind[0])}
    ]
    with ProcessPoolExecutor(14, multiprocessing.get_context("spawn")) as pool:
        failed = [error for error in pool.map(compile_one, jobs, chunksize=4) if error]
    print(f"{len(jobs)} compiled, {len(failed)} not {failed[:1]}", flush=True)
    found = []
    for name in names:
        shape = DecoderSizes(name)
        for matrix, sizes in shape.matrices.items():
            product = Product(*sizes)
            for count in rows:
                row = tune_one(product, count, speed)
                found.append(dict(shape=name, matrix=matrix, **row))
                best = ", ".join(f"{tiling} {times:.3f}" for tiling, times in row["best"][:2])
                print(
                    f"{name:14} {matrix:8} {count:3} rows, floor {row['floor']:.1f} us, library "
                    f"{row['library']:.3f}, other bits {row['other_bits']}: {best}",
                    flush=True,
                )
            del product
            torch.cuda.empty_cache()
    if path is not None:
        path.write_text(json.dumps(found))


def tune_one(product: Product, rows: int, speed: float) -> dict[str, Any]:
    """The best tilings of one product, as times of its floor."""
    floor = 2 * product.outputs * product.inputs / speed * 1e6
    taken = {}
    other_bits = 0
    for tiling in tilings(rows, product.also.get("gated", False)):
        try:
            other_bits += product.has_other_bits(tiling)
            taken[tiling] = product.fixed(rows, tiling) / floor
        except Exception as error:
            print(f"  {tiling}: {str(error)[:80]}")
    best = sorted(taken, key=taken.__getitem__)[:12]
    return dict(
        rows=rows,
        floor=floor,
        library=product.by_library(rows) / floor,
        other_bits=other_bits,
        best=[(astuple(tiling), taken[tiling]) for tiling in best],
    )


def products(shape: DecoderSizes, speed: float) -> None:
    print(
        f"{'matrix':8} {'rows':>4} {'floor us':>9} {'bare':>8} {'library':>8} {'fastest':>8} "
        f"{'fixed':>8}   (times the floor)"
    )
    for name, matrix in shape.matrices.items():
        product = Product(*matrix)
        floor = 2 * product.outputs * product.inputs / speed * 1e6
        for rows in (*ROWS, 160, 256):
            cells = [
                product.bare(rows),
                product.by_library(rows),
                product.whole(rows),
                product.whole(rows, fixed=True),
            ]
            print(
                f"{name:8} {rows:4} {floor:9.1f} "
                + " ".join(f"{taken / floor:8.3f}" for taken in cells),
                flush=True,
            )
        del product
        torch.cuda.empty_cache()


def library_bits(shape: DecoderSizes) -> None:
    """Which of the library's products have our bits, by number of rows."""
    for library in ("cublas", "cublaslt"):
        torch.backends.cuda.preferred_blas_library(library)
        for name, matrix in shape.matrices.items():
            product = Product(*matrix)
            kept = [rows for rows in BITS_ROWS if product.library_keeps_bits(rows)]
            print(f"{library:8} {name:8} has our bits at {kept} of {BITS_ROWS} rows", flush=True)
            del product
    torch.backends.cuda.preferred_blas_library("default")


def half(*size: int) -> torch.Tensor:
    return torch.randn(*size, device=CUDA, dtype=torch.bfloat16)


def between(shape: DecoderSizes, rows: int) -> dict[str, float]:
    """The kernels between the products, attention apart."""
    x = half(rows, shape.hidden)
    weight = half(shape.hidden)
    gate_up = half(rows, 2 * shape.inner)
    slots = Slots(SlotShape(1, 1, 2048, shape.groups, shape.dim), torch.bfloat16, CUDA)
    qkv = half(rows, (shape.heads + 2 * shape.groups) * shape.dim)
    table = half(2048, shape.dim)
    rotary = Rotary(table, table, 1e-6)
    plan = Plan(causal_rows(np.zeros(rows, np.int32)), [np.arange(rows)], rows)
    batch = Batch([(0, plan, 0)], 2048, CUDA)
    return dict(
        norm=microseconds(lambda i: norm(x, weight, 1e-6)),
        swiglu=microseconds(lambda i: swiglu(gate_up)),
        rotate=microseconds(lambda i: rotate_and_keep(0, qkv, rotary, batch, slots)),
    )


def time_attention(
    shape: DecoderSizes, lanes: int, held: int, rows: int, long_rows: int = 0
) -> tuple[Tiles[np.ndarray], dict[int, float]]:
    """How attention cuts some rows after `held` slots, and its time by the number of pieces. With
    `long_rows`, one lane has so many rows after LONG slots instead."""
    context = max(held + rows, LONG + long_rows if long_rows else 0)
    layers = max(2, COPIES // (lanes * context * shape.groups * shape.dim * 4))
    slot_shape = SlotShape(layers, lanes, context, shape.groups, shape.dim)
    slots = Slots(slot_shape, torch.bfloat16, CUDA)
    texts = [(held, rows)] * (lanes - bool(long_rows)) + [(LONG, long_rows)] * bool(long_rows)
    batch = Batch(
        [
            (lane, Plan(causal_rows(np.arange(n + m) % 9), [np.arange(n, n + m)], n + m), n)
            for lane, (n, m) in enumerate(texts)
        ],
        context,
        CUDA,
    )
    chosen = make_tiles(batch, shape.heads, shape.groups, attention_programs(CUDA))
    ready = chosen.to(CUDA)
    q = half(sum(m for _, m in texts), shape.heads, shape.dim)

    def taken(splits: int) -> float:
        by_section = chosen.by_section and splits == chosen.splits
        cut = replace(ready, splits=splits, by_section=by_section)
        return microseconds(lambda i: attention(i % layers, q, cut, slots, 0.1))

    counts = {1, chosen.splits, AT_ONCE * -(-context // (AT_ONCE * SLOTS))}
    return chosen, {splits: taken(splits) for splits in sorted(counts)}


def others(shape: DecoderSizes) -> None:
    print("\nkernels between the products, us")
    for rows in (1, 16, 64, 512):
        print(
            f"{rows:4} rows  "
            + "  ".join(f"{name} {taken:.2f}" for name, taken in between(shape, rows).items()),
            flush=True,
        )
    print("\nattention, us, by splits (* what is chosen)")
    for lanes, held, rows, long_rows in (
        (1, 1023, 1, 0),
        (1, 1023, 16, 0),
        (1, 1023, 64, 0),
        (1, 8191, 1, 0),
        (32, 1023, 1, 0),
        (32, 1023, 16, 0),
        (32, 511, 1, 1),
        (32, 511, 1, 64),
        (32, 511, 1, 512),
    ):
        chosen, taken = time_attention(shape, lanes, held, rows, long_rows)
        cells = "  ".join(f"{n}{'*' * (n == chosen.splits)} {us:.2f}" for n, us in taken.items())
        beside = f", one {long_rows} after {LONG}" if long_rows else ""
        what = f"{lanes:3} x {rows:3} rows after {held}{beside}, tiles of {chosen.height}"
        print(f"{what}: {cells}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen2.5-7b", choices=SHAPES)
    parser.add_argument(
        "--tune", nargs="*", metavar="SHAPE", help="try other tilings for the matrices of these"
    )
    parser.add_argument("--bits", action="store_true", help="only: which products keep our bits")
    parser.add_argument("--rows", nargs="*", type=int, default=ROWS, help="how many, for --tune")
    parser.add_argument("--json", type=Path, help="where to write what --tune finds")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
    with torch.inference_mode():
        speed = bandwidth(CUDA)
        print(f"{torch.cuda.get_device_name()}, a copy moves {speed / 1e12:.2f} TB/s")
        if arguments.tune is not None:
            tune(arguments.tune or [arguments.shape], arguments.rows, speed, arguments.json)
            return
        shape = DecoderSizes(arguments.shape)
        library_bits(shape)
        if arguments.bits:
            return
        products(shape, speed)
        others(shape)


if __name__ == "__main__":
    main()
