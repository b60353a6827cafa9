"""How block models decode: how nearly from left to right, how sure they are on the way, how well acceptance is foreseen, and what
speed costs (figures 2, 3, 5 and 6 and Table 4 of Han et al., 2026)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from forerun.accept import rejection
from forerun.api import Model
from forerun.arguments import check_same_tokens
from forerun.core import BLANK, BlockWise, Canvas, Conditional
from forerun.engine.serve import Questions, Ticket
from forerun.errors import NotAble
from forerun.evaluate.compare import surprises
from forerun.evaluate.metrics import Mean, first_line, mean, shannon_entropy
from forerun.methods.s2d2 import judged
from forerun.parameters import Sampling
from forerun.result import Result
from forerun.routers import ESTIMATORS, Routing, Watch, expected_prefix
from forerun.sampling import History
from forerun.walk import BlockWalk

STRENGTHS: dict[str, tuple[float, ...]] = {
    "random": (1.0,),
    "entropy": (0.5, 0.75, 1.0, 1.25, 1.5),
    "confidence": (0.5, 0.75, 1.0, 1.25, 1.5),
    "renyi": (1.0,),
    "hard-entropy": (0.01, 0.02, 0.05, 0.1, 0.2),
    "margin": (0.01, 0.02, 0.05, 0.1, 0.2),
}


def check_fills_blocks(model: Model, analysis: str) -> None:
    if BlockWise not in model.family.answers:
        raise NotAble(
            f"'{model.name}' (family '{model.family.name}') is no block model: {analysis} needs one, such as 'zoo:block'."
        )


def check_judge(judge: Model, model: Model) -> None:
    """Refuse a judge that cannot score text, or whose tokens are others."""
    if Conditional not in judge.family.answers:
        raise NotAble(
            f"judge='{judge.name}' (family '{judge.family.name}') scores no text: use a left-to-right model, such as 'zoo:ar'."
        )
    check_same_tokens(model, judge)


# How nearly from left to right (Gong et al., 2025).


def order_of(result: Result) -> list[int]:
    """The positions of a result in the order in which they were decided; those of one forward from left to right."""
    return [p for event in result.trace if event.reason != "edited" for p in sorted(event.positions)]


def local_ar_ness(order: Sequence[int], k: int) -> float:
    """The share of k decisions in a row that are of k tokens in a row, from left to right."""
    windows = [order[i : i + k] for i in range(len(order) - k + 1)]
    return float(np.mean([all(b - a == 1 for a, b in pairwise(w)) for w in windows])) if windows else float("nan")


def global_ar_ness(order: Sequence[int], k: int) -> float:
    """The share of decisions that are of one of the k first blanks there are."""
    left, hits = sorted(order), []
    for position in order:
        hits.append(left.index(position) < k)
        left.remove(position)
    return float(np.mean(hits))


@dataclass(frozen=True)
class Habits:
    """How a method decoded some prompts."""

    how: str
    local: list[float]  # AR-ness@k for k = 1, 2, ...
    overall: list[float]
    confidence: list[float | None]  # of what is decided, from a block's first decision to its last, in equal parts
    tokens_per_forward: list[float | None]


def habits(results: Sequence[Result], how: str, block: int, ks: int = 5, parts: int = 10) -> Habits:
    """From results that have log-probabilities."""
    for result in results:
        if result.error is not None:
            raise result.error
    orders = [order_of(r) for r in results]
    sure: list[list[float]] = [[] for _ in range(parts)]
    tokens, forwards = [0.0] * parts, [0.0] * parts
    for result in results:
        first = len(result.prompt_ids)
        chance = {first + i: float(np.exp(entry["logprob"])) for i, entry in enumerate(result.logprobs or [])}
        for decisions in _decisions_by_block(result, block):
            for i, (positions, cost) in enumerate(decisions):
                for part in range(i * parts // len(decisions), -(-(i + 1) * parts // len(decisions))):
                    sure[part] += [chance[p] for p in positions if p in chance]
                    tokens[part], forwards[part] = tokens[part] + len(positions), forwards[part] + cost
    return Habits(
        how,
        [float(np.mean([local_ar_ness(o, k) for o in orders])) for k in range(1, ks + 1)],
        [float(np.mean([global_ar_ness(o, k) for o in orders])) for k in range(1, ks + 1)],
        [float(np.mean(part)) if part else None for part in sure],
        [n / cost if cost else None for n, cost in zip(tokens, forwards)],
    )


def _decisions_by_block(result: Result, block: int) -> list[list[tuple[list[int], int]]]:
    """For every block what was decided of it at a time, and how many forwards that took: a draft may take one of its own."""
    found: dict[int, list[tuple[list[int], int]]] = {}
    by_forward: dict[int, list[int]] = {}
    for event in result.trace:
        if event.reason != "edited":
            by_forward.setdefault(event.forward, []).extend(event.positions)
    before = 0
    for forward, positions in by_forward.items():
        found.setdefault(min(positions, default=0) // block, []).append((positions, forward - before))
        before = forward
    return [own for _, own in sorted(found.items())]


# How well acceptance is foreseen (Table 4).


@dataclass(frozen=True)
class Foreseen:
    """How far an estimator's expected accepted length is from the length that was accepted."""

    estimator: str
    strength: float
    bias: float  # mean error: below 0 it expects too little
    spread: float
    absolute: float


def estimator_errors(
    model: Model, prompts: Sequence[Any], *, block: int | None = None, max_tokens: int = 64, temperature: float = 0.0, seed: int = 0
) -> list[Foreseen]:
    """Decode by S2D2, verify every draft, and set beside every verdict what each estimator would have expected."""
    check_fills_blocks(model, "estimators")
    told = [pair for i, p in enumerate(prompts) for pair in _verdicts(model, p, block, max_tokens, temperature, seed + i)]
    accepted = np.array([n for n, _ in told])
    rows = []
    for name, strengths in STRENGTHS.items():
        for strength in strengths:
            error = np.array([expected[name, strength] for _, expected in told]) - accepted
            rows.append(Foreseen(name, strength, float(error.mean()), float(error.std()), float(np.abs(error).mean())))
    return rows


def _verdicts(
    model: Model, prompt: Any, block: int | None, max_tokens: int, temperature: float, seed: int
) -> list[tuple[int, dict[tuple[str, float], float]]]:
    """S2D2 on one prompt, always verified: of every verdict how many tokens it accepted and how many were expected."""
    from forerun.arguments import read_prompts, room_after

    [ids], _ = read_prompts(model, [prompt], None)
    if not isinstance(ids, list):
        raise ids
    room_after(ids, max_tokens, 0, model.context, model.name)
    history = History(Sampling(temperature=temperature), np.asarray(ids), model.vocab, frozenset())
    seq = Canvas([*ids, *[BLANK] * max_tokens], history=history, seed=seed)
    target: Any = Questions(model.family, model.host)
    found: list[tuple[int, dict[tuple[str, float], float]]] = []

    async def decode() -> None:
        walk = BlockWalk(seq, target, block, None, "nothing")
        watch = Watch(seq, Routing(), walk.part)
        while not seq.done:
            blanks, frame, alone = walk.open(), walk.frame(), walk.alone
            [(law, own)] = await walk.ask(target, [blanks], [()])
            drafted = await watch.draft(blanks, law, own)
            if alone:
                seq.decide(drafted.confident, "decided")
                continue
            run = drafted.sight.run
            where = torch.tensor([blanks[:run]], device=own.device)
            expected = {
                (name, s): float(expected_prefix(ESTIMATORS[name][0](own[None, :run], where, s)))
                for name, strengths in STRENGTHS.items()
                for s in strengths
            }
            before = len(seq.trace)
            await judged(seq, target, blanks, drafted.tokens[:run], law, frame, rejection)
            found.append((len(seq.trace[before].tokens), expected))

    ticket = model.engine.submit(Ticket(seq, decode))
    model.engine.run()
    if ticket.error is not None:
        raise ticket.error
    return found


# What speed costs (figure 3).


@dataclass(frozen=True)
class Way:
    """One way to decode, in a series that is drawn as a line."""

    series: str
    method: str
    options: dict[str, Any]

    @property
    def label(self) -> str:
        own = ", ".join(str(v) if k == "router" else f"{k} {v}" for k, v in self.options.items() if k != "block")
        return self.method + (f" ({own})" if own else "")


def ways(block: int) -> list[Way]:
    """What the frontier is made of, at one block size."""
    own = dict(block=block)
    spans = [n for n in (1, 2, 4, 8, 16) if n < block]
    return [
        Way("ar", "ar", {}),
        Way("static", "block-stepwise", own),
        *(Way("static", "block", {**own, "schedule": "static", "steps": block // n}) for n in (2, 4) if n < block),
        *(Way("dynamic", "block", {**own, "threshold": t}) for t in (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)),
        *(Way("s2d2", "s2d2", {**own, "router": "span", "span": n}) for n in spans),
        Way("s2d2, causal text", "s2d2", {**own, "causal": "text"}),
        *(Way("s2d2, score", "s2d2", {**own, "router": "score", "enough": t}) for t in (0.0, 1.0, 2.0)),
        Way("s2d2, score, margin", "s2d2", {**own, "router": "score", "estimator": "margin"}),
        Way("s2d2, hysteresis", "s2d2", {**own, "router": "hysteresis", "score": "dynamic"}),
        Way("s2d2, bandit", "s2d2", {**own, "router": "bandit"}),
        *(Way("s2d2-exact", "s2d2-exact", {"k": 8, "ahead": ahead}) for ahead in ("whole", "every")),
        Way("block-ssd", "block-ssd", own),
        *(Way("s2d2-canvases", "s2d2-canvases", {**own, "router": "score", "enough": t}) for t in (0.0, 1.0)),
    ]


@dataclass(frozen=True)
class Point:
    """What a way to decode cost and gave, over all prompts."""

    series: str
    how: str
    method: str
    options: dict[str, Any]
    tokens_per_forward: Mean
    nats: Mean  # per token, under the judge
    entropy: Mean  # bits per token of an output's own frequencies: low where it repeats itself
    exact: Mean  # share of completions whose first line is the true one
    seconds: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def frontier(
    model: Model,
    judge: Model,
    windows: np.ndarray,
    decode: Sequence[Way],
    *,
    given: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Point]:
    """Complete held-out windows, of each the first `given` tokens given, in every way; all prompts together."""
    check_fills_blocks(model, "frontier")
    check_judge(judge, model)
    prompts, truths = windows[:, :given].tolist(), windows[:, given:].tolist()
    points = []
    for done, way in enumerate(decode):
        began = time.perf_counter()
        results = model.generate(
            prompts,
            method=way.method,
            max_tokens=len(truths[0]),
            ignore_eos=True,
            temperature=temperature,
            seed=seed,
            **way.options,
        )
        seconds = time.perf_counter() - began
        for result in results:
            if result.error is not None:
                raise result.error
        points.append(
            Point(
                way.series,
                way.label,
                way.method,
                way.options,
                mean([r.stats.tokens / r.stats.forwards for r in results]),
                mean(surprises(judge, [(r.prompt_ids, r.token_ids) for r in results])),
                mean([shannon_entropy(r.token_ids) for r in results]),
                mean([first_line(model.decode(r.token_ids)) == first_line(model.decode(t)) for r, t in zip(results, truths)]),
                seconds,
            )
        )
        progress(done + 1, len(decode))
    return points


MARKERS = "osD^vPXp"


def draw(panels: dict[str, Sequence[Point]], picture: str) -> None:
    """Tokens per forward against the judge's surprise, a panel for each block size, with standard errors."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(4.6 * len(panels), 4.2), layout="constrained", sharey=True, squeeze=False
    )
    for panel, (title, points) in zip(axes[0], panels.items()):
        for number, series in enumerate(dict.fromkeys(point.series for point in points)):
            own = [point for point in points if point.series == series]
            panel.errorbar(
                [p.tokens_per_forward.mean for p in own],
                [p.nats.mean for p in own],
                xerr=[p.tokens_per_forward.error for p in own],
                yerr=[p.nats.error for p in own],
                fmt=f"{MARKERS[number % len(MARKERS)]}{'-' if len(own) > 1 else ''}",
                color=f"C{number % 10}",
                alpha=0.85,
                capsize=2,
                label=series,
            )
        panel.set(xlabel="tokens per forward", title=title)
    axes[0][0].set_ylabel("nats per token under the judge")
    axes[0][-1].legend(fontsize=7)
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)


def draw_habits(found: Sequence[Habits], picture: str) -> None:
    """AR-ness by k, and confidence with tokens per forward over the course of a block."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.5, 3.6), layout="constrained")
    many = right.twinx()
    for number, one in enumerate(found):
        colour, ks = f"C{number}", range(1, len(one.local) + 1)
        left.plot(ks, one.local, "o-", color=colour, label=f"{one.how}, local")
        left.plot(ks, one.overall, "s--", color=colour, label=f"{one.how}, global")
        course = np.linspace(0, 1, len(one.confidence))
        right.plot(course, one.confidence, "o-", color=colour, label=one.how)
        many.plot(course, one.tokens_per_forward, ":", color=colour)
    left.set(xlabel="k", ylabel="AR-ness@k", xticks=list(range(1, len(found[0].local) + 1)))
    right.set(xlabel="course of a block", ylabel="confidence of what is decided")
    many.set_ylabel("tokens per forward (dotted)")
    left.legend(fontsize=7)
    right.legend(fontsize=7)
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
