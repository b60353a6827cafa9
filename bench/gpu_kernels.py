"""What the numbers in forerun/backbones/kernels.py are to be chosen by: every kernel of a layer alone, beside its floor.

    python bench/gpu_kernels.py [--shape qwen2.5-7b] [--tune]      (needs a CUDA device)

Each is launched many times in one graph, over as many copies of its data as it takes not to be served from the cache. `--tune`
tries other block shapes of the products for few rows; compiling them takes minutes, on all cores.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from forerun import accept
from forerun.backbones import kernels
from forerun.backbones.kernels import Blocks
from forerun.engine.cache import Slots
from forerun.engine.graphs import programs_for
from forerun.engine.pack import SHARES, Batch, Tiles, tiled
from forerun.evaluate.bench import SHAPES, bandwidth
from forerun.noise import Noise
from forerun.parameters import Sampling
from forerun.rows import Plan, causal_rows
from forerun.sampling import Chain, History, laws

CUDA = torch.device("cuda")
COPIES = 1 << 28  # bytes that the copies of one operand take together: several times the cache
ROWS = (1, 16, 32, 64)
BLOCKS = [
    Blocks(outputs, inputs, stages, turned)
    for outputs, inputs, stages, turned in itertools.product((16, 32, 64, 128), (64, 128, 256), (3, 4, 5), (False, True))
    if 24576 <= outputs * inputs * (stages - 1) * 2 <= 98304 and (outputs >= 64 or not turned)
]


def microseconds(run: Callable[[int], object], turns: int = 5) -> float:
    """Of one call: twenty in a graph, eight replays at a time, the median of some such times. The argument says which copy of the
    data to take."""
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(20):
            run(i)
    seconds = []
    for _ in range(turns + 1):  # the first one warms up
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(8):
            graph.replay()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end))
    return 1e3 * statistics.median(seconds[1:]) / 160


class Shape:
    """The sizes of a decoder, and its matrices."""

    def __init__(self, name: str):
        config = SHAPES[name]
        self.hidden, self.inner = config["hidden_size"], config["intermediate_size"]
        self.heads, self.groups = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim, self.vocab = config.get("head_dim") or self.hidden // self.heads, config["vocab_size"]
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
        self.weights = [torch.randn(outputs, inputs, device=CUDA, dtype=torch.bfloat16) for _ in range(copies)]
        self.norm = (torch.ones(inputs, device=CUDA, dtype=torch.bfloat16), 1e-6)
        self.outputs, self.inputs, self.also = outputs, inputs, also

    def arguments(self, rows: int) -> tuple[torch.Tensor, dict]:
        x = torch.randn(rows, self.inputs, device=CUDA, dtype=torch.bfloat16)
        onto = torch.zeros(rows, self.outputs, device=CUDA, dtype=torch.bfloat16) if self.also.get("onto") else None
        return x, dict(normed=self.norm if self.also.get("normed") else None, gated=self.also.get("gated", False), onto=onto)

    def thin(self, rows: int, blocks: Blocks) -> float:
        """By a kernel of ours, which gates and adds, too; the norm is not in it."""
        x, how = self.arguments(rows)
        how.pop("normed")
        return microseconds(lambda i: kernels.thin(x, self.weights[i % len(self.weights)], blocks, **how))

    def whole(self, rows: int, by_us: bool) -> float:
        """With everything that belongs to it, in the way that forwards do it, or by the library alone."""
        x, how = self.arguments(rows)
        kept = kernels.THIN
        kernels.THIN = kept if by_us else {}
        try:
            return microseconds(lambda i: kernels.product(x, self.weights[i % len(self.weights)].t(), **how))
        finally:
            kernels.THIN = kept

    def bare(self, rows: int) -> float:
        x, _ = self.arguments(rows)
        return microseconds(lambda i: x @ self.weights[i % len(self.weights)].t())


def compile_one(job: tuple[dict[str, bool], int, Blocks]) -> str | None:
    also, rows, blocks = job
    x = torch.zeros(rows, 256, device=CUDA, dtype=torch.bfloat16)
    flags = dict(BIASED=False, GATED=bool(also.get("gated")), ADDED=bool(also.get("onto")), TURNED=blocks.turned)
    try:
        kernels._thin.warmup(
            x, x, x, x, rows, 256, 256, **flags, ROWS=rows, BN=blocks.outputs, BK=blocks.inputs, num_warps=4,
            num_stages=blocks.stages, **kernels.early(x, rows), grid=(1,),
        )  # fmt: skip
    except Exception as error:
        return str(error)
    return None


def tune(shape: Shape, speed: float) -> None:
    kinds = [{k: v for k, v in also.items() if k != "normed"} for *_, also in shape.matrices.values()]
    jobs = [(also, rows, blocks) for also in kinds for rows in ROWS[1:] for blocks in BLOCKS]
    with ProcessPoolExecutor(12, multiprocessing.get_context("spawn")) as pool:
        failed = [error for error in pool.map(compile_one, jobs, chunksize=4) if error]
    print(f"{len(jobs)} compiled, {len(failed)} not {failed[:1]}", flush=True)
    for name, matrix in shape.matrices.items():
        product = Product(*matrix)
        floor = 2 * product.outputs * product.inputs / speed * 1e6
        for rows in ROWS:
            found = {}
            for blocks in BLOCKS:
                try:
                    found[blocks] = product.thin(rows, blocks) / floor
                except Exception as error:
                    print(f"  {blocks}: {str(error)[:80]}")
            best = ", ".join(f"{blocks} {found[blocks]:.3f}" for blocks in sorted(found, key=found.__getitem__)[:4])
            print(f"{name:8} {rows:3} rows, times the floor of {floor:.1f} us: {best}", flush=True)
        del product
        torch.cuda.empty_cache()


def products(shape: Shape, speed: float) -> None:
    print(f"{'matrix':8} {'rows':>4} {'floor us':>9} {'bare':>8} {'library':>8} {'ours':>8}   (times the floor)")
    for name, matrix in shape.matrices.items():
        product = Product(*matrix)
        floor = 2 * product.outputs * product.inputs / speed * 1e6
        for rows in (*ROWS, 128, 160, 256):
            cells = [product.bare(rows), product.whole(rows, by_us=False), product.whole(rows, by_us=True)]
            print(f"{name:8} {rows:4} {floor:9.1f} " + " ".join(f"{taken / floor:8.3f}" for taken in cells), flush=True)
        del product
        torch.cuda.empty_cache()


def half(*size: int) -> torch.Tensor:
    return torch.randn(*size, device=CUDA, dtype=torch.bfloat16)


def between(shape: Shape, rows: int) -> dict[str, float]:
    """The kernels between the products, attention apart."""
    x, weight, gate_up = half(rows, shape.hidden), half(shape.hidden), half(rows, 2 * shape.inner)
    slots = Slots(1, 1, 2048, shape.groups, shape.dim, torch.bfloat16, CUDA)
    qkv, table = half(rows, (shape.heads + 2 * shape.groups) * shape.dim), half(2048, shape.dim)
    at = torch.arange(rows, device=CUDA)
    return dict(
        norm=microseconds(lambda i: kernels.norm(x, weight, 1e-6)),
        swiglu=microseconds(lambda i: kernels.swiglu(gate_up)),
        rotate=microseconds(lambda i: kernels.rotate_and_keep(0, qkv, None, table, table, at, at, slots, 1e-6)),
    )


def attention(shape: Shape, lanes: int, held: int, rows: int) -> tuple[Tiles, dict[int, float]]:
    """How attention would cut some rows after `held` slots, and what it takes by into how many shares it does."""
    layers = max(2, COPIES // (lanes * (held + rows) * shape.groups * shape.dim * 4))
    slots = Slots(layers, lanes, held + rows, shape.groups, shape.dim, torch.bfloat16, CUDA)
    plan = Plan(causal_rows(np.arange(held + rows) % 9), [np.arange(held, held + rows)], held + rows)
    batch = Batch([(lane, plan, held) for lane in range(lanes)], held + rows, CUDA)
    chosen = tiled(batch, shape.heads // shape.groups, shape.groups, programs_for(CUDA))
    ready = chosen.to(CUDA)
    q = half(lanes * rows, shape.heads, shape.dim)

    def taken(splits: int) -> float:
        cut = replace(ready, splits=splits)
        return microseconds(lambda i: kernels.attention(i % layers, q, cut, slots, 0.1))

    return chosen, {splits: taken(splits) for splits in reversed(SHARES)}


def others(shape: Shape) -> None:
    print("\nkernels between the products, us")
    for rows in (1, 16, 64, 512):
        print(f"{rows:4} rows  " + "  ".join(f"{name} {taken:.2f}" for name, taken in between(shape, rows).items()), flush=True)
    print("\nattention, us, by splits (* what is chosen)")
    for lanes, held, rows in ((1, 1023, 1), (1, 1023, 16), (1, 1023, 64), (1, 8191, 1), (32, 1023, 1), (32, 1023, 16)):
        chosen, taken = attention(shape, lanes, held, rows)
        cells = "  ".join(f"{n}{'*' * (n == chosen.splits)} {us:.2f}" for n, us in taken.items())
        print(f"{lanes:3} x {rows:3} rows after {held}, tiles of {chosen.height}: {cells}", flush=True)


def rules(shape: Shape) -> None:
    """What happens to logits outside the forward, launches and waiting included: laws, a draw, a verdict on a chain of guesses."""
    print("\nrules, us, by rows that are read")

    def wall(run: Callable[[], object], turns: int = 30) -> float:
        seconds = []
        for _ in range(turns):
            torch.cuda.synchronize()
            began = time.perf_counter()
            run()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        return 1e6 * statistics.median(seconds[5:])

    for rows in (1, 17, 65):
        logits = half(rows, shape.vocab)
        cells = {}
        for name, temperature in (("greedy", 0.0), ("sampled", 0.8)):
            history = History(Sampling(temperature=temperature), np.zeros(0, np.int64), shape.vocab, frozenset())
            chains = [Chain(history, [0] * rows, range(rows))]
            p = laws(logits, chains)
            x = torch.zeros(1, rows - 1, dtype=torch.long, device=CUDA)
            cells[f"{name} laws"] = wall(lambda c=chains, z=logits: laws(z, c))
            cells[f"{name} draw"] = wall(lambda p=p: accept.draw(p[:1], Noise([(1, 0)]))[0].tolist())
            cells[f"{name} iteration"] = wall(lambda p=p, x=x: torch.stack(accept.iteration(x, p[None], Noise([(1, 0)]))).tolist())
        print(f"{rows:3} rows  " + "  ".join(f"{name} {taken:.0f}" for name, taken in cells.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-7b", choices=SHAPES)
    parser.add_argument("--tune", action="store_true", help="try other block shapes for few rows")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
    with torch.inference_mode():
        speed = bandwidth(CUDA)
        print(f"{torch.cuda.get_device_name()}, a copy moves {speed / 1e12:.2f} TB/s")
        shape = Shape(arguments.shape)
        products(shape, speed)
        others(shape)
        rules(shape)
        if arguments.tune:
            tune(shape, speed)


if __name__ == "__main__":
    main()
