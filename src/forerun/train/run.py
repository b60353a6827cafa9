"""A whole training run: tokenizer, data, network, the loop, and a checkpoint that `forerun.load`
reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.checkpoints.tokenizers import token_count
from forerun.errors import BadOption, ForerunError
from forerun.train.curve import Report
from forerun.train.data import tokenise
from forerun.train.loop import train
from forerun.train.networks import check_checkpoint, family_settings, load_tokenizer
from forerun.train.objectives import option_names
from forerun.train.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MOST_PADDING = 256  # rows of an embedding beyond the tokens, for the sake of its size


def run(recipe: Recipe, source: str | None, out: Path, report: Report = lambda row: None) -> Path:
    """Train by a recipe. The checkpoint goes to `out/model`, with its tokenizer."""
    check_start(recipe)
    tokenizer = tokenizer_of(recipe)
    recipe = with_vocabulary(with_family(recipe, tokenizer), tokenizer)
    corpus = tokenise(source, tokenizer, out / "tokens.npz")
    network = train(recipe, corpus, out, report=report)
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
    for key, name in (("start", recipe.start), ("tokenizer", recipe.tokenizer)):
        if name is not None:
            try:
                check_checkpoint(name)
            except ForerunError as error:
                raise BadOption(f"{key}={name!r}: {error}") from error


def tokenizer_of(recipe: Recipe) -> PreTrainedTokenizerFast:
    """The recipe's tokenizer, else that of the checkpoint that training begins from; for fresh
    weights, the zoo's."""
    return load_tokenizer(recipe.tokenizer or recipe.start or "zoo:ar")


def with_family(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Recipe:
    """The recipe with the mask token, and the shift of rows, of the checkpoint that it begins from;
    else with the tokenizer's mask token. A tokenizer without one gets one, at its end."""
    known = option_names(recipe.objective)
    begun = family_settings(recipe.start) if recipe.start is not None else {}
    options = dict(recipe.options)
    for key in ("mask_token", "shifted"):
        if key in known and begun.get(key):
            options.setdefault(key, begun[key])
    if "mask_token" in known and "mask_token" not in options:
        if tokenizer.mask_token_id is None:
            tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
        options["mask_token"] = tokenizer.mask_token_id
    return replace(recipe, options=options)


def with_vocabulary(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Recipe:
    """The recipe with the tokenizer's vocabulary and end token for a fresh network. A vocabulary of
    another size would train rows that no text has, or lack rows that it needs."""
    if recipe.start is not None:
        return recipe
    tokens = token_count(tokenizer)
    rows = recipe.model.get("vocab_size", tokens)
    if not tokens <= rows < tokens + MOST_PADDING:
        named = recipe.tokenizer or "zoo:ar"
        raise BadOption(
            f"model.vocab_size={rows}, and the tokenizer of {named!r} has {tokens} tokens: leave "
            "vocab_size away, or name the tokenizer that it is for with tokenizer:."
        )
    ends = dict(eos_token_id=tokenizer.eos_token_id, bos_token_id=None, pad_token_id=None)
    return replace(recipe, model={**ends, **recipe.model, "vocab_size": rows})
