"""Recipes: everything that a training run depends on, in one small YAML file."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from forerun.errors import BadOption, unknown
from forerun.parameters import check_whole


@dataclass(frozen=True)
class Recipe:
    """One training run. Every field can be set in the YAML file; unknown ones are refused."""

    objective: str
    options: dict[str, Any] = field(default_factory=dict)  # of the objective
    start: str | None = None  # a checkpoint to begin from: a directory, a hub id or zoo:NAME; without one, fresh weights
    model: dict[str, Any] = field(default_factory=dict)  # model_type and its config, for transformers
    context: int = 256  # tokens per training sequence
    batch: int = 256  # sequences per step, over all processes
    steps: int = 1000
    learning_rate: float = 3e-3
    warmup: int = 200  # steps of linear rise
    decay: str = "cosine"  # how the rate falls afterwards: as a cosine to a tenth, or "linear" to nothing
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    accumulate: int = 1  # forwards per step, each on its share of the batch
    lora: int = 0  # train adapters of this rank instead of all weights; they are merged into them at the end
    seed: int = 0
    validate_every: int = 500
    save_every: int = 2000
    decode: int = 0  # held-out sequences that every validation also decodes, 5 % of their tokens given; models that infill only
    judge: str | None = None  # a left-to-right model with the same tokens that says how likely it finds them

    def __post_init__(self) -> None:
        from forerun.train.objectives import make

        object.__setattr__(self, "betas", tuple(self.betas))
        for name in ("options", "model"):
            if not isinstance(getattr(self, name), dict):
                raise BadOption(f"{name}={getattr(self, name)!r} must be a mapping.")
        for name in ("learning_rate", "weight_decay", "clip"):
            if isinstance(getattr(self, name), bool) or not isinstance(getattr(self, name), int | float):
                raise BadOption(f"{name}={getattr(self, name)!r} must be a number.")
        make(self.objective, self.options)
        if self.decay not in ("cosine", "linear"):
            raise unknown("decay", self.decay, ("cosine", "linear"))
        for name in ("context", "batch", "steps", "accumulate", "validate_every", "save_every"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise BadOption(f"{name}={value!r} must be a whole number, 1 or more.")
        check_whole("lora", self.lora, least=0)
        if self.batch % self.accumulate:
            raise BadOption(f"accumulate={self.accumulate} must divide batch={self.batch}.")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read(file: str | Path) -> Recipe:
    path = Path(file)
    if not path.is_file():
        raise BadOption(f"recipe {str(file)!r} is not a file.")
    try:
        given = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise BadOption(f"recipe {str(file)!r} is not YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(given, dict) or "objective" not in given:
        raise BadOption(f"recipe {str(file)!r} must be a YAML mapping with at least an objective.")
    for key in given:
        if key not in {f.name for f in fields(Recipe)}:
            raise unknown("recipe key", key, [f.name for f in fields(Recipe)])
    return Recipe(**given)
