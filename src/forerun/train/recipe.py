"""Recipes: everything that a training run depends on, in one small YAML file."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from forerun.errors import BadOption, unknown
from forerun.options import check_whole
from forerun.train.objectives import make_objective

DECAYS = ("cosine", "linear")


@dataclass(frozen=True)
class Recipe:
    """One training run. Every field can be set in the YAML file; unknown ones are refused."""

    objective: str
    options: dict[str, Any] = field(default_factory=dict)  # of the objective
    # a checkpoint to begin from: a directory, a hub id or zoo:NAME; without one, fresh weights
    start: str | None = None
    model: dict[str, Any] = field(default_factory=dict)  # model_type and config, for transformers
    # a checkpoint whose tokenizer is used, by the same names; without one, that of `start`, else
    # the zoo's. A fresh network takes its vocabulary and mask token from it
    tokenizer: str | None = None
    context: int = 256  # tokens per training sequence
    batch: int = 256  # sequences per step, over all processes
    steps: int = 1000
    learning_rate: float = 3e-3
    warmup: int = 200  # steps of linear rise
    decay: str = "cosine"  # of the rate afterwards: "cosine" to a tenth, or "linear" to nothing
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    accumulate: int = 1  # forwards per step, each on its share of the batch
    lora: int = 0  # above 0: train adapters of this rank, which are merged at the end
    seed: int = 0
    validate_every: int = 500
    save_every: int = 2000
    # held-out sequences that every validation also fills, 5 % of their tokens given; the model must
    # infill
    decode: int = 0
    # a left-to-right model with the same tokens that measures how likely the filled ones are
    judge: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        for name in ("options", "model"):
            if not isinstance(getattr(self, name), dict):
                raise BadOption(f"{name}={getattr(self, name)!r} must be a mapping.")
        for name in ("learning_rate", "weight_decay", "clip"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise BadOption(f"{name}={value!r} must be a number.")
        self._check_names()
        make_objective(self.objective, self.options)  # refuses unknown names and bad options
        if self.decay not in DECAYS:
            raise unknown("decay", self.decay, DECAYS)
        for name in ("context", "batch", "steps", "accumulate", "validate_every", "save_every"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise BadOption(f"{name}={value!r} must be a whole number, 1 or more.")
        check_whole("lora", self.lora, least=0)
        if self.batch % self.accumulate:
            raise BadOption(f"accumulate={self.accumulate} must divide batch={self.batch}.")

    def _check_names(self) -> None:
        for name in ("start", "tokenizer", "judge"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise BadOption(f"{name}={value!r} must name a checkpoint.")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read(file: str | Path) -> Recipe:
    """A recipe from its YAML file."""
    path = Path(file)
    if not path.is_file():
        raise BadOption(f"recipe {str(file)!r} is not a file.")
    try:
        given = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise BadOption(
            f"recipe {str(file)!r} is not YAML: {str(error).splitlines()[0]}"
        ) from error
    if not isinstance(given, dict) or "objective" not in given:
        raise BadOption(f"recipe {str(file)!r} must be a YAML mapping with at least an objective.")
    known = [field.name for field in fields(Recipe)]
    for key in given:
        if key not in known:
            raise unknown("recipe key", key, known)
    return Recipe(**given)
