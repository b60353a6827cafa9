"""The zoo: small trained models, shipped inside the package. They share one tokenizer and one
corpus.

`weights/` holds each model, `recipes/` says how it was made, `curves/` how it learnt, and `cards/`
what it is good for and what it is not. `forerun.train.zoo` makes them again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import BadCheckpoint, unknown

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from forerun.backbones.plain import PlainNetwork

HOME = Path(__file__).parent
TOKENIZER = HOME / "tokenizer.json"


def names() -> list[str]:
    """Models that have a recipe."""
    return sorted(file.stem for file in (HOME / "recipes").glob("*.yaml") if "." not in file.stem)


def shipped() -> list[str]:
    """Models whose weights are here."""
    return sorted(file.stem for file in (HOME / "weights").glob("*.safetensors"))


def recipe(name: str) -> Path:
    """The recipe of a model, or of its first stage."""
    if name not in names():
        raise unknown("zoo model", name, names())
    return HOME / "recipes" / f"{name}.yaml"


def stages(name: str) -> list[Path]:
    """The recipes that make a model, in order: NAME.yaml, then NAME.2.yaml and so on if there are
    more."""
    return [recipe(name), *sorted((HOME / "recipes").glob(f"{name}.*.yaml"))]


def family(name: str) -> str:
    """The family of a shipped model, from the metadata of its file."""
    return family_settings(name).get("family", "causal")


def family_settings(name: str) -> dict[str, Any]:
    """What a shipped model says of its family; empty for one that goes from left to right."""
    return dict(_config(name).get("forerun") or {})


def context(name: str) -> int:
    """The most tokens that a shipped model holds."""
    return _config(name)["max_position_embeddings"]


def _config(name: str) -> dict[str, Any]:
    from safetensors import safe_open

    with safe_open(HOME / "weights" / f"{name}.safetensors", "np") as stored:
        return json.loads(stored.metadata()["config"])


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, 4,096 tokens, trained on Python code."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_file=str(TOKENIZER),
        eos_token="<|end|>",
        mask_token="<|mask|>",
        clean_up_tokenization_spaces=False,
    )


def load(
    name: str, dtype: torch.dtype, device: torch.device | str
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """(network, tokenizer) of `zoo:NAME`."""
    from forerun.zoo.storage import read_weights

    return read_weights(_file(name), dtype, device), tokenizer()


def load_plain(
    name: str, dtype: torch.dtype, device: torch.device | str
) -> tuple[PlainNetwork, PreTrainedTokenizerFast]:
    """The same, for who only decodes: the library's classes for models take long to import."""
    from forerun.zoo.storage import read_plain

    return read_plain(_file(name), dtype, device), tokenizer()


def _file(name: str) -> Path:
    if name not in shipped():
        raise unknown("zoo model", name, shipped(), BadCheckpoint)
    return HOME / "weights" / f"{name}.safetensors"
