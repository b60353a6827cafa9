"""A whole training run: tokenizer, data, network, the loop, and a checkpoint that `forerun.load` reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from forerun import zoo
from forerun.checkpoints import causal
from forerun.errors import BadOption, ForerunError
from forerun.train.data import tokenise
from forerun.train.loop import train
from forerun.train.objectives import OBJECTIVES
from forerun.train.recipe import Recipe


def run(recipe: Recipe, source: str | None, out: Path, report: Callable[[dict[str, Any]], None] = lambda row: None) -> Path:
    """Train by a recipe; the checkpoint goes to `out/model`, with its tokenizer."""
    if recipe.start is None and not recipe.model:
        raise BadOption("the recipe needs model:, the shape of a new network, or start:, a checkpoint to begin from.")
    if recipe.start is not None:
        try:
            start, _ = causal.split_adapters(recipe.start)
            zoo.recipe(start.removeprefix("zoo:")) if start.startswith("zoo:") else causal.find(start)
        except ForerunError as error:
            raise BadOption(f"start={recipe.start!r}: {error}") from error
    tokenizer = tokenizer_of(recipe)
    recipe = with_mask(recipe, tokenizer)
    corpus = tokenise(source, tokenizer, out / "tokens.npz")
    network = train(recipe, corpus, out, report=report)
    network.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    return out / "model"


def tokenizer_of(recipe: Recipe) -> Any:
    """The tokenizer of what training starts from; for fresh weights, the zoo's."""
    return tokenizer_named(recipe.start or "zoo:ar")


def tokenizer_named(name: str) -> Any:
    """A checkpoint's tokenizer."""
    name, _ = causal.split_adapters(name)
    if name.startswith("zoo:"):
        return zoo.tokenizer()
    tokenizer = causal.load_tokenizer(causal.find(name))
    if tokenizer is None:
        raise BadOption(f"{name!r} has no tokenizer in its folder.")
    return tokenizer


def with_mask(recipe: Recipe, tokenizer: Any) -> Recipe:
    """The recipe with the mask token that this tokenizer has; a tokenizer without one gets one, at its end."""
    if "mask_token" in recipe.options or not hasattr(OBJECTIVES[recipe.objective], "mask_token"):
        return recipe
    if tokenizer.mask_token_id is None:
        tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
    return replace(recipe, options={**recipe.options, "mask_token": tokenizer.mask_token_id})
