"""Ablations of consistency distillation (Tables 4 and 5 at this scale):

    python bench/consistency.py DATA --out FOLDER [--steps 1000] [--seeds 2] [--only NAME ...]
    python bench/consistency.py DATA --out FOLDER --start smollm --lora 16 --batch 32 --rate 5e-4 --texts 4096 --only base CLLM
    python bench/consistency.py DATA --out FOLDER --start zoo:consistency --only base "blocks of 32"       (a second round)
    python bench/consistency.py --publish FILE [FILE ...]           (docs/consistency.md by such results)

The first recipe is that of zoo:consistency; every other differs from it in what its name says. DATA is a folder of .py files or
a .jsonl[.xz] corpus. FOLDER gets results.json, which a further run adds to, and each recipe's model or adapters. Minutes on a GPU
for each recipe, hours on a CPU. With `--start`, another model than zoo:ar is distilled.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jacobi import GIVEN, decode, per_forward, quality
from page import DOCS, write_tables

import forerun
from forerun import zoo
from forerun.evaluate.compare import machine, surprises
from forerun.train.data import Corpus, tokenise
from forerun.train.loop import new_network, train, validate
from forerun.train.objectives import make
from forerun.train.recipe import Recipe, read
from forerun.train.run import tokenizer_of

BASE = read(zoo.recipe("consistency"))
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


def made(name: str, recipe: Recipe, corpus: Corpus, out: Path) -> Any:
    """A network trained by one recipe. Recipes with the same blocks and first guesses share their trajectories."""
    seed, options = recipe.seed, recipe.options
    folder = out / f"{name.replace(' ', '-')}.{recipe.steps}.{seed}"
    shared = out / f"trajectories.{options['start']}.{options['block']}.{seed}"
    shared.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "trajectories").exists():
        (folder / "trajectories").symlink_to(shared.resolve())
    network = train(recipe, corpus, folder)
    (folder / "checkpoint.pt").unlink()  # what matters is kept below, in a third of the space
    if not recipe.lora:
        network.save_pretrained(folder / "model")
        tokenizer_of(recipe).save_pretrained(folder / "model")
    return network


def measured(network: Any, corpus: Corpus, judge: forerun.Model, recipe: Recipe) -> dict[str, Any]:
    """What a network decodes greedily after held-out prompts: how fast, how likely to the model it was made from, how varied."""
    device, start = next(network.parameters()).device, recipe.options["start"]
    loss = validate(network.eval(), make("ar", {}), corpus, recipe, device)
    model = forerun.from_network(network, tokenizer_of(recipe), name="distilled", lanes=PROMPTS, max_context=256)
    prompts = corpus.held_out(PROMPTS, GIVEN).tolist()
    found: dict[str, Any] = {"loss": loss}
    plain, _ = decode(model, prompts, PROMPTS, method="ar")
    ways = {
        "jacobi": dict(method="jacobi", block=16, start=start),
        "jacobi 32": dict(method="jacobi", block=32, start=start),
        "recycling": dict(method="multiblock", block=16, blocks=1, refill=True, start=start),
    }
    for label, way in ways.items():
        found[label], found[f"{label} error"] = per_forward(decode(model, prompts, PROMPTS, **way)[0])
    nats = surprises(judge, [(r.prompt_ids, r.token_ids) for r in plain])
    found |= {"nats": float(np.mean(nats)), "nats error": float(np.std(nats) / math.sqrt(len(nats)))}
    return found | quality(model, plain, corpus)


def by_recipe(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Rows that differ in their seed only, the model that was distilled first."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["recipe"], row["steps"]), []).append(row)
    order = [BASE.start, *RECIPES, "zoo:consistency", *(SECOND + name for name in RECIPES)]
    place = lambda key: (order.index(key[0]) if key[0] in order else -1, -key[1])  # noqa: E731
    return [groups[key] for key in sorted(groups, key=place)]


def mean_and_error(own: list[dict[str, Any]], key: str) -> tuple[float, float]:
    """The mean over seeds, and the larger of the spread over seeds and the standard error over prompts."""
    own = [row for row in own if key in row]  # the first runs did not decode at n = 32
    values = [row[key] for row in own] or [math.nan]
    return float(np.mean(values)), max([float(np.std(values)), *(row.get(f"{key} error", 0.0) for row in own)])


def table(rows: list[dict[str, Any]]) -> list[str]:
    ways = {"jacobi": "jacobi, n = 16", "jacobi 32": "n = 32", "recycling": "+ recycling"}
    head = ("recipe", "steps", "seeds", "held-out loss", *ways.values(), "its text's nats", "entropy", "parse")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]

    def cell(own: list[dict[str, Any]], key: str, form: str = ".2f") -> str:
        mean, error = mean_and_error(own, key)
        return "" if math.isnan(mean) else f"{mean:{form}} ± {error:{form}}" if error else f"{mean:{form}}"

    for own in by_recipe(rows):
        cells = [cell(own, "loss", ".3f"), *(cell(own, key) for key in (*ways, "nats", "entropy"))]
        parse = f"{np.mean([row['parses'] for row in own]):.0%}"
        lines.append(f"| {own[0]['recipe']} | {own[0]['steps'] or ''} | {len(own)} | {' | '.join(cells)} | {parse} |")
    return [*lines, ""]


def draw(models: dict[str, list[dict[str, Any]]]) -> None:
    """What a recipe gains against what it pays."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    panels = [(name, key) for name in models for key in PAID]
    figure = pyplot.figure(figsize=(11, 8), layout="constrained")
    heights = [8 + len(rows) for rows in models.values()]
    grid = figure.subplots(len(models), len(PAID), sharey="row", squeeze=False, height_ratios=heights)
    for axes, (name, key) in zip(grid.flat, panels):
        rows, written = models[name], 0.0
        least, paid = min(row["steps"] for row in rows if row["steps"]), [row[key] for row in rows]
        aside = 0.06 * (max(paid) - min(paid))
        for own in sorted(by_recipe(rows), key=lambda own: mean_and_error(own, "jacobi")[0]):
            (x, x_error), (y, y_error) = mean_and_error(own, key), mean_and_error(own, "jacobi")
            axes.errorbar(x, y, y_error, x_error, "o", color="C0")
            steps = own[0]["steps"]
            label, written = own[0]["recipe"] + (f", {steps:,} steps" if steps > least else ""), max(y, written + 0.075)
            line = dict(arrowstyle="-", color="0.7", lw=0.5)
            axes.annotate(label, (x, y), (x + x_error + aside, written), fontsize=7, va="center", arrowprops=line)
        axes.set(xlabel=PAID[key].format(name), ylabel=f"{name}: tokens per forward", xmargin=0.4)
    figure.savefig(DOCS / "consistency.png", dpi=120)
    pyplot.close(figure)


def publish(files: list[Path]) -> None:
    """What was measured of every model and of what was made of it, every recipe, seed and number of steps once."""
    found = [row for file in files for row in json.loads(file.read_text())]
    for row in found:
        if row["start"] == "zoo:consistency" and row["recipe"] in RECIPES:
            row["recipe"] = SECOND + row["recipe"]
    rows = list({(row["start"], row["recipe"], row["steps"], row["seed"]): row for row in found}.values())
    (DOCS / "consistency.json").write_text(json.dumps(rows, indent=1))
    models: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        models.setdefault(BASE.start if row["start"].startswith("zoo:") else row["start"], []).append(row)
    lines = [line for of_one in models.values() for line in table(of_one)]
    lines.append(f"`python bench/consistency.py DATA`: {PROMPTS} prompts; {rows[-1]['machine']}.")
    write_tables("consistency.md", "\n".join(lines))
    draw(models)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?")
    parser.add_argument("--publish", nargs="+", type=Path, help="write docs/consistency.md by the results in these files")
    parser.add_argument("--out", type=Path, default=Path("runs/consistency"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--start", default=BASE.start, help="the model to distil")
    parser.add_argument("--lora", type=int, default=0, help="train adapters of this rank")
    parser.add_argument("--batch", type=int, default=BASE.batch)
    parser.add_argument("--rate", type=float, default=BASE.learning_rate)
    parser.add_argument("--texts", type=int, default=BASE.options["sequences"], help="that the model writes before training")
    parser.add_argument("--only", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    arguments = parser.parse_args()
    if arguments.publish:
        return publish(arguments.publish)
    if not arguments.data:
        parser.error("DATA is missing")
    base = replace(
        BASE, start=arguments.start, steps=arguments.steps, batch=arguments.batch, learning_rate=arguments.rate,
        lora=arguments.lora, options=BASE.options | {"sequences": arguments.texts},
        validate_every=max(1, arguments.steps // 5), save_every=10**6,
    )  # fmt: skip
    out = arguments.out / Path(arguments.start.replace(":", "-")).name  # another model has other tokens and texts
    out.mkdir(parents=True, exist_ok=True)
    corpus = tokenise(arguments.data, tokenizer_of(base), out / "tokens.npz")
    judge = forerun.load(BASE.start if arguments.start.startswith("zoo:") else arguments.start)
    results = out / "results.json"
    rows = json.loads(results.read_text()) if results.exists() else []

    def keep(name: str, recipe: Recipe, steps: int, seconds: float, network: Any) -> None:
        found = measured(network, corpus, judge, recipe)
        of = dict(start=arguments.start, recipe=name, seed=recipe.seed, steps=steps)
        rows.append({**of, "machine": machine(), "seconds": seconds, **found})
        results.write_text(json.dumps(rows, indent=1))
        print(rows[-1], flush=True)

    if not any(row["recipe"] == arguments.start for row in rows):
        keep(arguments.start, base, 0, 0.0, new_network(base).to(judge.backbone.device))
    for seed in range(arguments.seeds):
        for name in arguments.only:
            if not any((row["recipe"], row["seed"], row["steps"]) == (name, seed, arguments.steps) for row in rows):
                began, recipe = time.perf_counter(), replace(base, options=base.options | RECIPES[name], seed=seed)
                network = made(name, recipe, corpus, out)
                keep(name, recipe, arguments.steps, time.perf_counter() - began, network)
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
