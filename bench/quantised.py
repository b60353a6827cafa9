"""Quantised weights on a GPU: tokens per second of `ar` beside bf16, as times of their own floors.

    python bench/quantised.py [--shape qwen2.5-7b] [--quantize fp8 int8 int4] [--json FILE]
    python bench/quantised.py --check         (bits of packed products; exit status 1 if any differ)
    python bench/quantised.py --tune          (tilings of packed products at --rows rows)
    python bench/quantised.py --publish FILE  (writes docs/models.md's table; needs no GPU)

Weights are random: only time is measured. What quantising does to texts, `bench/perplexity.py`
measures.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from page import DOCS, write_part

import forerun
from forerun.profile.forward import ForwardSize, bandwidth, ceilings, timed_forward
from forerun.profile.latency import verdict_batch
from forerun.profile.shapes import SHAPES, random_network

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = ("int4", "int8", "fp8")
CHECKED = ((1152, 896, False), (1000, 4864, False), (2048, 896, True))
CHECKED_ROWS = (1, 5, 17, 40, 300)
CONTEXT = 1024
# parts into which matrices are cut, to try
CUTS = {"qkv": (2, 4, 7), "out": (4, 7), "gate_up": (1, 2), "down": (4, 7, 10), "head": (1,)}
COPIES = 1 << 28  # bytes that the copies of one matrix take together: several times the cache
START = "<!-- quantised -->"
END = "<!-- end of quantised -->"


def per_token(
    model: forerun.Model, batch: int, context: int, few: int = 8, many: int = 136
) -> float:
    """Seconds per step of `ar`, reading the prompts not counted: long outputs against short."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(10, model.vocab - 10, context).tolist() for _ in range(batch)]

    def taken(count: int) -> float:
        start = time.perf_counter()
        model.generate(prompts, method="ar", max_tokens=count, ignore_eos=True)
        return time.perf_counter() - start

    for count in (many, few, many):
        taken(count)
    return statistics.median((taken(many) - taken(few)) / (many - few) for _ in range(3))


@torch.inference_mode()
def measure(flags: argparse.Namespace) -> list[dict[str, Any]]:
    device = torch.device(flags.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows: list[dict[str, Any]] = []
    best = None
    for quantize in (None, *flags.quantize):
        network = random_network(flags.shape, device, dtype)
        start = time.perf_counter()
        model = forerun.from_network(
            network,
            None,
            name=flags.shape,
            lanes=flags.batch,
            max_context=flags.context + 512,
            quantize=quantize,
        )
        seconds = time.perf_counter() - start
        del network
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        best = best or ceilings(model.backbone)
        size = ForwardSize(flags.batch, flags.context, 1)
        batch = verdict_batch(model, *size)
        timed = timed_forward(model, batch, size, best, turns=7)
        model.host.forget()
        step = per_token(model, flags.batch, flags.context)
        backbone: Any = model.backbone
        rows.append(
            {
                "weights": quantize or str(dtype).removeprefix("torch."),
                "GB": backbone.weight_bytes / 1e9,
                "tokens/s": flags.batch / step,
                "forward ms": 1e3 * timed.seconds,
                "floor ms": 1e3 * timed.floor,
                "times floor": timed.times,
                "step times floor": step / timed.floor,
                "seconds to quantise": seconds,
            }
        )
        print(rows[-1], flush=True)
        model.close()
        del model, backbone, batch
        gc.collect()
    return rows


def table(report: dict[str, Any]) -> str:
    names = ("weights", "GB", "tokens/s", "times bf16", "forward, ms", "times its floor")
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    plain = report["rows"][0]["tokens/s"]
    for row in report["rows"]:
        cells = [
            row["weights"],
            f"{row['GB']:.2f}",
            f"{row['tokens/s']:.1f}",
            f"{row['tokens/s'] / plain:.2f}",
            f"{row['forward ms']:.2f}",
            f"{row['times floor']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    made = (
        f"`python bench/quantised.py --shape {report['shape']} --batch {report['batch']}` on one "
        f"{report['device']}, torch {report['torch']}, {report['date']}: `ar` after "
        f"{report['context']} tokens, random weights. A floor is the time in which its bytes are "
        "copied."
    )
    return "\n".join([*lines, "", made])


# Checks of bits


def random_packed(
    kind: str, outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Any, torch.Tensor]:
    """A packed matrix, and the plain one that it stands for, by arithmetic of its own."""
    from forerun.backbones.kernels import packed

    bits, _, group = kind.partition(" ")
    size = int(group or inputs)
    scales = torch.rand(outputs, inputs // size, device=DEVICE).mul(0.01).bfloat16()
    less: Any = 0
    if bits == "fp8":
        codes = torch.randn(outputs, inputs, device=DEVICE).mul(40).to(packed.FP8)
        made = packed.packed_8(codes, scales, dtype)
    elif bits == "int8":
        codes = torch.randint(-127, 128, (outputs, inputs), device=DEVICE).to(torch.int8)
        made = packed.packed_8(codes, scales, dtype)
    else:
        codes = torch.randint(-8, 8, (outputs, inputs), device=DEVICE).to(torch.int8)
        zeros = torch.randint(-8, 8, scales.shape, device=DEVICE) if bits == "zeros" else None
        made = packed.packed_4(codes, scales, dtype, zeros)
        less = 0 if zeros is None else zeros.repeat_interleave(size, 1)
    plain = (codes.float() - less) * scales.float().repeat_interleave(size, 1)
    return made, plain.to(dtype)


@contextmanager
def cut_into(parts: int | None) -> Iterator[None]:
    """Have matrices, packed and plain, cut into so many parts."""
    from forerun.backbones.kernels import matmul

    own = matmul.parts_of

    def parts_of(outputs: int, inputs: int, gated: bool, packed: bool = True) -> tuple[int, int]:
        if parts is None:
            return own(outputs, inputs, gated, True)
        part = -(-inputs // (parts * 256)) * 256
        return -(-inputs // part), part

    matmul.parts_of = parts_of
    try:
        yield
    finally:
        matmul.parts_of = own


@torch.inference_mode()
def check_one(job: tuple[torch.dtype, str]) -> list[str]:
    """What packed products of one kind give that plain ones do not."""
    from forerun.backbones.kernels import matmul

    dtype, kind = job
    found_wrong = []
    for outputs, inputs, gated in CHECKED:
        made, plain = random_packed(kind, outputs, inputs, dtype)
        same = {"widened": torch.equal(made.widened(), plain)}
        x = torch.randn(CHECKED_ROWS[-1], inputs, device=DEVICE).to(dtype)
        with cut_into(None):
            alone = matmul.product(x[:1], made, gated=gated, fixed=True)
            for rows in CHECKED_ROWS:
                found = matmul.product(x[:rows], made, gated=gated, fixed=True)
                kind_of = matmul.product_kind(outputs, gated)
                tiling = matmul.tiling_for(kind_of, rows, dtype, plain.numel())
                wanted = matmul.fixed_product(x[:rows], plain, tiling, gated=gated)
                same[f"{rows} rows"] = torch.equal(found, wanted)
                same[f"first of {rows}"] = torch.equal(found[:1], alone)
        bad = [name for name, equal in same.items() if not equal]
        if bad:
            found_wrong.append(f"{outputs}x{inputs}{' gated' * gated}: {', '.join(bad)}")
    return found_wrong


def check() -> int:
    """Do packed products have the bits of plain ones, and a row its own in any company?"""
    kinds = ("int4 32", "zeros 128", "int4 128", "int8", "int8 32", "fp8", "fp8 128")
    jobs = [(torch.bfloat16, kind) for kind in kinds]
    jobs += [(torch.float16, kind) for kind in ("int4 32", "zeros 128", "int8", "fp8")]
    with ProcessPoolExecutor(len(jobs), multiprocessing.get_context("spawn")) as pool:
        wrong = dict(zip(jobs, pool.map(check_one, jobs)))
    for (dtype, kind), lines in wrong.items():
        print(dtype, kind, f"OTHER BITS {lines}" if lines else "ok")
    return int(any(wrong.values()))


# Tilings


def tilings(rows: int) -> list[Any]:
    """To try, for so many rows."""
    from forerun.backbones.kernels.few_rows import MOST_ROWS, FewRowsTiling
    from forerun.backbones.kernels.matmul import ProductTiling

    if rows <= MOST_ROWS:
        shapes = [(1, 128, 1), (1, 128, 2), (1, 128, 4), (1, 128, 8), (1, 256, 2), (1, 256, 4)]
        shapes += [(2, 128, 1), (2, 128, 2), (2, 128, 4), (2, 128, 8), (1, 128, 4, 96)]
        return [FewRowsTiling(8 if rows <= 8 else 16, *shape) for shape in shapes]
    height = 32 if rows <= 32 else 64
    found = [
        ProductTiling(height, 64, inputs, stages, True, 4)
        for inputs, stages in itertools.product((128, 256), (3, 4, 5, 6))
    ]
    found += [ProductTiling(height, 128, 128, stages, True, w) for stages in (3, 4) for w in (4, 8)]
    return [
        *found,
        ProductTiling(height, 128, 256, 3, True, 8),
        ProductTiling(height, 64, 64, 6, True),
    ]


def compile_one(job: tuple[str, bool, int, Any]) -> str | None:
    from forerun.backbones.kernels import matmul

    kind, gated, parts, tiling = job
    with torch.inference_mode(), cut_into(parts):
        made, _ = random_packed(kind, 1024 if gated else 512, 512 * parts)
        x = torch.zeros(1, made.shape[0], device=DEVICE, dtype=torch.bfloat16)
        onto = None if gated else torch.zeros(1, 512, device=DEVICE, dtype=torch.bfloat16)
        try:
            matmul.fixed_product(x, made, tiling, gated=gated, onto=onto)
            torch.cuda.synchronize()
        except Exception as error:
            return f"{job}: {str(error)[:200]}"
    return None


def microseconds(run: Callable[[int], object]) -> float:
    """Of one call: twenty in a graph, eight replays at a time. The argument says which copy of the
    data to take."""
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(20):
            run(i)
    seconds = []
    for _ in range(4):  # the first one warms up
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(8):
            graph.replay()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end))
    return 1e3 * statistics.median(seconds[1:]) / 160


def matrices_of(name: str) -> dict[str, tuple[int, int, bool]]:
    """Outputs, inputs, and whether it is gated."""
    shape = SHAPES[name]
    dim = shape.head_dim or shape.hidden // shape.heads
    return {
        "qkv": ((shape.heads + 2 * shape.key_heads) * dim, shape.hidden, False),
        "out": (shape.hidden, shape.heads * dim, False),
        "gate_up": (2 * shape.inner, shape.hidden, True),
        "down": (shape.hidden, shape.inner, False),
        "head": (shape.vocab, shape.hidden, False),
    }


@torch.inference_mode()
def tune(flags: argparse.Namespace) -> list[dict[str, Any]]:
    """The best tilings and numbers of parts of each matrix, at a few rows."""
    speed = bandwidth(torch.device("cuda"))
    jobs = {
        (coded(quantize, name), gated, parts, tiling)
        for quantize in flags.quantize
        for name, (_, _, gated) in matrices_of(flags.shape).items()
        for parts in CUTS[name]
        for tiling in tilings(flags.rows)
    }
    start = time.perf_counter()
    with ProcessPoolExecutor(14, multiprocessing.get_context("spawn")) as pool:
        failed = [error for error in pool.map(compile_one, jobs, chunksize=4) if error]
    print(f"{len(jobs)} compiled in {time.perf_counter() - start:.0f} s, {len(failed)} not")
    print(*failed[:2], sep="\n", flush=True)
    found = []
    all_taken: dict[tuple[str, str], dict[tuple[int, Any], float]] = {}
    for quantize, name in itertools.product(flags.quantize, matrices_of(flags.shape)):
        kind, sizes = coded(quantize, name), matrices_of(flags.shape)[name]
        floor, taken = tune_one(kind, sizes, flags.rows, CUTS[name], speed)
        ranked = sorted(taken, key=taken.__getitem__)[:6]
        best = [(parts, astuple(tiling), taken[parts, tiling]) for parts, tiling in ranked]
        found.append({"quantize": quantize, "matrix": name, "floor us": floor, "best": best})
        print(f"{quantize} {name}: floor {floor:.1f} us; parts, tiling, times the floor:")
        for parts, tiling, times in best:
            print(f"    {parts} {tiling} {times:.2f}", flush=True)
        torch.cuda.empty_cache()
        all_taken[quantize, name] = {key: floor * times for key, times in taken.items()}
    for quantize in flags.quantize:
        print(quantize, "best tilings, as FEW_ROWS_TILINGS or PACKED_TILINGS has them:")
        by_kind = [("gated", ["gate_up"]), ("plain", ["qkv", "out", "down"]), ("wide", ["head"])]
        for kind, names in by_kind:
            best, parts, whole = best_together([all_taken[quantize, name] for name in names])
            print(f"    {kind!r}: {best},  # parts {dict(zip(names, parts))}, {whole:.1f} us")
    return found


def coded(quantize: str, name: str) -> str:
    """How a matrix of a quantised model is packed: a kind of `random_packed`."""
    kind = "int8" if name == "head" and quantize == "int4" else quantize
    return "int4 32" if kind == "int4" else kind


def best_together(taken: list[dict[tuple[int, Any], float]]) -> tuple[Any, list[int], float]:
    """The tiling that serves several matrices best, each in the parts that suit it: those parts,
    and how many microseconds all take."""
    choices = []
    for tiling in {tiling for _, tiling in taken[0]}:
        parts = []
        for of_one in taken:
            own = {cut: of_one[cut, used] for cut, used in of_one if used == tiling}
            parts.append(min((us, cut) for cut, us in own.items()) if own else (1e9, 0))
        choices.append((sum(us for us, _ in parts), [cut for _, cut in parts], tiling))
    whole, cuts, tiling = min(choices, key=lambda choice: choice[0])
    return tiling, cuts, whole


def tune_one(
    kind: str, sizes: tuple[int, int, bool], rows: int, cuts: Sequence[int], speed: float
) -> tuple[float, dict[tuple[int, Any], float]]:
    """The floor of a product in microseconds, and what ways of cutting it take, as times of it."""
    from forerun.backbones.kernels import matmul

    outputs, inputs, gated = sizes
    made = random_packed(kind, outputs, inputs)[0]
    count = max(1, COPIES // made.nbytes)
    copies = [made, *(random_packed(kind, outputs, inputs)[0] for _ in range(count - 1))]
    x = torch.randn(rows, inputs, device=DEVICE, dtype=torch.bfloat16)
    onto = None if gated else x.new_zeros(rows, outputs)
    floor = made.nbytes / speed * 1e6
    taken = {}

    def run(tiling: Any, i: int) -> torch.Tensor:
        return matmul.fixed_product(x, copies[i % count], tiling, gated=gated, onto=onto)

    for parts, tiling in itertools.product(cuts, tilings(rows)):
        with cut_into(parts):
            try:
                taken[parts, tiling] = microseconds(partial(run, tiling)) / floor
            except Exception as error:
                print(f"  {tiling}: {str(error)[:80]}")
    return floor, taken


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen2.5-7b", choices=SHAPES)
    parser.add_argument("--quantize", nargs="*", default=["fp8", "int8", "int4"], choices=KINDS)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=1, help="for --tune")
    parser.add_argument("--check", action="store_true", help="only: bits of packed products")
    parser.add_argument("--tune", action="store_true", help="only: try tilings")
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    parser.add_argument("--publish", type=Path, help="write docs/models.md by this file")
    flags = parser.parse_args()
    if flags.publish:
        report = json.loads(flags.publish.read_text())
        (DOCS / "quantised.json").write_text(json.dumps(report, indent=1))
        return write_part(DOCS / "models.md", table(report), START, END)
    if flags.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --publish FILE needs none")
    if flags.check:
        sys.exit(check())
    report = {"shape": flags.shape, "batch": flags.batch, "context": flags.context}
    report |= {"date": date.today().isoformat(), "torch": torch.__version__}
    report["device"] = torch.cuda.get_device_name() if flags.device == "cuda" else flags.device
    if flags.tune:
        report["tuned"] = tune(flags)
    else:
        report["rows"] = measure(flags)
        print(table(report))
    if flags.json:
        flags.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
