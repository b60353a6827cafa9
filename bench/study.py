"""What the training studies share: rows on file, one process for each seed if there are several,
time that runs out, and means over seeds.

A row is what one training run by one recipe with one seed gave.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forerun.train.data import Corpus

Row = dict[str, Any]
Run = tuple[str, int]  # recipe and seed


class Results:
    """The rows of a folder. A process that runs one seed alone has a file of its own, so that
    several can share the folder."""

    def __init__(self, folder: Path, only_seed: int | None):
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / ("results.json" if only_seed is None else f"results.{only_seed}.json")
        self.rows = read_rows(self.file)
        self.known = {run_of(row) for row in read_rows(folder)}

    def add(self, row: Row) -> None:
        self.known.add(run_of(row))
        self.rows.append(row | {"device": device_name(), "date": str(date.today())})
        unfinished = self.file.with_suffix(".tmp")
        unfinished.write_text(json.dumps(self.rows, indent=1))
        unfinished.replace(self.file)
        print(json.dumps(self.rows[-1]), flush=True)

    def done(self, recipe: str, seed: int) -> bool:
        return (recipe, seed) in self.known


def run_of(row: Row) -> Run:
    return row["recipe"], row["seed"]


def read_rows(place: Path) -> list[Row]:
    """The rows of a file, or of all results in a folder."""
    files = sorted(place.glob("results*.json")) if place.is_dir() else [place]
    return [row for file in files if file.exists() for row in json.loads(file.read_text())]


def merged(places: Iterable[Path], recipes: Sequence[str]) -> list[Row]:
    """The rows of all places in the order of the recipes; of one run's the last."""
    found = {run_of(row): row for place in places for row in read_rows(place)}
    return sorted(found.values(), key=lambda row: (recipes.index(row["recipe"]), row["seed"]))


def run_in_time(
    results: Results, runs: Iterable[Run], deadline: float, run_one: Callable[[str, int], Row]
) -> None:
    """Do the runs that are not done yet, and begin none that would not end in time."""
    longest = 0.0
    for recipe, seed in runs:
        if results.done(recipe, seed):
            continue
        began = time.perf_counter()
        if began + 1.2 * longest > deadline:
            print("time is up: run again to go on", flush=True)
            return
        results.add(run_one(recipe, seed))
        longest = max(longest, time.perf_counter() - began)


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=Path, required=True, help="distillation.py packs them")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only-seed", type=int, help="one process for each, side by side")


def seeds_of(arguments: argparse.Namespace) -> list[int]:
    only = arguments.only_seed
    return list(range(arguments.seeds)) if only is None else [only]


def packed_corpus(file: Path) -> Corpus:
    held = np.load(file)
    return Corpus(held["train"], held["valid"])


def rate_share(step: int, steps: int) -> float:
    """Of the learning rate: a warm-up of a twentieth, then down to nothing."""
    return min(1.0, (step + 1) / max(1, steps // 20)) * (1 - step / steps)


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def machines(rows: Iterable[Row]) -> str:
    """On what and when the rows were measured."""
    rows = list(rows)
    devices, dates = ({row[key]: None for row in rows if key in row} for key in ("device", "date"))
    return f"{', '.join(devices)}, {' and '.join(sorted(dates))}"


def error_of(values: Sequence[Any]) -> float:
    return float(np.std(values, ddof=1) / math.sqrt(len(values)))


def over_seeds(rows: Sequence[Row], key: str) -> tuple[float, float]:
    """The mean over seeds, and the larger of its standard error and that over prompts."""
    values = [row[key] for row in rows]
    errors = [row.get(f"{key} error", 0.0) for row in rows]
    spread = error_of(values) if len(values) > 1 else 0.0
    return float(np.mean(values)), max(spread, float(np.mean(errors)))
