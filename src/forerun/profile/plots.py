"""Pictures of what was timed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from forerun.profile.forward import TimedForward
from forerun.profile.tune import JacobiFacts, Tuned

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def new_figure(
    panels: int, size: tuple[float, float], share_y: bool = False
) -> tuple[Figure, list[Axes]]:
    """A figure with panels side by side, drawn without a window."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, panels, figsize=size, layout="constrained", squeeze=False, sharey=share_y
    )
    return figure, list(np.ravel(axes))


def save_figure(figure: Figure, file: str) -> None:
    from matplotlib import pyplot

    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def plot_forwards(forwards: Sequence[TimedForward], file: str) -> None:
    """Seconds and their floor against tokens, a line for each batch and context."""
    figure, [axes] = new_figure(1, (7, 4.2))
    for batch, context in dict.fromkeys((one.batch, one.context) for one in forwards):
        line = [one for one in forwards if (one.batch, one.context) == (batch, context)]
        tokens = [one.tokens for one in line]
        label = f"batch {batch}, context {context}"
        [drawn] = axes.plot(tokens, [1e3 * one.seconds for one in line], "o-", label=label)
        axes.plot(tokens, [1e3 * one.floor for one in line], ":", color=drawn.get_color())
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="tokens per sequence",
        ylabel="ms per forward (dotted: the floor)",
    )
    axes.legend(fontsize=7)
    save_figure(figure, file)


def plot_tuned(tuned: Tuned, file: str) -> None:
    """The speeds that were measured, a line for each value of the second option; and the latency
    curve, where there is one."""
    facts = tuned.facts
    has_latency = isinstance(facts, JacobiFacts)
    figure, panels = new_figure(2 if has_latency else 1, (10, 4))
    _plot_speeds(tuned, panels[0])
    if isinstance(facts, JacobiFacts):
        milliseconds = [1e3 * seconds for seconds in facts.seconds.values()]
        panels[1].plot(list(facts.seconds), milliseconds, "o-")
        panels[1].axvline(facts.knee, color="grey", linestyle="--")
        panels[1].set(xscale="log", xlabel="tokens in the forward", ylabel="ms", title="latency")
    save_figure(figure, file)


def _plot_speeds(tuned: Tuned, axes: Axes) -> None:
    first, second = ("block", "candidates") if tuned.method == "multiblock" else ("k", "steps")
    rows = [row for row in tuned.rows if row.options.get("blocks", 1) == 1]
    for value in sorted({row.options[second] for row in rows}):
        line = [row for row in rows if row.options[second] == value]
        line.sort(key=lambda row: row.options[first])
        axes.plot(
            [row.options[first] for row in line],
            [row.speed.tokens_per_second for row in line],
            "o-",
            label=f"{second}={value}",
        )
    axes.axhline(tuned.plain, color="grey", linestyle="--", label="ar")
    axes.set(xlabel=first, ylabel="tokens/s", title=tuned.method)
    axes.legend()
