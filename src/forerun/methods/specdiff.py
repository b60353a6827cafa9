"""Speculative diffusion decoding (Christopher et al., 2024, Algorithm 1): the one speculative loop,
with a drafter that fills blanks."""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.methods.speculative import SpeculativeOptions, speculative
from forerun.registry import method


@dataclass(frozen=True)
class SpecdiffOptions(SpeculativeOptions):
    k: int | None = field(
        default=None,
        metadata={
            "help": "tokens drafted per verdict (the paper's gamma); not given: at temperature 0 "
            "as many as pay here, else 8"
        },
    )
    usual = 8


specdiff = method(
    "specdiff",
    guarantee="exact",
    reference="ar",
    options=SpecdiffOptions,
    drafter="diffusion",
    about="Draft k tokens at once with a model that fills blanks, judge them in one forward, keep "
    "the longest accepted prefix and one token more (Christopher et al., 2024).",
)(speculative.run)


confidence_specdiff = method(
    "specdiff-confidence",
    guarantee="approximate",
    reference="ar",
    options=SpecdiffOptions,
    drafter="diffusion-confidence",
    reason="above temperature 0 the law of a drafted token knows tokens to its right",
    about="SpecDiff whose drafts are revealed in the order of confidence.",
)(speculative.run)


ddpm_specdiff = method(
    "specdiff-ddpm",
    guarantee="approximate",
    reference="ar",
    options=SpecdiffOptions,
    drafter="ddpm_cache",
    reason="above temperature 0 the law of a drafted token knows tokens to its right",
    about="SpecDiff whose drafts are revealed at random, as the paper's sampler does it.",
)(speculative.run)
