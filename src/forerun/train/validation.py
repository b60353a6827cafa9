"""What a validation measures: the loss on held-out text, and how the network decodes."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import numpy as np
import torch

from forerun.train.base import Objective
from forerun.train.curve import ProgressRow
from forerun.train.data import TokenSource
from forerun.train.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WINDOWS = 512  # held-out windows that the loss is measured on
LARGEST_BATCH = 128


@torch.no_grad()
def held_out_loss(
    network: PreTrainedModel,
    objective: Objective,
    source: TokenSource[object],
    recipe: Recipe,
    windows: int = WINDOWS,
) -> float:
    """The objective on held-out windows, always the same ones, in the recipe's batches."""
    device = next(network.parameters()).device
    measured = objective.held_out()
    tokens_BL = source.held_out(windows, recipe.context)
    whole = measured.prepare(tokens_BL, np.random.default_rng(recipe.seed), recipe.steps)
    total = 0.0
    for part in zip(*(tensor.split(min(recipe.batch, LARGEST_BATCH)) for tensor in whole)):
        loss = measured.loss(network, *(tensor.to(device) for tensor in part))
        total += float(loss) * len(part[0])
    return total / len(whole[0])


def add_decoded(
    row: ProgressRow, network: PreTrainedModel, source: TokenSource[object], recipe: Recipe
) -> None:
    """Let the network as it is now fill held-out sequences: how likely is what it writes, how
    varied, in how many forwards?"""
    import forerun
    from forerun.evaluate.scattered import ScatteredTask, scattered
    from forerun.evaluate.tasks import MethodChoice, TaskSettings

    model = forerun.from_network(
        copy.deepcopy(network).eval().float(), None, name="in training", max_context=recipe.context
    )
    judge = None
    if recipe.judge:
        judge = forerun.load(recipe.judge, device=str(network.device), lanes=1)
    windows = source.held_out(recipe.decode, recipe.context).numpy()
    task = ScatteredTask(windows, known=0.05, judge=judge)
    settings = TaskSettings(batch=recipe.decode)
    [found] = scattered(model, [MethodChoice("assd")], task, settings)
    row["entropy"] = found.measures["entropy"].mean
    if judge is not None:
        row["perplexity"] = found.measures["perplexity"].mean
    row["tokens_per_forward"] = found.measures["tokens/forward"].mean
