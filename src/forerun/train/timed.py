"""Real checkpoints taught another way to decode, for as many seconds as there are.

The network's weights are trained in float32 and run in half precision; embedding and head stay as
they are. A lesson says what a step's loss is and how well the network does by now. Every so often
the run measures, adds a row to `curve.csv` and keeps what it needs to go on.

B texts of a step, L tokens of a text, E hidden size, V vocabulary.
"""

from __future__ import annotations

import csv
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from forerun.checkpoints.adapters import FAMILY, write_small
from forerun.errors import BadCheckpoint, NotAble
from forerun.options import check_whole
from forerun.train.base import FamilySettings
from forerun.train.loop import add_adapters
from forerun.train.networks import move

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Log = Callable[[str], None]


@dataclass(frozen=True)
class TimedRecipe:
    """How long, how much at once, how fast."""

    seconds: float = 400.0
    steps: int = 0  # above 0: so many, however long they take
    batch: int = 32  # texts a step
    learning_rate: float = 5e-5
    warmup: float = 0.03  # share of the seconds
    weight_decay: float = 0.01
    clip: float = 1.0
    lora: int = 0  # above 0: adapters of this rank instead of all weights
    log_every: float = 10.0  # seconds
    measure_every: float = 30.0
    save_every: float = 120.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("batch", self.batch)
        check_whole("steps", self.steps, 0)
        check_whole("lora", self.lora, 0)


class Lesson(Protocol):
    """What is taught."""

    family_settings: FamilySettings

    def loss(self, decoder: Decoder, step: int) -> Tensor:
        """The loss of a step, which depends on the network and the step's number alone."""

    def measure(self, decoder: Decoder) -> dict[str, float]:
        """How well the network does on texts that are held out."""


class Decoder:
    """A network without its head: rows of tokens to hidden states, in half precision on a GPU."""

    def __init__(self, network: PreTrainedModel, lora: int = 0, dtype: torch.dtype | None = None):
        attention = network.config._attn_implementation
        if attention != "sdpa":  # others add a mask of truth values to the scores
            raise NotAble(f"training rows that see each other as told needs sdpa, not {attention}.")
        self.network = network
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        usual = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.dtype = dtype or usual
        if lora:
            move(network, self.device, self.dtype)
            self.adapted: Any = add_adapters(network, lora)
        else:
            move(network, self.device)
        for end in (network.get_input_embeddings(), network.get_output_embeddings()):
            for weight in end.parameters():
                weight.requires_grad_(False)
                weight.data = weight.data.to(self.dtype)
        inner: Any = network
        self.layers: nn.Module = inner.model
        self.trained = {k: w for k, w in self.layers.named_parameters() if w.requires_grad}
        for weight in self.trained.values():
            weight.data = weight.data.float()

    @property
    def head_EV(self) -> Tensor:
        head: Any = self.network.get_output_embeddings()
        return head.weight.t()

    @property
    def vocab(self) -> int:
        return self.head_EV.shape[1]

    def __call__(self, tokens: Tensor, positions: Tensor, sees: Tensor) -> Tensor:
        """Hidden states [B, R, E] of rows [B, R] that see each other as `sees` [B, R, R] says."""
        weights = {name: weight.to(self.dtype) for name, weight in self.trained.items()}
        inputs = dict(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=sees[:, None],
            use_cache=False,
        )
        return torch.func.functional_call(self.layers, weights, (), inputs).last_hidden_state

    def likeliest(self, x_NE: Tensor, rows: int = 4096) -> Tensor:
        """The likeliest token after each of these hidden states [..., E]."""
        flat = x_NE.reshape(-1, x_NE.shape[-1])
        found = [(part @ self.head_EV).argmax(-1) for part in flat.split(rows)]
        return torch.cat(found).view(x_NE.shape[:-1])


class TimedRun:
    """A network in training, and how far it has come."""

    def __init__(
        self, recipe: TimedRecipe, network: PreTrainedModel, lesson: Lesson, out: Path, log: Log
    ):
        self.recipe = recipe
        self.lesson = lesson
        self.out = out
        self.log = log
        out.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(recipe.seed)
        self.decoder = Decoder(network, recipe.lora)
        self.weights = list(self.decoder.trained.values())
        on_gpu = self.decoder.device.type == "cuda"
        self.optimiser = adamw(self.weights, recipe.learning_rate, recipe.weight_decay, on_gpu)
        self.step = 0
        self.elapsed = 0.0
        self.losses: list[Tensor] = []
        self._restore()

    def train(self) -> None:
        """Train until the seconds are spent. What is compiled first does not count."""
        recipe = self.recipe
        if self.done() >= 1:
            return
        if self.step == 0:
            self.lesson.loss(self.decoder, 0).backward()
            self.optimiser.zero_grad(set_to_none=True)
            self.measure()
        began = time.perf_counter() - self.elapsed
        logged = measured = saved = self.elapsed
        while self.done() < 1:
            self._train_step()
            if self.step % 4 == 0 and self.decoder.device.type == "cuda":
                torch.cuda.synchronize()
            self.elapsed = time.perf_counter() - began
            if self.elapsed - measured > recipe.measure_every:
                logged = measured = self.elapsed
                self.measure()
            elif self.elapsed - logged > recipe.log_every:
                logged = self.elapsed
                self.log(self._progress())
            if self.elapsed - saved > recipe.save_every:
                saved = self.elapsed
                self.save()
        self.measure()
        self.save()

    def done(self) -> float:
        """The share of the run that is behind it."""
        if self.recipe.steps:
            return self.step / self.recipe.steps
        return self.elapsed / self.recipe.seconds

    def _train_step(self) -> None:
        for group in self.optimiser.param_groups:
            group["lr"] = self.recipe.learning_rate * cosine(self.done(), self.recipe.warmup)
        loss = self.lesson.loss(self.decoder, self.step)
        loss.backward()
        update(self.optimiser, self.weights, self.recipe.clip)
        self.step += 1
        self.losses.append(loss.detach())

    def _progress(self) -> str:
        recent = self.losses[-50:]
        loss = float(torch.stack(recent).mean()) if recent else math.nan
        text = f"{self.elapsed:.0f} s, step {self.step}, loss {loss:.4f}"
        if self.decoder.device.type == "cuda":
            text += f", {torch.cuda.max_memory_allocated() / 2**30:.0f} GiB"
        return text

    @torch.no_grad()
    def measure(self) -> None:
        """A row of the curve."""
        began = time.perf_counter()
        found = self.lesson.measure(self.decoder)
        loss = float(torch.stack(self.losses).mean()) if self.losses else math.nan
        shown = ", ".join(f"{name} {value:.3f}" for name, value in found.items())
        self.log(f"{self._progress()}: {shown} (in {time.perf_counter() - began:.1f} s)")
        self.losses.clear()
        row = dict(step=self.step, seconds=self.elapsed, loss=loss) | found
        add_row(self.out / "curve.csv", row)

    def save(self) -> None:
        """What it takes to go on."""
        state = dict(
            step=self.step,
            elapsed=self.elapsed,
            weights=self.decoder.trained,
            optimiser=self.optimiser.state_dict(),
        )
        unfinished = self.out / "run.tmp"
        torch.save(state, unfinished)
        unfinished.replace(self.out / "run.pt")

    def _restore(self) -> None:
        file = self.out / "run.pt"
        if not file.exists():
            return
        state = torch.load(file, map_location=self.decoder.device, weights_only=True)
        if state["weights"].keys() != self.decoder.trained.keys():
            raise BadCheckpoint(f"{file} has other weights than are trained: take another folder.")
        for name, weight in self.decoder.trained.items():
            weight.data.copy_(state["weights"][name])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step = state["step"]
        self.elapsed = state["elapsed"]
        self.log(f"going on from step {self.step}, {self.elapsed:.0f} s")

    def write(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """The whole model in `out/model`, and adapters in `out/adapters` beside it."""
        network: Any = self.decoder.network
        settings = self.lesson.family_settings
        if settings:
            network.config.forerun = dict(settings)
        if self.recipe.lora:
            adapted = self.decoder.adapted
            adapted.save_pretrained(self.out / "adapters")
            (self.out / "adapters" / FAMILY).write_text(json.dumps(settings) + "\n")
            write_small(self.out / "adapters", self.out / "adapters-8bit")
            network = adapted.merge_and_unload()
        move(network, self.decoder.device, torch.bfloat16)
        network.config.dtype = torch.bfloat16
        network.save_pretrained(self.out / "model")
        tokenizer.save_pretrained(self.out / "model")


def cosine(done: float, warmup: float) -> float:
    """The share of the learning rate after this share of a run: a rise, then a cosine to little."""
    if done < warmup:
        return max(done / warmup, 0.02)
    done = min(1.0, (done - warmup) / (1 - warmup))
    return 0.02 + 0.98 * (1 + math.cos(math.pi * done)) / 2


def adamw(weights: Sequence[Tensor], rate: float, decay: float, on_gpu: bool) -> torch.optim.AdamW:
    """Weight decay for matrices only."""
    groups = [
        {"params": [w for w in weights if w.dim() > 1], "weight_decay": decay},
        {"params": [w for w in weights if w.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, rate, betas=(0.9, 0.95), fused=on_gpu)


def update(optimiser: torch.optim.Optimizer, weights: Iterable[Tensor], clip: float) -> None:
    """One step of the optimiser with clipped gradients. Where they are not finite they count as
    none, without asking the GPU."""
    weights = [weight for weight in weights if weight.grad is not None]
    norm = torch.nn.utils.clip_grad_norm_(weights, clip)
    finite = norm.isfinite()
    for weight in weights:
        assert weight.grad is not None
        weight.grad = torch.where(finite, weight.grad, 0.0)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)


def add_row(file: Path, row: dict[str, float]) -> None:
    """A line of a table, under its heading."""
    new = not file.exists()
    with file.open("a", newline="") as lines:
        writer = csv.writer(lines)
        if new:
            writer.writerow(row)
        writer.writerow(f"{x:.6g}" if isinstance(x, float) else str(x) for x in row.values())
