"""What the recipes for a 7B take, by calculation from measured steps:

    python bench/recipes.py [--steps docs/train-step.json]     (prints the table of docs/scale.md)

Memory is arithmetic (`forerun.scale.training`); hours are the seconds of one measured forward and
its way back (`bench/train_step.py`, one GPU), times the forwards of the run, over an efficiency
that leaves a share for the network and the optimiser.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import yaml

from forerun.profile.shapes import SHAPES
from forerun.scale.training import Run, hours_of, memory_of, network_gigabytes

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "examples" / "recipes"
SHAPE = SHAPES["qwen2.5-7b"]
GPUS = (2, 8, 16)
SHARE = 4  # sequences of a forward, as in bench/train_step.py
HEAD = ("recipe", "GPUs", "GiB of each: state, gathered, activations, logits, in all")


def run_of(recipe: dict, gpus: int) -> Run:
    """A recipe on some GPUs; `accumulate` follows from their number."""
    options = recipe["options"]
    rows = 2 * recipe["context"]  # block: the text, and the text as it is masked
    if recipe["objective"] == "consistency":
        # the text and its guesses; then real text, in a forward of its own
        rows = recipe["context"] + options["block"] * options["blocks"]
    return Run(SHAPE, gpus, SHARE, rows, recipe["batch"], recipe["steps"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", default=str(ROOT / "docs" / "train-step.json"))
    arguments = parser.parse_args()
    file = Path(arguments.steps)
    measured = json.loads(file.read_text()) if file.exists() else {}
    print("| " + " | ".join((*HEAD, "GB a step", "hours")) + " |")
    print("|---|---|---|---|---|")
    for name in ("consistency", "block"):
        recipe = yaml.safe_load((RECIPES / f"7b-{name}.yaml").read_text())
        for gpus in GPUS:
            run = run_of(recipe, gpus)
            memory = memory_of(run)
            parts = (memory.state, memory.gathered, memory.activations, memory.logits, memory.total)
            told = ", ".join(f"{part:.1f}" for part in parts)
            seconds = measured.get(name, {}).get("seconds")
            hours = f"{hours_of(run, seconds):.1f}" if seconds else "not measured"
            away = network_gigabytes(run)
            print(f"| `7b-{name}.yaml` | {gpus} | {told} | {away:.0f} | {hours} |")
    if measured:
        print(f"\n`bench/train_step.py` on {measured['machine']}.")


if __name__ == "__main__":
    main()
