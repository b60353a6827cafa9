"""Predicted outputs (as OpenAI's API has them): the one speculative loop, with a draft that the
caller sends."""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.methods.speculative import SpeculativeOptions, speculative
from forerun.registry import method


@dataclass(frozen=True)
class PredictedOptions(SpeculativeOptions):
    k: int | None = field(
        default=None,
        metadata={"help": "predicted tokens per verdict; not given: as many as pay here"},
    )
    usual = 32
    most = 32
    certain = True


predicted = method(
    "predicted",
    guarantee="exact",
    reference="ar",
    options=PredictedOptions,
    drafter="predicted",
    about="Draft what the caller expects (`prediction=`), from where the output has got to in it, "
    "and judge it in one forward.",
)(speculative.run)
