"""Which options are fastest here: costs are measured on this machine, acceptance on your prompts, and the choice is checked by
running it.

None of this touches what is decided: the methods that are tuned keep their reference's law whatever their options.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from forerun.api import Model
from forerun.arguments import read_wish
from forerun.errors import BadOption
from forerun.evaluate.compare import machine
from forerun.evaluate.latency import at, forward_seconds, knee
from forerun.parameters import check_whole

Report = Callable[[str], None]


@dataclass
class Tuned:
    """What was found: the options to use, and everything that was measured on the way."""

    method: str
    options: dict[str, Any]
    tokens_per_second: float
    plain: float  # tokens per second of the reference
    machine: str = field(default_factory=machine)
    rows: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def write(self, file: str) -> None:
        Path(file).write_text(json.dumps(self.__dict__, indent=1))


def read(file: str) -> tuple[str, dict[str, Any]]:
    """(method, options) that `forerun tune` wrote; refused before anything is loaded if they are none."""
    try:
        found = json.loads(Path(file).read_text())
        method, options = str(found["method"]), dict(found["options"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadOption(f"tuned={file!r} is not a file that `forerun tune` wrote ({error}).") from error
    read_wish(method, options.get("draft"), {key: value for key, value in options.items() if key != "draft"})
    return method, options


def speed(model: Model, prompts: Sequence[Any], max_tokens: int, rounds: int = 1, **how: Any) -> dict[str, Any]:
    """Tokens per second, per forward, and how often a drafted token that was judged was accepted, at batch 1."""
    check_whole("rounds", rounds)
    check_whole("max_tokens", max_tokens)
    rates = []
    for _ in range(rounds):
        began = time.perf_counter()
        results = [model.generate(prompt, max_tokens=max_tokens, ignore_eos=True, **how) for prompt in prompts]
        rates.append(sum(r.stats.tokens for r in results) / (time.perf_counter() - began))
    events = [event for r in results for event in r.trace if event.drafted]
    accepted = sum(len(event.drafted) - len(event.rejected) for event in events)
    judged = accepted + sum(bool(event.rejected) for event in events)
    return {
        "tokens/s": statistics.median(rates),
        "tokens/forward": sum(r.stats.tokens for r in results) / sum(r.stats.forwards for r in results),
        "alpha": accepted / judged if judged else 0.0,
    }


def expected_tokens(alpha: float, gamma: int) -> float:
    """Equation 2 of SpecDiff: tokens per verdict when each drafted token is accepted with probability alpha."""
    return float(gamma + 1) if alpha >= 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def expected_speed(alpha: float, gamma: int, steps: int, c1: float, c2: float) -> float:
    """Equation 3: tokens per second, for a draft forward that takes c1 seconds and a target forward that takes c2."""
    return expected_tokens(alpha, gamma) / (steps * c1 + c2)


def fit_steps(alphas: dict[int, float]) -> tuple[float, float]:
    """c4 and c5 of equation 6, alpha = 1 - c4 - c5 / T, by least squares over the measured T."""
    inverse, wrong = [1 / steps for steps in alphas], [1 - alpha for alpha in alphas.values()]
    if len(alphas) < 2:
        return wrong[0], 0.0
    c5, c4 = np.polyfit(inverse, wrong, 1)
    return float(c4), float(c5)


def tune_specdiff(
    target: Model,
    draft: Model,
    prompts: Sequence[Any],
    *,
    gammas: Sequence[int] = (2, 4, 8, 12),
    steps: Sequence[int] = (1, 2, 4),
    temperature: float = 0.0,
    max_tokens: int = 48,
    rounds: int = 1,
    report: Report = lambda line: None,
) -> Tuned:
    """Gamma and T from measured costs and acceptance (equations 2, 3 and 6), checked against the grid; above temperature 0 the
    drafter's own temperature first."""
    how: dict[str, Any] = dict(method="specdiff", draft=draft, temperature=temperature)
    own, facts = best_draft_temperature(target, prompts, how, max_tokens, report) if temperature > 0 else ({}, {})
    plain = speed(target, prompts, max_tokens, rounds, method="ar", temperature=temperature)["tokens/s"]
    held = max(len(target.generate(prompt, max_tokens=1).prompt_ids) for prompt in prompts) + max_tokens // 2
    report("costs of a forward …")
    theirs, ours = forward_seconds(draft), forward_seconds(target)
    alphas = {}
    for count in steps:
        alphas[count] = speed(target, prompts, max_tokens, k=max(gammas), steps=count, **own, **how)["alpha"]
        report(f"T={count}: a drafted token is accepted with probability {alphas[count]:.3f}")
    c4, c5 = fit_steps(alphas)
    rows = []
    for gamma in gammas:
        for count in steps:
            c1, c2 = at(theirs, held + gamma), at(ours, gamma + 1)  # without `keep` a draft computes the text too
            found = speed(target, prompts, max_tokens, rounds, k=gamma, steps=count, **own, **how)
            said = expected_speed(alphas[count], gamma, count, c1, c2)
            bound = expected_speed(max(0.0, 1 - c4 - c5 / count), gamma, count, c1, c2)
            rows.append({"k": gamma, "steps": count, "equation 3": said, "equation 6": bound, **found})
            report(f"gamma={gamma} T={count}: {found['tokens/s']:.0f} tokens/s, equation 3 says {said:.0f}")
    best, foreseen = max(rows, key=lambda row: row["tokens/s"]), max(rows, key=lambda row: row["equation 3"])
    facts |= {"c4": c4, "c5": c5, "alpha by T": alphas, "equation 3 chose": [foreseen["k"], foreseen["steps"]]}
    facts["equation 3's choice, of the best"] = foreseen["tokens/s"] / best["tokens/s"]
    chosen = {"draft": draft.name, "k": best["k"], "steps": best["steps"], **own}
    return Tuned("specdiff", chosen, best["tokens/s"], plain, rows=rows, facts=facts)


def best_draft_temperature(
    target: Model, prompts: Sequence[Any], how: dict[str, Any], max_tokens: int, report: Report, k: int = 8
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The drafter's temperature, relative to the target's, at which most is accepted; exactness does not depend on it."""
    tried = (1.0, 0.6, 0.7, 0.8, 0.9, 1.1, 1.25)
    found = {t: speed(target, prompts, max_tokens, k=k, draft_temperature=t, **how)["alpha"] for t in tried}
    best = max(found, key=lambda t: found[t])
    report(f"draft_temperature={best:g}: acceptance {found[1.0]:.3f} before, {found[best]:.3f} after")
    return {"draft_temperature": best}, {"alpha by draft_temperature": found}


def tune_jacobi(
    model: Model,
    prompts: Sequence[Any],
    *,
    blocks: Sequence[int] = (4, 8, 16, 32),
    candidates: Sequence[int] = (0, 1, 3, 7),
    max_tokens: int = 48,
    rounds: int = 1,
    report: Report = lambda line: None,
) -> Tuned:
    """Block size and candidates by measured tokens per second and a surface fitted to them (appendix D), then K and r."""
    report("latency of a forward by its tokens …")
    seconds = forward_seconds(model)
    report(f"up to {knee(seconds)} tokens ride along at a quarter more than one costs")
    plain = speed(model, prompts, max_tokens, rounds, method="ar")["tokens/s"]

    def measure(**options: Any) -> dict[str, Any]:
        row = {**options, **speed(model, prompts, max_tokens, rounds, method="multiblock", **options)}
        report(", ".join(f"{k}={v}" for k, v in options.items()) + f": {row['tokens/s']:.0f} tokens/s")
        return row

    one = dict(blocks=1, refill=True)
    grid = [measure(block=b, candidates=c, **one) for b in blocks for c in candidates if b * c <= 256]
    degree, peak = surface_peak([(r["block"], r["candidates"], r["tokens/s"]) for r in grid])
    rows = list(grid)
    if (peak[0], peak[1]) not in {(r["block"], r["candidates"]) for r in grid} and peak[0] * peak[1] <= 256:
        rows.append(measure(block=peak[0], candidates=peak[1], **one))
    best = max(rows, key=lambda row: row["tokens/s"])
    shape = dict(block=best["block"], candidates=best["candidates"])
    rows += [measure(**shape, blocks=k, spawn=r) for k in (1, 2, 3) for r in ((0.85,) if k == 1 else (0.5, 0.85))]
    best = max(rows, key=lambda row: row["tokens/s"])
    chosen: dict[str, Any] = {key: best[key] for key in ("block", "candidates", "blocks", "refill", "spawn") if key in best}
    facts = {"seconds": seconds, "knee": knee(seconds), "surface degree": degree, "surface peak": peak}
    return Tuned("multiblock", chosen, best["tokens/s"], plain, rows=rows, facts=facts)


def surface_peak(points: Sequence[tuple[int, int, float]], most: int = 6) -> tuple[int, tuple[int, int]]:
    """The degree of the polynomial in (log2 block, candidates) that foretells left-out points best, and where it is highest."""
    x, y, z = (np.array(column, float) for column in zip(*points))
    x = np.log2(x)

    def terms(x: np.ndarray, y: np.ndarray, degree: int) -> np.ndarray:
        return np.stack([x**i * y**j for i in range(degree + 1) for j in range(degree + 1 - i)], 1)

    def left_out(degree: int) -> float:
        wrong = []
        for i in range(len(z)):
            rest = np.arange(len(z)) != i
            weights = np.linalg.lstsq(terms(x[rest], y[rest], degree), z[rest], rcond=None)[0]
            wrong.append(float((terms(x[i : i + 1], y[i : i + 1], degree) @ weights)[0] - z[i]) ** 2)
        return statistics.mean(wrong)

    fits = [d for d in range(1, most + 1) if (d + 1) * (d + 2) // 2 < len(z)] or [1]
    degree = min(fits, key=left_out)
    weights = np.linalg.lstsq(terms(x, y, degree), z, rcond=None)[0]
    dense = [(b, c) for b in range(int(2 ** x.min()), int(2 ** x.max()) + 1) for c in range(int(y.min()), int(y.max()) + 1)]
    height = terms(np.log2([b for b, _ in dense]), np.array([c for _, c in dense], float), degree) @ weights
    return degree, dense[int(height.argmax())]


def plot(tuned: Tuned, file: str) -> None:
    """The latency curve and the speeds that were measured; of two options as a surface."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    keys = ("block", "candidates") if tuned.method == "multiblock" else ("k", "steps")
    rows = [row for row in tuned.rows if row.get("blocks", 1) == 1]
    figure, panels = pyplot.subplots(1, 2 if "seconds" in tuned.facts else 1, figsize=(10, 4), layout="constrained", squeeze=False)
    left = panels[0, 0]
    for second in sorted({row[keys[1]] for row in rows}):
        own = sorted((row for row in rows if row[keys[1]] == second), key=lambda row: row[keys[0]])
        left.plot([r[keys[0]] for r in own], [r["tokens/s"] for r in own], "o-", label=f"{keys[1]}={second}")
    left.axhline(tuned.plain, color="grey", linestyle="--", label="ar")
    left.set(xlabel=keys[0], ylabel="tokens/s", title=tuned.method)
    left.legend()
    if "seconds" in tuned.facts:
        seconds = tuned.facts["seconds"]
        panels[0, 1].plot(list(seconds), [1e3 * s for s in seconds.values()], "o-")
        panels[0, 1].axvline(tuned.facts["knee"], color="grey", linestyle="--")
        panels[0, 1].set(xscale="log", xlabel="tokens in the forward", ylabel="ms", title="latency")
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
