"""What the recipes for a 7B take, by calculation from measured steps:

    python bench/recipes.py [--steps docs/train-step.json]     (prints the tables of docs/scale.md)
    python bench/recipes.py --publish                          (writes them there)

Memory is arithmetic (`forerun.scale.training`); hours are the seconds of one measured forward and
its way back (`bench/train_step.py`, one GPU), times the forwards of the run, over an efficiency
that leaves a share for the network and the optimiser.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import yaml
from page import write_part

from forerun.profile.shapes import SHAPES
from forerun.scale.training import (
    DrafterRun,
    Memory,
    Run,
    hours_of,
    memory_of,
    memory_of_drafter,
    memory_of_own_text,
    memory_of_step,
    network_gigabytes,
)
from forerun.train.drafter import DrafterRecipe, read_recipe

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "examples" / "recipes"
SHAPE = SHAPES["qwen2.5-7b"]
GPUS = (2, 8, 16)
SHARE = 4  # sequences of a forward, as in bench/train_step.py
HEAD = ("recipe", "GPUs", "GiB of each: state, gathered, activations, logits, target, in all")


def run_of(recipe: dict, gpus: int) -> Run:
    """A recipe on some GPUs; `accumulate` follows from their number."""
    options = recipe["options"]
    rows = 2 * recipe["context"]  # block: the text, and the text as it is masked
    if recipe["objective"] == "consistency":
        # the text and its guesses; and real text, in a forward of its own that waits for the other
        rows = 2 * recipe["context"] + options["block"] * options["blocks"]
    return Run(SHAPE, gpus, SHARE, rows, recipe["batch"], recipe["steps"])


def drafter_of(recipe: DrafterRecipe) -> DrafterRun:
    return DrafterRun(
        SHAPE,
        recipe.layers,
        recipe.features,
        recipe.batch,
        recipe.text.longest,
        recipe.anchors,
        recipe.block,
        recipe.markov_rank,
        recipe.text.texts,
    )


def parts_of(memory: Memory) -> str:
    parts = (memory.state, memory.gathered, memory.activations, memory.logits)
    return ", ".join(f"{part:.1f}" for part in (*parts, memory.frozen, memory.total))


def shared_rows(name: str, measured: dict) -> Iterator[str]:
    """Of a recipe that is shared out over GPUs."""
    recipe = yaml.safe_load((RECIPES / f"7b-{name}.yaml").read_text())
    for gpus in GPUS:
        run = run_of(recipe, gpus)
        seconds = measured.get(name, {}).get("seconds")
        hours = f"{hours_of(run, seconds):.1f}" if seconds else "not measured"
        away = network_gigabytes(run)
        yield f"| `7b-{name}.yaml` | {gpus} | {parts_of(memory_of(run))} | {away:.0f} | {hours} |"


def drafter_row(recipe: DrafterRecipe) -> str:
    """Its recipe says how long it trains, not how many steps."""
    hours = (recipe.text.seconds + recipe.seconds) / 3600
    parts = parts_of(memory_of_drafter(drafter_of(recipe)))
    return f"| `7b-drafter.yaml` | 1 | {parts} | 0 | {hours:.1f} |"


def checked(measured: dict) -> Iterator[str]:
    """The same arithmetic for the steps that were measured, beside the most memory they took."""
    drafter = read_recipe(str(RECIPES / "7b-drafter.yaml"))
    foretold = {"drafter": memory_of_drafter(drafter_of(drafter)).total}
    for name in ("consistency", "block"):
        recipe = yaml.safe_load((RECIPES / f"7b-{name}.yaml").read_text())
        foretold[name] = memory_of_step(run_of(recipe, 1)).total
    for name, total in sorted(foretold.items()):
        told = measured.get(name)
        if told and told["peak GiB"]:
            peak, seconds = told["peak GiB"], told["seconds"]
            off = total / peak - 1
            yield f"| {name} | {total:.1f} | {peak:.1f} | {off:+.0%} | {seconds:.2f} |"


def table(measured: dict) -> str:
    recipe = read_recipe(str(RECIPES / "7b-drafter.yaml"))
    lines = ["| " + " | ".join((*HEAD, "GB a step", "hours")) + " |", "|---|---|---|---|---|"]
    for name in ("consistency", "block"):
        lines += shared_rows(name, measured)
    lines.append(drafter_row(recipe))
    lines += ["", "| one step on one GPU | GiB calculated | GiB measured | off by | seconds |"]
    lines += ["|---|---|---|---|---|", *checked(measured), ""]
    if "drafter" in measured:
        steps = recipe.seconds / measured["drafter"]["seconds"]
        lines.append(f"{recipe.seconds:.0f} seconds are {steps:,.0f} steps of the drafter.")
    writing = memory_of_own_text(drafter_of(recipe))
    lines.append(f"While the target writes its text, {writing:.1f} GiB are taken.")
    lines.append(f"`bench/train_step.py` on {measured['machine']}.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", default=str(ROOT / "docs" / "train-step.json"))
    parser.add_argument("--publish", action="store_true")
    arguments = parser.parse_args()
    made = table(json.loads(Path(arguments.steps).read_text()))
    if arguments.publish:
        write_part(ROOT / "docs" / "scale.md", made, "<!-- recipes -->", "<!-- end recipes -->")
    else:
        print(made)


if __name__ == "__main__":
    main()
