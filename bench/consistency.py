"""Ablations of consistency distillation (Tables 4 and 5 at this scale):

    python bench/consistency.py DATA --out FOLDER [--steps 1000] [--seeds 2] [--only NAME ...]

Another model, by adapters, and a second round:

    python bench/consistency.py DATA --out FOLDER --start smollm --lora 16 --batch 32 --rate 5e-4 \\
        --texts 4096 --only base CLLM
    python bench/consistency.py DATA --out FOLDER --start zoo:consistency --only base "blocks of 32"

docs/consistency.md from such results:

    python bench/consistency.py --publish FILE [FILE ...]

The first recipe is that of zoo:consistency; every other differs from it in what its name says. DATA
is a folder of .py files or a .jsonl[.xz] corpus. FOLDER gets results.json, which a further run adds
to, and each recipe's model or adapters. Minutes on a GPU for each recipe, hours on a CPU. With
`--start`, another model than zoo:ar is distilled.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jacobi import GIVEN, decode, per_forward, quality
from page import DOCS, write_tables

import forerun
from forerun import zoo
from forerun.evaluate.judge import surprises
from forerun.profile.machine import machine
from forerun.train.autoregressive import AutoregressiveObjective
from forerun.train.data import Corpus, tokenise
from forerun.train.loop import new_network, train
from forerun.train.networks import move
from forerun.train.recipe import Recipe, read
from forerun.train.run import tokenizer_of
from forerun.train.validation import held_out_loss

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from transformers import PreTrainedModel

BASE = read(zoo.recipe("consistency"))
REFERENCE = "zoo:ar"  # what zoo:consistency was distilled from
RECIPES: dict[str, dict[str, Any]] = {
    "base": {},
    "guesses repeat": {"start": "repeat"},
    "no loss on own text": {"own_weight": 0.0},
    "guesses repeat, no loss on own text": {"start": "repeat", "own_weight": 0.0},
    "schedule random": {"schedule": "random"},
    "schedule reverse": {"schedule": "reverse"},
    "window 4": {"window": 4},
    "window 12": {"window": 12},
    "context noisy": {"context": "noisy"},
    "context of the window": {"context": "window"},
    "CLLM": {"schedule": "random", "own_weight": 1.0, "real_weight": 0.0},
    "real text x 1/2": {"real_weight": 0.5},
    "real text x 5": {"real_weight": 5.0},
    "blocks of 32": {"block": 32, "blocks": 6, "window": 6},
}
SECOND = "second round: "
PROMPTS = 64
PAID = {"loss": "held-out loss, nats per token", "nats": "nats of its own text under {}"}
DECODED = {"jacobi": "jacobi, n = 16", "jacobi 32": "n = 32", "recycling": "+ recycling"}

Row = dict[str, Any]  # one trained network, as results.json has it


def train_by(recipe: Recipe, name: str, corpus: Corpus, out: Path) -> PreTrainedModel:
    """A network trained by one recipe. Recipes with the same blocks and first guesses share their
    trajectories."""
    seed = recipe.seed
    options = recipe.options
    folder = out / f"{name.replace(' ', '-')}.{recipe.steps}.{seed}"
    shared = out / f"trajectories.{options['start']}.{options['block']}.{seed}"
    shared.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "trajectories").exists():
        (folder / "trajectories").symlink_to(shared.resolve())
    network = train(recipe, corpus, folder)
    (folder / "checkpoint.pt").unlink()  # the model, kept below, takes a third of the space
    if not recipe.lora:
        network.save_pretrained(folder / "model")
        tokenizer_of(recipe).save_pretrained(folder / "model")
    return network


def measure(network: PreTrainedModel, corpus: Corpus, judge: forerun.Model, recipe: Recipe) -> Row:
    """What a network decodes greedily after held-out prompts: how fast, how likely to the model it
    was made from, how varied."""
    start = recipe.options["start"]
    loss = held_out_loss(network.eval(), AutoregressiveObjective(), corpus, recipe)
    model = forerun.from_network(
        network, tokenizer_of(recipe), name="distilled", lanes=PROMPTS, max_context=256
    )
    prompts = corpus.held_out(PROMPTS, GIVEN).tolist()
    found: Row = {"loss": loss}
    plain, _ = decode(model, prompts, PROMPTS, method="ar")
    requests = {
        "jacobi": dict(method="jacobi", block=16, start=start),
        "jacobi 32": dict(method="jacobi", block=32, start=start),
        "recycling": dict(method="multiblock", block=16, blocks=1, refill=True, start=start),
    }
    for label, request in requests.items():
        results, _ = decode(model, prompts, PROMPTS, **request)
        found[label], found[f"{label} error"] = per_forward(results)
    nats = surprises(judge, [(r.prompt_ids, r.token_ids) for r in plain])
    found["nats"] = float(np.mean(nats))
    found["nats error"] = float(np.std(nats) / math.sqrt(len(nats)))
    return found | quality(model, plain, corpus)


def group_by_recipe(rows: list[Row]) -> list[list[Row]]:
    """Rows that differ in their seed only, the model that was distilled first."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["recipe"], row["steps"]), []).append(row)
    order = [REFERENCE, *RECIPES, "zoo:consistency", *(SECOND + name for name in RECIPES)]

    def place(group: tuple[str, int]) -> tuple[int, int]:
        recipe, steps = group
        return order.index(recipe) if recipe in order else -1, -steps

    return [groups[group] for group in sorted(groups, key=place)]


def mean_and_error(seeds: list[Row], key: str) -> tuple[float, float]:
    """The mean over seeds, and the larger of the spread over seeds and the standard error over
    prompts."""
    seeds = [row for row in seeds if key in row]  # the first runs did not decode at n = 32
    values = [row[key] for row in seeds] or [math.nan]
    errors = [row.get(f"{key} error", 0.0) for row in seeds]
    return float(np.mean(values)), max(float(np.std(values)), *errors, 0.0)


def cell(seeds: list[Row], key: str, form: str = ".2f") -> str:
    mean, error = mean_and_error(seeds, key)
    if math.isnan(mean):
        return ""
    if not error:
        return f"{mean:{form}}"
    return f"{mean:{form}} ± {error:{form}}"


def table(rows: list[Row]) -> list[str]:
    head = ["recipe", "steps", "seeds", "held-out loss", *DECODED.values()]
    head += ["its text's nats", "entropy"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for seeds in group_by_recipe(rows):
        recipe = seeds[0]["recipe"]
        steps = seeds[0]["steps"] or ""
        cells = [recipe, f"{steps}", f"{len(seeds)}", cell(seeds, "loss", ".3f")]
        cells += [cell(seeds, key) for key in (*DECODED, "nats", "entropy")]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def draw(models: dict[str, list[Row]]) -> None:
    """What a recipe gains against what it pays."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    panels = [(name, key) for name in models for key in PAID]
    figure = pyplot.figure(figsize=(11, 8), layout="constrained")
    heights = [8 + len(rows) for rows in models.values()]
    grid = figure.subplots(
        len(models), len(PAID), sharey="row", squeeze=False, height_ratios=heights
    )
    for axes, (name, key) in zip(grid.flat, panels):
        draw_panel(axes, models[name], key)
        axes.set(xlabel=PAID[key].format(name), ylabel=f"{name}: tokens per forward", xmargin=0.4)
    figure.savefig(DOCS / "consistency.png", dpi=120)
    pyplot.close(figure)


def draw_panel(axes: Axes, rows: list[Row], key: str) -> None:
    """Tokens per forward against one price, every recipe with its name beside it."""
    label_height = 0.0  # labels must not overlap
    fewest_steps = min(row["steps"] for row in rows if row["steps"])
    paid = [row[key] for row in rows]
    label_gap = 0.06 * (max(paid) - min(paid))
    line = dict(arrowstyle="-", color="0.7", lw=0.5)
    for seeds in sorted(
        group_by_recipe(rows), key=lambda seeds: mean_and_error(seeds, "jacobi")[0]
    ):
        x, x_error = mean_and_error(seeds, key)
        y, y_error = mean_and_error(seeds, "jacobi")
        axes.errorbar(x, y, y_error, x_error, "o", color="C0")
        steps = seeds[0]["steps"]
        label = seeds[0]["recipe"]
        if steps > fewest_steps:
            label += f", {steps:,} steps"
        label_height = max(y, label_height + 0.075)
        label_place = (x + x_error + label_gap, label_height)
        axes.annotate(label, (x, y), label_place, fontsize=7, va="center", arrowprops=line)


def publish(files: list[Path]) -> None:
    """All results: every recipe, seed and number of steps once."""
    found = [row for file in files for row in json.loads(file.read_text())]
    for row in found:
        if row["start"] == "zoo:consistency" and row["recipe"] in RECIPES:
            row["recipe"] = SECOND + row["recipe"]
    unique = {(row["start"], row["recipe"], row["steps"], row["seed"]): row for row in found}
    rows = list(unique.values())
    (DOCS / "consistency.json").write_text(json.dumps(rows, indent=1))
    models: dict[str, list[Row]] = {}
    for row in rows:
        models.setdefault(judge_name(row["start"]), []).append(row)
    lines = [line for of_one in models.values() for line in table(of_one)]
    lines.append(f"`python bench/consistency.py DATA`: {PROMPTS} prompts; {rows[-1]['machine']}.")
    write_tables("consistency.md", "\n".join(lines))
    draw(models)


def judge_name(start: str) -> str:
    """The model that text is judged by: the one that was distilled, of the zoo the first."""
    return REFERENCE if start.startswith("zoo:") else start


class Results:
    """results.json: read where it exists, and written after every row."""

    def __init__(self, file: Path):
        self.file = file
        self.rows: list[Row] = json.loads(file.read_text()) if file.exists() else []

    def has(self, **expected: Any) -> bool:
        return any(all(row[key] == expected[key] for key in expected) for row in self.rows)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.file.write_text(json.dumps(self.rows, indent=1))
        print(row, flush=True)


def ablate(base: Recipe, data: str, folder: Path, names: list[str], seeds: int) -> list[Row]:
    """Measure the model to distil, then train by each recipe and measure what came of it."""
    start = base.start or REFERENCE
    # Another model has other tokens and texts.
    out = folder / Path(start.replace(":", "-")).name
    out.mkdir(parents=True, exist_ok=True)
    corpus = tokenise(data, tokenizer_of(base), out / "tokens.npz")
    judge = forerun.load(judge_name(start))
    results = Results(out / "results.json")

    def add(
        name: str, recipe: Recipe, steps: int, seconds: float, network: PreTrainedModel
    ) -> None:
        found = measure(network, corpus, judge, recipe)
        made_by = dict(start=start, recipe=name, seed=recipe.seed, steps=steps)
        results.add({**made_by, "machine": machine(), "seconds": seconds, **found})

    if not results.has(recipe=start):
        network = new_network(base)
        move(network, judge.backbone.device)
        add(start, base, 0, 0.0, network)
    for seed in range(seeds):
        for name in names:
            if results.has(recipe=name, seed=seed, steps=base.steps):
                continue
            began = time.perf_counter()
            recipe = replace(base, options=base.options | RECIPES[name], seed=seed)
            network = train_by(recipe, name, corpus, out)
            add(name, recipe, base.steps, time.perf_counter() - began, network)
    return results.rows


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="?")
    parser.add_argument(
        "--publish",
        nargs="+",
        type=Path,
        help="write docs/consistency.md by the results in these files",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/consistency"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--start", default=REFERENCE, help="the model to distil")
    parser.add_argument("--lora", type=int, default=0, help="train adapters of this rank")
    parser.add_argument("--batch", type=int, default=BASE.batch)
    parser.add_argument("--rate", type=float, default=BASE.learning_rate)
    parser.add_argument(
        "--texts",
        type=int,
        default=BASE.options["sequences"],
        help="that the model writes before training",
    )
    parser.add_argument("--only", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    arguments = parser.parse_args()
    if not arguments.publish and not arguments.data:
        parser.error("DATA is missing")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if arguments.publish:
        publish(arguments.publish)
        return
    base = replace(
        BASE,
        start=arguments.start,
        steps=arguments.steps,
        batch=arguments.batch,
        learning_rate=arguments.rate,
        lora=arguments.lora,
        options=BASE.options | {"sequences": arguments.texts},
        validate_every=max(1, arguments.steps // 5),
        save_every=10**6,
    )
    rows = ablate(base, arguments.data, arguments.out, arguments.only, arguments.seeds)
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
