"""`checkpoint.pt`: what a stopped run needs to go on as if it had not stopped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from forerun.errors import BadOption
from forerun.train.recipe import PLACEMENT, Recipe


@dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    step: int = 0
    seconds: float = 0.0


def save(
    file: Path, recipe: Recipe, network: nn.Module, optimiser: Optimizer, progress: Progress
) -> None:
    """Write another file and rename it: an interruption leaves the old checkpoint whole."""
    state = dict(
        recipe=recipe.as_dict(),
        step=progress.step,
        seconds=progress.seconds,
        network=network.state_dict(),
        optimiser=optimiser.state_dict(),
    )
    unfinished = file.with_suffix(".tmp")
    torch.save(state, unfinished)
    unfinished.replace(file)


def check_recipe(file: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse what another recipe made. Where and how it was computed may change."""
    changed = [
        key for key, value in now.items() if key not in PLACEMENT and before.get(key) != value
    ]
    if changed:
        raise BadOption(
            f"{file} was made by another recipe (it differs in {', '.join(changed)}): choose "
            "another folder, or remove it."
        )


def restore(file: Path, recipe: Recipe, network: nn.Module, optimiser: Optimizer) -> Progress:
    """Load network and optimiser from the checkpoint, if there is one."""
    if not file.exists():
        return Progress()
    state = torch.load(file, map_location="cpu", weights_only=True)
    check_recipe(file, state["recipe"], recipe.as_dict())
    network.load_state_dict(state["network"])
    optimiser.load_state_dict(state["optimiser"])
    return Progress(state["step"], state["seconds"])
