"""Predicted outputs (as OpenAI's API has them): the one speculative loop, with a draft that the
caller sends."""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.methods.speculative import SpeculativeOptions, speculative
from forerun.registry import method


@dataclass(frozen=True)
class PredictedOptions(SpeculativeOptions):
    k: int = field(default=32, metadata={"help": "predicted tokens per verdict"})


predicted = method(
    "predicted", guarantee="exact", reference="ar", options=PredictedOptions, drafter="predicted"
)(speculative.run)
