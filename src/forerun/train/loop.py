"""The one training loop. Accelerate places things, the recipe decides, and a run that stopped goes
on where it was."""

from __future__ import annotations

import math
import os
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from forerun.errors import BadOption
from forerun.train.base import CHECKPOINT
from forerun.train.curve import CURVE, ProgressRow, Report, append_row, plot
from forerun.train.data import Corpus
from forerun.train.interrupt import InterruptGuard
from forerun.train.networks import check_context, load_network
from forerun.train.objectives import make_objective
from forerun.train.recipe import Recipe
from forerun.train.resume import Progress, restore, save
from forerun.train.shards import (
    recompute,
    restore_shards,
    save_shards,
    spread,
    whole_network,
)
from forerun.train.validation import add_decoded, held_out_loss

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def train(
    recipe: Recipe,
    corpus: Corpus,
    out: Path,
    *,
    network: PreTrainedModel | None = None,
    report: Report = lambda row: None,
    stop_at: int | None = None,
) -> PreTrainedModel:
    """Train, writing `curve.csv` and `checkpoint.pt` under `out`; resume from that checkpoint if
    there is one.

    `report` is called with a row of the curve at every validation. `stop_at` ends early, as an
    interruption would.
    """
    with InterruptGuard() as interrupt:
        run = TrainingRun(recipe, corpus, out, network)
        while run.step < min(recipe.steps, stop_at or recipe.steps):
            run.train_step()
            if run.validation_due():
                run.validate(report)
            if interrupt.requested or run.save_due():
                run.save()
            if interrupt.requested:
                raise KeyboardInterrupt
        return run.finish()


class TrainingRun:
    """What one run trains, how far it has come, and where it writes. Every process has one."""

    def __init__(self, recipe: Recipe, corpus: Corpus, out: Path, network: PreTrainedModel | None):
        from accelerate import Accelerator

        self.recipe = recipe
        self.out = out
        self.on_gpu = torch.cuda.is_available()
        self.bfloat16 = self.on_gpu if recipe.bfloat16 is None else recipe.bfloat16
        several = int(os.environ.get("WORLD_SIZE", "1")) > 1
        self.accelerator = Accelerator(
            mixed_precision="bf16" if self.bfloat16 else "no",
            cpu=several and not self.on_gpu,  # else each would train by itself, without a word
        )
        self.sharded = recipe.shard and self.accelerator.num_processes > 1
        self.objective = make_objective(recipe.objective, recipe.options)
        self.out.mkdir(parents=True, exist_ok=True)
        trained = self._begin(network, corpus)
        self._gather(corpus, trained)
        progress = self._place(trained)
        self.share = self._share()
        self.step = progress.step
        self.began = time.perf_counter() - progress.seconds
        self.losses: list[Tensor] = []  # since the last validation

    def _begin(self, network: PreTrainedModel | None, corpus: Corpus) -> PreTrainedModel:
        """The network as training begins."""
        recipe = self.recipe
        if network is None:
            network = new_network(recipe)
        check_context(network, recipe.context)
        check_tokens(network, corpus)
        if recipe.recompute:
            recompute(network)
        self.kind = type(network)  # sharing out makes another class of it
        trained = add_adapters(network, recipe.lora) if recipe.lora else network
        return cast("PreTrainedModel", trained)

    def _place(self, trained: PreTrainedModel) -> Progress:
        """Network and optimiser where they are computed, as a stopped run left them if there was
        one."""
        recipe = self.recipe
        if self.sharded:
            spread(trained, self.accelerator.device, self.bfloat16)
        optimiser = torch.optim.AdamW(
            parameter_groups(trained, recipe.weight_decay),
            lr=recipe.learning_rate,
            betas=recipe.betas,
            fused=self.on_gpu,
        )
        if recipe.shard:
            progress = restore_shards(self.out, recipe, trained, optimiser)
        else:
            progress = restore(self.out / CHECKPOINT, recipe, trained, optimiser)
        self.network: nn.Module = trained
        self.optimiser = optimiser
        if not self.sharded:
            self.network, self.optimiser = self.accelerator.prepare(trained, optimiser)
        # Hundreds of adapters would take minutes to compile.
        compiled = self.on_gpu and not recipe.lora and not recipe.shard
        forward = torch.compile(self.network) if compiled else self.network
        self.forward = cast("PreTrainedModel", forward)  # whatever wraps it, it is called as one
        return progress

    def _gather(self, corpus: Corpus, network: PreTrainedModel) -> None:
        """The text to train on. The main process makes it, the others then read it."""
        with self.accelerator.main_process_first():
            network.eval()
            self.source = self.objective.gather(
                corpus, network, self.recipe.context, self.recipe.seed, self.out
            )
            network.train()

    def _share(self) -> int:
        """How many sequences of a batch one process takes in one forward."""
        recipe = self.recipe
        processes = self.accelerator.num_processes
        share = recipe.batch // recipe.accumulate // processes
        if share == 0:
            raise BadOption(
                f"batch={recipe.batch} is smaller than {processes} processes times "
                f"{recipe.accumulate} forwards."
            )
        return share

    def _whole(self) -> PreTrainedModel | None:
        """The network in one piece, on the main process at least. Every process takes part."""
        if self.sharded:
            main = self.accelerator.is_main_process
            return cast("PreTrainedModel", whole_network(self.network, self.kind, main))
        return self.accelerator.unwrap_model(self.network)

    def train_step(self) -> None:
        """One update of the weights, by one batch."""
        recipe = self.recipe
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate(self.step, recipe)
        tokens = self.source.batch(self.step, recipe.batch, recipe.context, recipe.seed)
        rng = np.random.default_rng([recipe.seed, self.step])
        whole = self.objective.prepare(tokens, rng, self.step)
        for number in range(recipe.accumulate):
            loss = self.objective.loss(self.forward, *self._part(whole, number))
            self.accelerator.backward(loss / recipe.accumulate)
            self.losses.append(loss.detach())
        self.accelerator.clip_grad_norm_(self.network.parameters(), recipe.clip)
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.step += 1

    def _part(self, whole: tuple[Tensor, ...], number: int) -> list[Tensor]:
        """What this process sees of a batch in its forward of this number."""
        device = self.accelerator.device
        first = (self.accelerator.process_index * self.recipe.accumulate + number) * self.share
        return [x[first : first + self.share].to(device, non_blocking=True) for x in whole]

    def validation_due(self) -> bool:
        return self.step % self.recipe.validate_every == 0 or self.step == self.recipe.steps

    def validate(self, report: Report) -> None:
        """Add a row to the curve and report it. Every process measures, the main one writes."""
        row = self._progress_row()
        self.losses.clear()
        whole = self._whole() if self.recipe.decode else None
        if not self.accelerator.is_main_process:
            return
        if whole is not None:
            add_decoded(row, whole, self.source, self.recipe)
        append_row(self.out / CURVE, row)
        report(row)

    def _progress_row(self) -> ProgressRow:
        recipe = self.recipe
        return ProgressRow(
            step=self.step,
            tokens=self.step * recipe.batch * recipe.context,
            loss=float(torch.stack(self.losses).mean()),
            valid_loss=held_out_loss(self.forward, self.objective, self.source, recipe),
            learning_rate=learning_rate(self.step - 1, recipe),
            seconds=time.perf_counter() - self.began,
        )

    def save_due(self) -> bool:
        return self.step % self.recipe.save_every == 0 and self.step < self.recipe.steps

    def save(self) -> None:
        progress = Progress(self.step, time.perf_counter() - self.began)
        if self.recipe.shard:
            network = self.network
            if not self.sharded:
                network = self.accelerator.unwrap_model(self.network)
            save_shards(self.out, self.recipe, network, self._plain_optimiser(), progress)
        elif self.accelerator.is_main_process:
            network = self.accelerator.unwrap_model(self.network)
            save(self.out / CHECKPOINT, self.recipe, network, self.optimiser, progress)

    def _plain_optimiser(self) -> torch.optim.Optimizer:
        """Accelerate wraps it."""
        found: torch.optim.Optimizer = getattr(self.optimiser, "optimizer", self.optimiser)
        return found

    def finish(self) -> PreTrainedModel:
        """Save, plot the curve, and give the trained network, its adapters merged."""
        self.save()
        in_main_process = self.accelerator.is_main_process
        if in_main_process and (self.out / CURVE).exists():
            plot(self.out / CURVE, self.out / "curve.png")
        if self.sharded:  # the others' networks are in pieces: nobody uses them
            return self._whole() or cast("PreTrainedModel", self.network)
        trained = self.accelerator.unwrap_model(self.network, keep_fp32_wrapper=False)
        if not self.recipe.lora:
            return trained
        if in_main_process:
            trained.save_pretrained(self.out / "adapters")
        return trained.merge_and_unload()


def learning_rate(step: int, recipe: Recipe) -> float:
    """A linear rise, then a cosine down to a tenth or a line down to nothing."""
    if step < recipe.warmup:
        return recipe.learning_rate * (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    if recipe.decay == "linear":
        return recipe.learning_rate * max(0.0, 1 - done)
    return recipe.learning_rate * (0.1 + 0.9 * (1 + math.cos(math.pi * min(done, 1.0))) / 2)


def new_network(recipe: Recipe) -> PreTrainedModel:
    """The network that training begins with: the recipe's `start`, else its model with fresh
    weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(recipe.seed)
    if recipe.start is None:
        config = AutoConfig.for_model(**recipe.model)
        network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    else:
        network = load_network(recipe.start).train()
    family_settings = make_objective(recipe.objective, recipe.options).family_settings
    if family_settings.get("mask_token", 0) >= network.config.vocab_size:
        network.resize_token_embeddings(family_settings["mask_token"] + 1)
    if family_settings:
        network.config.forerun = family_settings
    return network


def check_tokens(network: PreTrainedModel, corpus: Corpus) -> None:
    """Refuse text whose tokens the network has no rows for."""
    embedding: Any = network.get_input_embeddings()
    rows = len(embedding.weight)
    most = max(int(corpus.train.max()), int(corpus.valid.max()))
    if most >= rows:
        raise BadOption(
            f"the text has the token {most}, and the network knows {rows}: it needs the tokenizer "
            "of its own checkpoint (tokenizer:)."
        )


def _is_library(network: object) -> bool:
    from transformers import PreTrainedModel

    return isinstance(network, PreTrainedModel)


def add_adapters(network: PreTrainedModel, rank: int) -> nn.Module:
    """The network with low-rank adapters beside its matrices: only they are trained."""
    if find_spec("peft") is None:
        raise BadOption(f"lora={rank} needs peft: pip install 'forerun[lora]'.")
    if not _is_library(network):
        raise BadOption(f"lora={rank}: adapters do not fit {network.config.model_type}.")
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    return get_peft_model(network, settings)


def parameter_groups(network: nn.Module, decay: float) -> list[dict[str, object]]:
    """Weight decay for matrices only."""
    trained = [p for p in network.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.dim() >= 2]
    vectors = [p for p in trained if p.dim() < 2]
    return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
