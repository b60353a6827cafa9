"""The objectives by the names that recipes use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from forerun.errors import BadOption, unknown
from forerun.train.any_subset import AnySubsetObjective
from forerun.train.autoregressive import AutoregressiveObjective
from forerun.train.base import Objective
from forerun.train.block import BlockObjective
from forerun.train.consistency import ConsistencyObjective
from forerun.train.distil import DistilBlockObjective, DistilDrafterObjective
from forerun.train.masked import MaskedObjective

OBJECTIVES: dict[str, type[Objective]] = {
    "ar": AutoregressiveObjective,
    "any-subset": AnySubsetObjective,
    "masked": MaskedObjective,
    "distil-drafter": DistilDrafterObjective,
    "consistency": ConsistencyObjective,
    "block": BlockObjective,
    "distil-block": DistilBlockObjective,
}


def option_names(name: str) -> list[str]:
    """The options of a named objective."""
    return [field.name for field in fields(OBJECTIVES[name])]


def make_objective(name: str, options: Mapping[str, object]) -> Objective:
    """The objective that a recipe names, with its options; unknown names are refused."""
    if name not in OBJECTIVES:
        raise unknown("objective", name, OBJECTIVES)
    known = option_names(name)
    for key in options:
        if key not in known:
            raise unknown(f"option of objective {name!r}", key, known)
    try:
        return OBJECTIVES[name](**options)
    except TypeError as error:
        raise BadOption(f"options of objective {name!r}: {error}") from error
