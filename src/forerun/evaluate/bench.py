"""Where the time of a forward, and of decoding, goes: against what the machine could do at best.

A forward must read every weight once, and the keys and values it looks at; it must do two operations per weight and row. The
larger of the two, at the bandwidth and arithmetic that this machine was measured to have, is its floor. Weights are random where
a shape is named: timing does not depend on them, and acceptance is never measured on them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from forerun.api import Model, from_network
from forerun.engine.cache import available_bytes
from forerun.engine.pack import Batch
from forerun.engine.serve import Clock, Work
from forerun.errors import NoRoom, unknown
from forerun.evaluate.costs import cost_of
from forerun.evaluate.latency import verdicts


def _llama(native: str, layers: int, hidden: int, inner: int, heads: int, keys: int, vocab: int, **more: Any) -> dict[str, Any]:
    return dict(
        model_type=native, num_hidden_layers=layers, hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads,
        num_key_value_heads=keys, vocab_size=vocab, max_position_embeddings=16384, bos_token_id=None, eos_token_id=None,
        pad_token_id=None, **more,
    )  # fmt: skip


SHAPES = {
    "zoo": _llama("llama", 6, 256, 768, 8, 4, 4096, tie_word_embeddings=True),
    "smollm2-135m": _llama("llama", 30, 576, 1536, 9, 3, 49152, tie_word_embeddings=True),
    "qwen2.5-0.5b": _llama("qwen2", 24, 896, 4864, 14, 2, 151936, tie_word_embeddings=True),
    "qwen2.5-1.5b": _llama("qwen2", 28, 1536, 8960, 12, 2, 151936, tie_word_embeddings=True),
    "qwen2.5-7b": _llama("qwen2", 28, 3584, 18944, 28, 4, 152064),
    "sdar-8b": _llama("qwen3", 36, 4096, 12288, 32, 8, 151936, head_dim=128),
    "llada-8b": _llama("llama", 32, 4096, 12288, 32, 32, 126464),
}


def random_model(shape: str, device: torch.device, dtype: torch.dtype, lanes: int, context: int) -> Model:
    """A model of a shape with random weights."""
    network = random_network(shape, device, dtype)
    return from_network(network, None, name=shape, lanes=lanes, max_context=min(context, network.config.max_position_embeddings))


def random_network(shape: str, device: torch.device, dtype: torch.dtype) -> Any:
    """A `transformers` model of a shape with random weights, made where they are used."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if shape not in SHAPES:
        raise unknown("shape", shape, SHAPES)
    config = AutoConfig.for_model(**SHAPES[shape])
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    size, free = sum(p.numel() for p in network.parameters()) * dtype.itemsize, available_bytes(device)
    if size > 0.9 * free:
        raise NoRoom(
            f"shape={shape!r} needs {size / 2**30:.1f} GiB on {device}, where {free / 2**30:.1f} are free: use a smaller shape, or "
            f"a smaller dtype."
        )
    rotary = type(network.model.rotary_emb)(config)
    network.model.rotary_emb = torch.nn.Identity()
    network = network.to(dtype).to_empty(device=device)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            weight.normal_(0, 0.02) if weight.dim() > 1 else weight.fill_(0.0 if name.endswith("bias") else 1.0)
    network.tie_weights()
    network.model.rotary_emb = rotary.to(device)
    return network.eval()


def _timed(run: Callable[[], Any], device: torch.device, turns: int) -> float:
    """Median seconds, the first run not counted."""
    seconds = []
    for turn in range(turns + 1):
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if turn:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _queued(run: Callable[[], Any], turns: int) -> float:
    """Median seconds of a GPU that always has the next run waiting: what the host does meanwhile is not in it."""
    for _ in range(3):  # the first ones are captured
        run()
    seconds = []
    for _ in range(turns):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        run()  # behind which the others queue up
        begin.record()
        for _ in range(8):
            run()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 8e3)
    return statistics.median(seconds)


def bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy moves, read and written."""
    size = 1 << (30 if device.type == "cuda" else 27)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copies() -> None:
        for _ in range(10):
            target.copy_(source)

    return 20 * size / _timed(copies, device, turns=7)


def arithmetic(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a large matrix product."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / _timed(lambda: a @ b, device, turns=5)


def ceilings(backbone: Any) -> dict[str, float]:
    """What the machine can do at best: bytes and operations per second."""
    return {"bytes/s": bandwidth(backbone.device), "flop/s": arithmetic(backbone.device, backbone.dtype)}


@dataclass(frozen=True)
class Cell:
    """One forward: what it took, and what it had to take."""

    batch: int
    context: int  # tokens of each sequence that are in slots already
    tokens: int  # rows of each sequence that run
    seconds: float
    floor: float

    @property
    def times(self) -> float:
        return self.seconds / self.floor

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "times": self.times}


@torch.inference_mode()
def forwards(
    model: Model,
    tokens: Sequence[int],
    batches: Sequence[int],
    contexts: Sequence[int],
    *,
    turns: int = 5,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[dict[str, float], list[Cell]]:
    """The machine's bandwidth and arithmetic, and every forward that fits, against its floor."""
    backbone: Any = model.backbone
    machine = ceilings(backbone)
    wanted = [(b, c, t) for c in contexts for b in batches for t in tokens if c + t <= model.context and b <= model.engine.lanes]
    cells = []
    for done, (b, c, t) in enumerate(wanted):
        cells.append(timed_cell(model, verdicts(model, b, c, t), (b, c, t), machine, turns))
        progress(done + 1, len(wanted))
    for memo in model.host.memos:
        memo.forget()
    return machine, cells


def timed_cell(model: Model, batch: Batch, sizes: tuple[int, int, int], machine: dict[str, float], turns: int = 5) -> Cell:
    """One forward, timed: of batch, context and tokens per sequence."""
    run = partial(model.host.runner.forward, batch)
    seconds = _queued(run, turns) if batch.device.type == "cuda" else _timed(run, batch.device, turns)
    return Cell(*sizes, seconds, floor_of(model.backbone, batch, machine))


def floor_of(backbone: Any, batch: Batch, machine: dict[str, float]) -> float:
    """Seconds that a forward must take at the machine's bandwidth and arithmetic, whichever is more."""
    work = Work()
    work.add(batch)
    must, unread = cost_of(backbone, work), _looked_up(backbone)
    reading = (must.bytes - unread * backbone.dtype.itemsize) / machine["bytes/s"]
    return max(reading, (must.flops - 2 * unread * work.rows) / machine["flop/s"])


def _looked_up(backbone: Any) -> int:
    """Weights of which only some rows are read: the input embedding, unless the output uses the same matrix."""
    embed, head = getattr(backbone, "embed", None), getattr(backbone, "head", None)
    if embed is None or head is None or (head.numel() == embed.numel() and torch.equal(embed[0], head[:, 0])):
        return 0
    return embed.numel()


@dataclass(frozen=True)
class Split:
    """Where the time of decoding went, in seconds."""

    method: str
    tokens: int
    forwards: int
    forward: float
    rules: float
    host: float  # plans, laws and bookkeeping
    idle: float  # outside the engine

    @property
    def total(self) -> float:
        return self.forward + self.rules + self.host + self.idle

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "total": self.total, "tokens/s": self.tokens / self.total}


def decoding(
    model: Model,
    methods: Sequence[tuple[str, dict[str, Any]]],
    prompts: Sequence[Any],
    *,
    batch: int = 1,
    turns: int = 3,
    **how: Any,
) -> list[Split]:
    """Decode the prompts by every method in turns, and say where the time of its median turn went."""
    found: list[list[Split]] = [[] for _ in methods]
    for turn in range(turns + 1):
        for i, (name, options) in enumerate(methods):
            model.engine.clock = Clock(asks=True)
            began = time.perf_counter()
            results = [
                r
                for first in range(0, len(prompts), batch)
                for r in model.generate(list(prompts[first : first + batch]), method=name, **options, **how)
            ]
            wall, clock = time.perf_counter() - began, model.engine.clock
            clock.settle()
            for result in results:
                if result.error is not None:
                    raise result.error
            if turn:
                tokens, forwards = sum(r.stats.tokens for r in results), sum(r.stats.forwards for r in results)
                host = clock.total - clock.forward - clock.rules
                found[i].append(Split(name, tokens, forwards, clock.forward, clock.rules, host, wall - clock.total))
    model.engine.clock = Clock()
    return [sorted(own, key=lambda split: split.total)[len(own) // 2] for own in found]


def draw(cells: Sequence[Cell], picture: str) -> None:
    """Times the floor against tokens, a line for each batch and context."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for b, c in dict.fromkeys((cell.batch, cell.context) for cell in cells):
        own = [cell for cell in cells if (cell.batch, cell.context) == (b, c)]
        axes.plot([cell.tokens for cell in own], [1e3 * cell.seconds for cell in own], "o-", label=f"batch {b}, context {c}")
        axes.plot([cell.tokens for cell in own], [1e3 * cell.floor for cell in own], ":", color=axes.lines[-1].get_color())
    axes.set(xscale="log", yscale="log", xlabel="tokens per sequence", ylabel="ms per forward (dotted: the floor)")
    axes.legend(fontsize=7)
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
