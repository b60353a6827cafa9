"""The one training loop: Accelerate places things, the recipe decides, and a run that stopped goes on where it was."""

from __future__ import annotations

import copy
import csv
import math
import signal
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forerun.errors import BadOption
from forerun.train.base import Objective, network_of
from forerun.train.data import Corpus
from forerun.train.objectives import make
from forerun.train.recipe import Recipe


def learning_rate(step: int, recipe: Recipe) -> float:
    """A linear rise, then a cosine down to a tenth or a line down to nothing."""
    if step < recipe.warmup:
        return recipe.learning_rate * (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    if recipe.decay == "linear":
        return recipe.learning_rate * max(0.0, 1 - done)
    return recipe.learning_rate * (0.1 + 0.9 * (1 + math.cos(math.pi * min(done, 1.0))) / 2)


def new_network(recipe: Recipe) -> Any:
    """The network that training begins with: the recipe's `start`, else its model with fresh weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(recipe.seed)
    if recipe.start is None:
        network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**recipe.model), dtype=torch.float32)
    else:
        network = network_of(recipe.start).train()
    marks = make(recipe.objective, recipe.options).marks
    if marks.get("mask_token", 0) >= network.config.vocab_size:
        network.resize_token_embeddings(marks["mask_token"] + 1)
    if marks:
        network.config.forerun = marks
    return network


def with_adapters(network: Any, rank: int) -> Any:
    """The network with low-rank adapters beside its matrices, the only weights that are trained."""
    if find_spec("peft") is None:
        raise BadOption(f"lora={rank} needs peft: pip install 'forerun[lora]'.")
    from peft import LoraConfig, get_peft_model

    return get_peft_model(network, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))


def parameter_groups(network: Any, decay: float) -> list[dict[str, Any]]:
    """Weight decay for matrices only."""
    trained = [p for p in network.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.dim() >= 2], [p for p in trained if p.dim() < 2]
    return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]


class Pause:
    """Ctrl-C while it holds asks for a stop after the step that is being made; a second one stops at once."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> Pause:
        self.here = threading.current_thread() is threading.main_thread()
        self.before = signal.signal(signal.SIGINT, self._ask) if self.here else None
        return self

    def _ask(self, *_: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *_: Any) -> None:
        if self.here:
            signal.signal(signal.SIGINT, self.before)


def train(
    recipe: Recipe,
    corpus: Corpus,
    out: Path,
    *,
    network: Any = None,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
    stop_at: int | None = None,
) -> Any:
    """Train, writing `curve.csv` and `checkpoint.pt` under `out`; resume from that checkpoint if there is one.

    `report` is called with a row of the curve at every validation. `stop_at` ends early, as an interruption would.
    """
    with Pause() as pause:
        return _train(recipe, corpus, out, network, report, stop_at, pause)


def _train(
    recipe: Recipe,
    corpus: Corpus,
    out: Path,
    network: Any,
    report: Callable[[dict[str, Any]], None],
    stop_at: int | None,
    pause: Pause,
) -> Any:
    from accelerate import Accelerator

    on_gpu = torch.cuda.is_available()
    accelerator = Accelerator(mixed_precision="bf16" if on_gpu else "no")
    network = network if network is not None else new_network(recipe)
    network = with_adapters(network, recipe.lora) if recipe.lora else network
    longest = getattr(network.config, "max_position_embeddings", None) or 0
    if 0 < longest < recipe.context:
        raise BadOption(f"context={recipe.context} is more than the {longest} positions that the network has.")
    optimiser = torch.optim.AdamW(
        parameter_groups(network, recipe.weight_decay), lr=recipe.learning_rate, betas=recipe.betas, fused=on_gpu
    )
    out.mkdir(parents=True, exist_ok=True)
    step, seconds = _resume(out / "checkpoint.pt", recipe, network, optimiser)
    network, optimiser = accelerator.prepare(network, optimiser)
    forward = torch.compile(network) if on_gpu and not recipe.lora else network  # hundreds of adapters take minutes to compile
    objective = make(recipe.objective, recipe.options)
    with accelerator.main_process_first():
        network.eval()
        corpus = objective.gather(corpus, accelerator.unwrap_model(network), recipe.context, recipe.seed, out)
        network.train()
    share = recipe.batch // recipe.accumulate // accelerator.num_processes
    if share == 0:
        raise BadOption(
            f"batch={recipe.batch} is smaller than {accelerator.num_processes} processes times {recipe.accumulate} forwards."
        )
    began, losses = time.perf_counter() - seconds, []

    def save(step: int) -> None:
        if accelerator.is_main_process:
            _save(out / "checkpoint.pt", recipe, accelerator.unwrap_model(network), optimiser, step, time.perf_counter() - began)

    while step < min(recipe.steps, stop_at or recipe.steps):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, recipe)
        tokens = corpus.batch(step, recipe.batch, recipe.context, recipe.seed)
        whole = objective.prepare(tokens, np.random.default_rng([recipe.seed, step]), step)
        for part in range(recipe.accumulate):
            first = (accelerator.process_index * recipe.accumulate + part) * share
            loss = objective.loss(forward, *(x[first : first + share].to(accelerator.device, non_blocking=True) for x in whole))
            accelerator.backward(loss / recipe.accumulate)
            losses.append(loss.detach())
        accelerator.clip_grad_norm_(network.parameters(), recipe.clip)
        optimiser.step()
        optimiser.zero_grad()
        step += 1
        if step % recipe.validate_every == 0 or step == recipe.steps:
            row = dict(
                step=step,
                tokens=step * recipe.batch * recipe.context,
                loss=float(torch.stack(losses).mean()),
                valid_loss=validate(forward, objective, corpus, recipe, accelerator.device),
                learning_rate=learning_rate(step - 1, recipe),
                seconds=time.perf_counter() - began,
            )
            losses.clear()
            if accelerator.is_main_process:
                row |= decoded(accelerator.unwrap_model(network), corpus, recipe) if recipe.decode else {}
                _append(out / "curve.csv", row)
                report(row)
        if pause.asked or (step % recipe.save_every == 0 and step < recipe.steps):
            save(step)
        if pause.asked:
            raise KeyboardInterrupt
    save(step)
    if accelerator.is_main_process and (out / "curve.csv").exists():
        plot(out / "curve.csv", out / "curve.png")
    trained = accelerator.unwrap_model(network, keep_fp32_wrapper=False)
    if not recipe.lora:
        return trained
    if accelerator.is_main_process:
        trained.save_pretrained(out / "adapters")
    return trained.merge_and_unload()


@torch.no_grad()
def validate(network: Any, objective: Objective, corpus: Corpus, recipe: Recipe, device: Any, size: int = 512) -> float:
    """The objective on held-out windows, always the same ones, in the recipe's batches."""
    objective = objective.held_out()
    whole = objective.prepare(corpus.held_out(size, recipe.context), np.random.default_rng(recipe.seed), recipe.steps)
    total = 0.0
    for part in zip(*(x.split(min(recipe.batch, 128)) for x in whole)):
        total += float(objective.loss(network, *(x.to(device) for x in part))) * len(part[0])
    return total / len(whole[0])


def decoded(network: Any, corpus: Corpus, recipe: Recipe) -> dict[str, float]:
    """What the network as it is now writes into held-out sequences: how likely, how varied, in how many forwards."""
    import forerun
    from forerun.evaluate.tasks import How, scattered

    model = forerun.from_network(copy.deepcopy(network).eval().float(), None, name="in training", max_context=recipe.context)
    judge = forerun.load(recipe.judge, device=str(network.device), lanes=1) if recipe.judge else None
    windows = corpus.held_out(recipe.decode, recipe.context).numpy()
    [row] = scattered(model, [How("assd")], windows, known=0.05, batch=recipe.decode, judge=judge)
    names = {"perplexity": "perplexity", "entropy": "entropy", "tokens/forward": "tokens_per_forward"}
    return {names[name]: found.mean for name, found in row.measures.items() if name in names}


def _save(file: Path, recipe: Recipe, network: Any, optimiser: Any, step: int, seconds: float) -> None:
    """Write beside and rename: an interruption leaves the old checkpoint whole."""
    state = dict(
        recipe=recipe.as_dict(), step=step, seconds=seconds, network=network.state_dict(), optimiser=optimiser.state_dict()
    )
    torch.save(state, file.with_suffix(".tmp"))
    file.with_suffix(".tmp").replace(file)


def _resume(file: Path, recipe: Recipe, network: Any, optimiser: Any) -> tuple[int, float]:
    if not file.exists():
        return 0, 0.0
    state = torch.load(file, map_location="cpu", weights_only=True)
    if state["recipe"] != recipe.as_dict():
        changed = [key for key, value in recipe.as_dict().items() if state["recipe"].get(key) != value]
        raise BadOption(
            f"{file} was made by another recipe (it differs in {', '.join(changed)}): choose another folder, or remove it."
        )
    network.load_state_dict(state["network"])
    optimiser.load_state_dict(state["optimiser"])
    return state["step"], state["seconds"]


def _append(file: Path, row: dict[str, Any]) -> None:
    """Add a row to the curve; rows that a resumed run makes again replace those it had."""
    rows = [r for r in csv.DictReader(file.open()) if int(r["step"]) < row["step"]] if file.exists() else []
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, row.keys())
        writer.writeheader()
        writer.writerows([*rows, {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()}])


def plot(curve: Path, picture: Path) -> None:
    """Loss and held-out loss against the tokens seen, where matplotlib is installed."""
    if find_spec("matplotlib") is None:
        return
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    with curve.open() as file:
        rows = list(csv.DictReader(file))
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for column, label in (("loss", "training"), ("valid_loss", "held out")):
        axes.plot([int(r["tokens"]) / 1e6 for r in rows], [float(r[column]) for r in rows], label=label)
    axes.set(xlabel="million tokens", ylabel="nats per token")
    axes.legend()
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
