"""The zoo: small models that are really trained, shipped inside the package, on one tokenizer and one corpus.

`recipes/` says how each was made, `weights/` holds it, `cards/` says what it is and is not good for, `curves/` how it learnt.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forerun.errors import BadCheckpoint, unknown

HOME = Path(__file__).parent
TOKENIZER = HOME / "tokenizer.json"


def names() -> list[str]:
    """Models that have a recipe."""
    return sorted(file.stem for file in (HOME / "recipes").glob("*.yaml") if "." not in file.stem)


def shipped() -> list[str]:
    """Models whose weights are here."""
    return sorted(file.stem for file in (HOME / "weights").glob("*.safetensors"))


def recipe(name: str) -> Path:
    if name not in names():
        raise unknown("zoo model", name, names())
    return HOME / "recipes" / f"{name}.yaml"


def stages(name: str) -> list[Path]:
    """The recipes that make a model, one after the other: NAME.yaml, then NAME.2.yaml and so on where there are more."""
    return [recipe(name), *sorted((HOME / "recipes").glob(f"{name}.*.yaml"))]


def family(name: str) -> str:
    """The family of a shipped model, from the head of its file."""
    from safetensors import safe_open

    with safe_open(HOME / "weights" / f"{name}.safetensors", "np") as stored:
        marks = json.loads(stored.metadata()["config"]).get("forerun") or {}
    return marks.get("family", "causal")


def tokenizer() -> Any:
    """Byte-level BPE, 4,096 tokens, trained on Python code."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_file=str(TOKENIZER), eos_token="<|end|>", mask_token="<|mask|>", clean_up_tokenization_spaces=False
    )


def load(name: str, dtype: Any, device: Any) -> tuple[Any, Any]:
    """(network, tokenizer) of `zoo:NAME`."""
    from forerun.zoo.storage import read

    if name not in shipped():
        raise unknown("zoo model", name, shipped(), BadCheckpoint)
    return read(HOME / "weights" / f"{name}.safetensors", dtype).to(device), tokenizer()
