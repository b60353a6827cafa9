"""The fastest draft length gamma and draft steps T of `specdiff`, for a pair of models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forerun.api import Model, Prompt
from forerun.profile.equations import expected_speed, fit_steps
from forerun.profile.latency import forward_seconds, seconds_at
from forerun.profile.tune import (
    Prediction,
    Report,
    SpecdiffFacts,
    Speed,
    TriedOptions,
    Tuned,
    TuningSettings,
    fastest,
    measure_speed,
    no_report,
)

DRAFT_TEMPERATURES = (1.0, 0.6, 0.7, 0.8, 0.9, 1.1, 1.25)  # relative to the target's
TRIAL_K = 8  # drafted tokens while the draft temperature is fitted


@dataclass(frozen=True)
class SpecdiffGrid:
    """The options of specdiff that are tried."""

    gammas: Sequence[int] = (2, 4, 8, 12)
    steps: Sequence[int] = (1, 2, 4)


def tune_specdiff(
    target: Model,
    draft: Model,
    prompts: Sequence[Prompt],
    settings: TuningSettings | None = None,
    *,
    grid: SpecdiffGrid | None = None,
    report: Report = no_report,
) -> Tuned:
    """Gamma and T from measured costs and acceptance (equations 2, 3 and 6), checked against the
    grid; above temperature 0 the drafter's own temperature first."""
    settings = settings or TuningSettings()
    tuner = SpecdiffTuner(target, draft, prompts, settings, report)
    return tuner.tune(grid or SpecdiffGrid())


class SpecdiffTuner:
    """One pair of models on some prompts."""

    def __init__(
        self,
        target: Model,
        draft: Model,
        prompts: Sequence[Prompt],
        settings: TuningSettings,
        report: Report,
    ):
        self.target = target
        self.draft = draft
        self.prompts = prompts
        self.settings = settings
        self.report = report
        self.draft_options: dict[str, Any] = {}  # the fitted draft temperature

    def tune(self, grid: SpecdiffGrid) -> Tuned:
        settings = self.settings
        by_temperature = self._fit_draft_temperature() if settings.temperature > 0 else {}
        plain = measure_speed(
            self.target,
            self.prompts,
            settings.max_tokens,
            settings.rounds,
            method="ar",
            temperature=settings.temperature,
        )
        rows, alphas = self._try_all(grid)
        best = fastest(rows)
        foreseen = max(rows, key=_equation_3)
        c4, c5 = fit_steps(alphas)
        share = foreseen.speed.tokens_per_second / best.speed.tokens_per_second
        facts = SpecdiffFacts(c4, c5, alphas, by_temperature, foreseen, share)
        options = {"draft": self.draft.name, **best.options, **self.draft_options}
        return Tuned(
            "specdiff",
            options,
            best.speed.tokens_per_second,
            plain.tokens_per_second,
            rows,
            facts,
        )

    def _speed(self, rounds: int = 1, **options: Any) -> Speed:
        return measure_speed(
            self.target,
            self.prompts,
            self.settings.max_tokens,
            rounds,
            method="specdiff",
            draft=self.draft,
            temperature=self.settings.temperature,
            **{**self.draft_options, **options},
        )

    def _fit_draft_temperature(self) -> dict[float, float]:
        """Keep the drafter's temperature, relative to the target's, at which most is accepted.
        Exactness does not depend on it."""
        alphas = {
            temperature: self._speed(k=TRIAL_K, draft_temperature=temperature).alpha
            for temperature in DRAFT_TEMPERATURES
        }
        best = max(alphas, key=lambda temperature: alphas[temperature])
        self.draft_options = {"draft_temperature": best}
        self.report(
            f"draft_temperature={best:g}: acceptance {alphas[1.0]:.3f} before, {alphas[best]:.3f} "
            f"after"
        )
        return alphas

    def _try_all(self, grid: SpecdiffGrid) -> tuple[list[TriedOptions], dict[int, float]]:
        """Every gamma and T, and the acceptance by T."""
        held = self._longest_prompt() + self.settings.max_tokens // 2
        self.report("costs of a forward …")
        draft_seconds = forward_seconds(self.draft)
        target_seconds = forward_seconds(self.target)
        alphas = self._acceptance(max(grid.gammas), grid.steps)
        c4, c5 = fit_steps(alphas)
        rows = []
        for gamma in grid.gammas:
            for steps in grid.steps:
                # without `keep` a draft computes the text too
                c1 = seconds_at(draft_seconds, held + gamma)
                c2 = seconds_at(target_seconds, gamma + 1)
                fitted_alpha = max(0.0, 1 - c4 - c5 / steps)
                expected = Prediction(
                    equation_3=expected_speed(alphas[steps], gamma, steps, c1, c2),
                    equation_6=expected_speed(fitted_alpha, gamma, steps, c1, c2),
                )
                speed = self._speed(self.settings.rounds, k=gamma, steps=steps)
                rows.append(TriedOptions({"k": gamma, "steps": steps}, speed, expected))
                self.report(
                    f"gamma={gamma} T={steps}: {speed.tokens_per_second:.0f} tokens/s, equation 3 "
                    f"says {expected.equation_3:.0f}"
                )
        return rows, alphas

    def _longest_prompt(self) -> int:
        results = self.target.generate_all(self.prompts, max_tokens=1)
        return max(len(result.prompt_ids) for result in results)

    def _acceptance(self, gamma: int, steps: Sequence[int]) -> dict[int, float]:
        """How likely a drafted token is accepted, by T."""
        alphas = {}
        for count in steps:
            alphas[count] = self._speed(k=gamma, steps=count).alpha
            self.report(
                f"T={count}: a drafted token is accepted with probability {alphas[count]:.3f}"
            )
        return alphas


def _equation_3(row: TriedOptions) -> float:
    assert row.expected is not None
    return row.expected.equation_3
