"""How an any-subset model is best trained: the ASSD paper's figures 3 to 6 at the zoo's size.

    python bench/distillation.py pack DATA --tokens tokens.npz                 # here
    python bench/any_subset_training.py run --tokens tokens.npz --out FOLDER --minutes 6  # on a GPU
    python bench/any_subset_training.py report FOLDER ...                      # here

`run` needs torch, transformers and numpy alone, writes FOLDER/results.json after each run, begins
none that would not end within `--minutes`, and goes on when it is run again. With `--only-seed S`
several processes can share a GPU and the folder. `report` adds to the docs' rows.

Each recipe differs from the base in what its name says. Base: blanks in lattice order, 90 to 99 %
of a text, from the weights of zoo:ar.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from study import (
    Results,
    Row,
    add_run_flags,
    error_of,
    machines,
    merged,
    over_seeds,
    packed_corpus,
    rate_share,
    run_in_time,
    seeds_of,
)

import forerun
from forerun.evaluate.judge import surprises
from forerun.evaluate.metrics import shannon_entropy
from forerun.evaluate.scattered import scattered_canvases
from forerun.train.any_subset import AnySubsetObjective
from forerun.train.data import Corpus
from forerun.train.networks import load_network

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from transformers import PreTrainedModel

CAUSAL = "zoo:ar"  # where training begins, and the judge of what is written
KNOWN = 0.05  # of a held-out text, as the paper validates
MEASURED_AT = (1 / 12, 1 / 4, 1 / 2, 1.0)  # shares of all steps
WARMED_UP_AT = 1 / 3  # between the second measurement and the third, so that the curve shows it

BASE = "base"
SCRATCH = "from scratch"
NARROW: dict[str, Any] = dict(masked=(0.90, 0.99), spans=0.0)
RECIPES: dict[str, dict[str, Any]] = {
    BASE: NARROW,
    "any permutation": NARROW | {"any_permutation": True},  # figure 3
    "wide": NARROW | {"masked": (0.15, 0.99)},  # figure 4
    "masking warm-up": NARROW | {"masked_start": 0.15},  # figure 5
    SCRATCH: NARROW,  # figure 6
}
COLUMNS = {
    "training loss": "training loss",
    "loss": "held-out loss",
    "nats": "nats under zoo:ar",
    "entropy": "entropy, bits",
    "tokens/forward": "tokens/forward",
}


@dataclass
class Study:
    """What all runs share."""

    corpus: Corpus
    arguments: argparse.Namespace

    def __post_init__(self) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.judge = forerun.load(CAUSAL, device=self.device.type, lanes=1)

    def autocast(self) -> torch.autocast:
        on_gpu = self.device.type == "cuda"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=on_gpu)


def begin(recipe: str, objective: AnySubsetObjective, seed: int) -> PreTrainedModel:
    network = load_network(CAUSAL)
    if recipe == SCRATCH:
        torch.manual_seed(seed)
        network = type(network)(network.config)
    network.config.forerun = objective.family_settings
    return network


def run_one(study: Study, recipe: str, seed: int) -> Row:
    """Train by one recipe, and measure on the way. Batches are the same for all recipes of a
    seed."""
    arguments = study.arguments
    began = time.perf_counter()
    options = dict(RECIPES[recipe])
    if "masked_start" in options:
        options["masked_warmup"] = round(arguments.steps * WARMED_UP_AT)
    objective = AnySubsetObjective(**options)
    network = begin(recipe, objective, seed).to(study.device).train()
    optimiser = torch.optim.AdamW(
        network.parameters(),
        lr=arguments.rate,
        betas=(0.9, 0.95),
        fused=study.device.type == "cuda",
    )
    measured_at = {max(1, round(share * arguments.steps)) for share in MEASURED_AT}
    losses: list[torch.Tensor] = []
    curve: list[Row] = []
    for step in range(arguments.steps):
        losses.append(train_step(study, network, objective, optimiser, step, seed))
        if step + 1 in measured_at:
            training_loss = float(torch.stack(losses).mean())
            losses.clear()
            found = measure(network, study, seed)
            curve.append({"step": step + 1, "training loss": training_loss, **found})
    row: Row = {"recipe": recipe, "seed": seed, "steps": arguments.steps, **options}
    return row | {"seconds": time.perf_counter() - began, "curve": curve}


def train_step(
    study: Study,
    network: PreTrainedModel,
    objective: AnySubsetObjective,
    optimiser: torch.optim.Optimizer,
    step: int,
    seed: int,
) -> torch.Tensor:
    arguments = study.arguments
    for group in optimiser.param_groups:
        group["lr"] = arguments.rate * rate_share(step, arguments.steps)
    tokens_BL = study.corpus.batch(step, arguments.batch, arguments.context, seed)
    parts = objective.prepare(tokens_BL, np.random.default_rng([seed, step]), step)
    with study.autocast():
        loss = objective.loss(network, *(part.to(study.device) for part in parts))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimiser.step()
    optimiser.zero_grad()
    return loss.detach()


def measure(network: PreTrainedModel, study: Study, seed: int) -> Row:
    """The joint loss of held-out blanks, and what ASSD writes into them: how likely, how varied, in
    how many forwards. Texts and blanks are always the same, and the order is the lattice's, in
    which every model decodes."""
    found: Row = {"loss": held_out_loss(network, study)}
    count = study.arguments.texts
    windows = study.corpus.held_out(count, study.arguments.context)
    model = forerun.from_network(
        copy.deepcopy(network).eval(),
        None,
        name="in training",
        lanes=count,
        max_context=study.arguments.context,
        graphs=False,  # it decodes once: capturing would take longer
    )
    canvases = scattered_canvases(windows.numpy(), KNOWN)
    results = model.infill_all(canvases, method="assd", temperature=1.0, seed=seed)
    written = [result.token_ids for result in results]
    samples = {
        "nats": surprises(study.judge, [(tokens[:1], tokens[1:]) for tokens in written]),
        "entropy": [shannon_entropy(tokens) for tokens in written],
        "tokens/forward": [result.stats.tokens / result.stats.forwards for result in results],
    }
    for name, values in samples.items():
        found |= {name: float(np.mean(values)), f"{name} error": error_of(values)}
    return found


@torch.no_grad()
def held_out_loss(network: PreTrainedModel, study: Study) -> float:
    tokens_BL = study.corpus.held_out(256, study.arguments.context)
    objective = AnySubsetObjective(masked=(1 - KNOWN, 1 - KNOWN), spans=0.0)
    parts = objective.prepare(tokens_BL, np.random.default_rng(0), 0)
    with study.autocast():
        return float(objective.loss(network, *(part.to(study.device) for part in parts)))


def run(arguments: argparse.Namespace) -> None:
    deadline = time.perf_counter() + 60 * arguments.minutes
    results = Results(arguments.out, arguments.only_seed)
    study = Study(packed_corpus(arguments.tokens), arguments)
    runs = [(recipe, seed) for seed in seeds_of(arguments) for recipe in RECIPES]
    run_in_time(results, runs, deadline, lambda recipe, seed: run_one(study, recipe, seed))


def report(folders: Sequence[Path]) -> None:
    """A table of the last measurement, and the curves. What the docs have stays, unless it was run
    again."""
    from page import DOCS, write_part

    rows = merged([DOCS / "any-subset-training.json", *folders], list(RECIPES))
    lines = [f"| recipe | seeds | {' | '.join(COLUMNS.values())} |", "|---" * 7 + "|"]
    for recipe in RECIPES:
        seeds = [row["curve"][-1] for row in rows if row["recipe"] == recipe]
        if seeds:
            cells = ["{:.2f} ± {:.2f}".format(*over_seeds(seeds, key)) for key in COLUMNS]
            lines.append(f"| {recipe} | {len(seeds)} | {' | '.join(cells)} |")
    lines += ["", f"`python bench/any_subset_training.py run`: {machines(rows)}."]
    lines += ["", "![What the recipes reach, step by step](any-subset-training.png)"]
    marks = ("<!-- training -->", "<!-- end of training -->")
    write_part(DOCS / "any-subset.md", "\n".join(lines), *marks)
    (DOCS / "any-subset-training.json").write_text(json.dumps(rows, indent=1))
    draw(rows, DOCS / "any-subset-training.png")


def draw(rows: Sequence[Row], file: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(COLUMNS), figsize=(19, 4), layout="constrained")
    for axes, (key, label) in zip(panels, COLUMNS.items()):
        for recipe in RECIPES:
            draw_curve(axes, [row["curve"] for row in rows if row["recipe"] == recipe], key, recipe)
        axes.set(xlabel="steps", title=label, xscale="log")
    panels[0].legend(fontsize=8)
    figure.savefig(file, dpi=110)


def draw_curve(axes: Axes, curves: Sequence[Sequence[Row]], key: str, recipe: str) -> None:
    if not curves:
        return
    points = [over_seeds(at_step, key) for at_step in zip(*curves)]
    steps = [point["step"] for point in curves[0]]
    means, errors = zip(*points)
    axes.errorbar(steps, means, errors, fmt="o-", markersize=3, capsize=2, label=recipe)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    add_run_flags(running)
    running.add_argument("--steps", type=int, default=1200)
    running.add_argument("--batch", type=int, default=64)
    running.add_argument("--context", type=int, default=128)
    running.add_argument("--rate", type=float, default=1e-3)
    running.add_argument("--texts", type=int, default=32, help="that each measurement writes")
    reporting = commands.add_parser("report")
    reporting.add_argument("folders", type=Path, nargs="+")
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments)
    else:
        report(arguments.folders)


if __name__ == "__main__":
    main()
