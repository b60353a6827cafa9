"""A whole training run: tokenizer, data, network, the loop, and a checkpoint that `forerun.load`
reads."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.errors import BadOption, ForerunError
from forerun.train.curve import Report
from forerun.train.data import tokenise
from forerun.train.loop import train
from forerun.train.networks import check_checkpoint, load_tokenizer
from forerun.train.objectives import option_names
from forerun.train.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def run(recipe: Recipe, source: str | None, out: Path, report: Report = lambda row: None) -> Path:
    """Train by a recipe. The checkpoint goes to `out/model`, with its tokenizer."""
    check_start(recipe)
    tokenizer = tokenizer_of(recipe)
    recipe = with_mask(recipe, tokenizer)
    corpus = tokenise(source, tokenizer, out / "tokens.npz")
    network = train(recipe, corpus, out, report=report)
    if int(os.environ.get("RANK", 0)) > 0:  # several processes train one model: one writes it
        return out / "model"
    network.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    return out / "model"


def check_start(recipe: Recipe) -> None:
    """Refuse a recipe without a network to begin with, before any work."""
    if recipe.start is None and not recipe.model:
        raise BadOption(
            "the recipe needs model:, the shape of a new network, or start:, a checkpoint to begin "
            "from."
        )
    if recipe.start is not None:
        try:
            check_checkpoint(recipe.start)
        except ForerunError as error:
            raise BadOption(f"start={recipe.start!r}: {error}") from error


def tokenizer_of(recipe: Recipe) -> PreTrainedTokenizerFast:
    """The tokenizer of the checkpoint that training begins from; for fresh weights, the zoo's."""
    return load_tokenizer(recipe.start or "zoo:ar")


def with_mask(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Recipe:
    """The recipe with the tokenizer's mask token. A tokenizer without one gets one, at its end."""
    needs_mask = "mask_token" in option_names(recipe.objective)
    if "mask_token" in recipe.options or not needs_mask:
        return recipe
    if tokenizer.mask_token_id is None:
        tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
    return replace(recipe, options={**recipe.options, "mask_token": tokenizer.mask_token_id})
