"""The fastest options of multi-block Jacobi decoding, for a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.api import Model, Prompt
from forerun.profile.latency import forward_seconds, knee
from forerun.profile.surface import Measured, SurfacePeak, surface_peak
from forerun.profile.tune import (
    JacobiFacts,
    Report,
    TriedOptions,
    Tuned,
    TuningSettings,
    fastest,
    measure_speed,
    no_report,
)


@dataclass(frozen=True)
class JacobiGrid:
    """The options of multi-block decoding that are tried on one block."""

    blocks: Sequence[int] = (4, 8, 16, 32, 64, 128, 256)
    candidates: Sequence[int] = (0, 1, 3, 7)


def tune_jacobi(
    model: Model,
    prompts: Sequence[Prompt],
    settings: TuningSettings | None = None,
    *,
    grid: JacobiGrid | None = None,
    report: Report = no_report,
) -> Tuned:
    """Block size and candidates by measured tokens per second and a surface fitted to them
    (appendix D), then K and r. Decodes greedily."""
    settings = settings or TuningSettings()
    report("latency of a forward by its tokens …")
    seconds = forward_seconds(model)
    report(f"up to {knee(seconds)} tokens ride along at a quarter more than one costs")
    plain = measure_speed(model, prompts, settings.max_tokens, settings.rounds, method="ar")

    def measure(**options: Any) -> TriedOptions:
        speed = measure_speed(
            model, prompts, settings.max_tokens, settings.rounds, method="multiblock", **options
        )
        words = ", ".join(f"{name}={value}" for name, value in options.items())
        report(f"{words}: {speed.tokens_per_second:.0f} tokens/s")
        return TriedOptions(options, speed)

    rows, peak = _one_block(grid or JacobiGrid(), measure)
    best = fastest(rows).options
    for blocks, spawns in ((1, (0.85,)), (2, (0.5, 0.85)), (3, (0.5, 0.85))):
        for spawn in spawns:
            row = measure(
                block=best["block"], candidates=best["candidates"], blocks=blocks, spawn=spawn
            )
            rows.append(row)
    winner = fastest(rows)
    return Tuned(
        "multiblock",
        winner.options,
        winner.speed.tokens_per_second,
        plain.tokens_per_second,
        rows,
        JacobiFacts(seconds, knee(seconds), peak),
    )


def _one_block(
    grid: JacobiGrid, measure: Callable[..., TriedOptions]
) -> tuple[list[TriedOptions], SurfacePeak]:
    """The grid on one block with refills, and the peak of the surface through it, measured too.

    Larger blocks are tried until one is slower than half of the fastest: where rows cost time, none
    beyond it will do better.
    """
    tried: dict[tuple[int, int], TriedOptions] = {}
    best = 0.0
    for block in sorted(grid.blocks):
        for candidates in grid.candidates:
            row = measure(block=block, candidates=candidates, blocks=1, refill=True)
            tried[block, candidates] = row
        fastest_here = max(tried[block, c].speed.tokens_per_second for c in grid.candidates)
        best = max(best, fastest_here)
        if fastest_here < best / 2:
            break
    points = [Measured(b, c, row.speed.tokens_per_second) for (b, c), row in tried.items()]
    peak = surface_peak(points)
    if (peak.block, peak.candidates) not in tried:
        row = measure(block=peak.block, candidates=peak.candidates, blocks=1, refill=True)
        tried[peak.block, peak.candidates] = row
    return list(tried.values()), peak
