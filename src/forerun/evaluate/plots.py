"""Pictures of how block models decode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from forerun.evaluate.ar_ness import OrderReport
from forerun.evaluate.frontier import FrontierPoint
from forerun.profile.plots import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = "osD^vPXp"


def plot_frontier(panels: Mapping[str, Sequence[FrontierPoint]], file: str) -> None:
    """Tokens per forward against the judge's surprise, a panel for each block size, with standard
    errors."""
    figure, axes = new_figure(len(panels), (4.6 * len(panels), 4.2), share_y=True)
    for panel, (title, points) in zip(axes, panels.items()):
        for number, series in enumerate(dict.fromkeys(point.series for point in points)):
            line = [point for point in points if point.series == series]
            _plot_series(panel, number, line)
        panel.set(xlabel="tokens per forward", title=title)
    axes[0].set_ylabel("nats per token under the judge")
    axes[-1].legend(fontsize=7)
    save_figure(figure, file)


def _plot_series(panel: Axes, number: int, points: Sequence[FrontierPoint]) -> None:
    marker = MARKERS[number % len(MARKERS)]
    panel.errorbar(
        [point.tokens_per_forward.mean for point in points],
        [point.nats.mean for point in points],
        xerr=[point.tokens_per_forward.error for point in points],
        yerr=[point.nats.error for point in points],
        fmt=f"{marker}-" if len(points) > 1 else marker,
        color=f"C{number % 10}",
        alpha=0.85,
        capsize=2,
        label=points[0].series,
    )


def plot_order(reports: Sequence[OrderReport], file: str) -> None:
    """AR-ness by k, and confidence with tokens per forward over the course of a block."""
    figure, [left, right] = new_figure(2, (9.5, 3.6))
    speed = right.twinx()
    for number, report in enumerate(reports):
        colour = f"C{number}"
        ks = range(1, len(report.local) + 1)
        left.plot(ks, report.local, "o-", color=colour, label=f"{report.label}, local")
        left.plot(ks, report.overall, "s--", color=colour, label=f"{report.label}, global")
        course = np.linspace(0, 1, len(report.confidence))
        right.plot(course, _numbers(report.confidence), "o-", color=colour, label=report.label)
        speed.plot(course, _numbers(report.tokens_per_forward), ":", color=colour)
    ticks = list(range(1, len(reports[0].local) + 1))
    left.set(xlabel="k", ylabel="AR-ness@k", xticks=ticks)
    right.set(xlabel="course of a block", ylabel="confidence of what is decided")
    speed.set_ylabel("tokens per forward (dotted)")
    left.legend(fontsize=7)
    right.legend(fontsize=7)
    save_figure(figure, file)


def _numbers(values: Sequence[float | None]) -> list[float]:
    """With nan, which is not drawn, for None."""
    return [float("nan") if value is None else value for value in values]
