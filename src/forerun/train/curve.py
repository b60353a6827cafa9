"""The training curve: one row for every validation, in `curve.csv`, and a plot of it."""

from __future__ import annotations

import csv
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NotRequired, TypedDict

CURVE = "curve.csv"


class ProgressRow(TypedDict):
    """What a validation found. The keys are the columns of `curve.csv`."""

    step: int
    tokens: int  # trained on so far
    loss: float  # mean since the last row
    valid_loss: float
    learning_rate: float
    seconds: float
    # of decoding, where the recipe asks for it; perplexity needs a judge
    entropy: NotRequired[float]
    perplexity: NotRequired[float]
    tokens_per_forward: NotRequired[float]


Report = Callable[[ProgressRow], None]  # called with every row as it is made


def append_row(file: Path, row: ProgressRow) -> None:
    """Add a row to the curve. Rows that a resumed run makes again replace those it had."""
    before = _read(file) if file.exists() else []
    kept = [old for old in before if int(old["step"]) < row["step"]]
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, row.keys())
        writer.writeheader()
        writer.writerows(kept)
        writer.writerow({name: _short(value) for name, value in row.items()})


def _read(file: Path) -> list[dict[str, str]]:
    with file.open() as lines:
        return list(csv.DictReader(lines))


def _short(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value


def plot(curve: Path, picture: Path) -> None:
    """Loss and held-out loss against the tokens trained on, where matplotlib is installed."""
    if find_spec("matplotlib") is None:
        return
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    rows = _read(curve)
    tokens = [int(row["tokens"]) / 1e6 for row in rows]
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for column, label in (("loss", "training"), ("valid_loss", "held out")):
        axes.plot(tokens, [float(row[column]) for row in rows], label=label)
    axes.set(xlabel="million tokens", ylabel="nats per token")
    axes.legend()
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
