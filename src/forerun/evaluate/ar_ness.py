"""How nearly from left to right a block model decodes, and how sure it is on the way (figures 2 and
5 of Han et al., 2026; AR-ness is of Gong et al., 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from forerun.api import Model
from forerun.errors import NotAble
from forerun.families.block import BlockFiller
from forerun.requests.result import Result


def check_fills_blocks(model: Model, analysis: str) -> None:
    if not model.family.can(BlockFiller):
        raise NotAble(
            f"'{model.name}' (family '{model.family.name}') is no block model: {analysis} needs "
            f"one, such as 'zoo:block'."
        )


def order_of(result: Result) -> list[int]:
    """The positions of a result in the order in which they were decided; those of one forward in
    the order in which they were written."""
    return [
        position
        for event in result.trace
        if event.reason != "edited"
        for position in event.positions
    ]


def local_ar_ness(order: Sequence[int], k: int) -> float:
    """The share of decisions that end k steps to the right: with k = 1 those of the token after the
    one that was decided before, i_t = i_{t-1} + 1."""
    windows = [order[i : i + k + 1] for i in range(len(order) - k)]
    if not windows:
        return float("nan")
    in_order = [all(b - a == 1 for a, b in pairwise(window)) for window in windows]
    return float(np.mean(in_order))


def global_ar_ness(order: Sequence[int], k: int) -> float:
    """The share of decisions that are of one of the k first blanks there are."""
    left = sorted(order)
    hits = []
    for position in order:
        hits.append(left.index(position) < k)
        left.remove(position)
    return float(np.mean(hits))


@dataclass(frozen=True)
class OrderReport:
    """In which order a method decided, and how its decisions change in the course of a block."""

    label: str
    local: list[float]  # AR-ness@k for k = 1, 2, ...
    overall: list[float]
    # From a block's first decision to its last, in equal parts; None for a part without any.
    confidence: list[float | None]
    tokens_per_forward: list[float | None]


class BlockDecision(NamedTuple):
    """What was decided of a block at once."""

    positions: list[int]
    forwards: int  # that it took: a draft may take one of its own


def order_report(
    results: Sequence[Result], label: str, block: int, ks: int = 5, parts: int = 10
) -> OrderReport:
    """From results that have log-probabilities."""
    for result in results:
        if result.error is not None:
            raise result.error
    orders = [order_of(result) for result in results]
    course = [PartOfBlock() for _ in range(parts)]
    for result in results:
        confidence = _confidence_by_position(result)
        for decisions in decisions_by_block(result, block):
            _add_block(course, decisions, confidence)
    counts = range(1, ks + 1)
    return OrderReport(
        label,
        local=[float(np.mean([local_ar_ness(order, k) for order in orders])) for k in counts],
        overall=[float(np.mean([global_ar_ness(order, k) for order in orders])) for k in counts],
        confidence=[part.mean_confidence() for part in course],
        tokens_per_forward=[part.tokens_per_forward() for part in course],
    )


class PartOfBlock:
    """What was decided in one part of the course of a block, over all blocks."""

    def __init__(self) -> None:
        self.confidence: list[float] = []
        self.tokens = 0
        self.forwards = 0

    def mean_confidence(self) -> float | None:
        return float(np.mean(self.confidence)) if self.confidence else None

    def tokens_per_forward(self) -> float | None:
        return self.tokens / self.forwards if self.forwards else None


def _add_block(
    course: Sequence[PartOfBlock],
    decisions: Sequence[BlockDecision],
    confidence: dict[int, float],
) -> None:
    """Add each decision of a block to every part that it reaches into."""
    parts = len(course)
    for i, (positions, forwards) in enumerate(decisions):
        first = i * parts // len(decisions)
        end = -(-(i + 1) * parts // len(decisions))
        for part in course[first:end]:
            part.confidence += [confidence[p] for p in positions if p in confidence]
            part.tokens += len(positions)
            part.forwards += forwards


def _confidence_by_position(result: Result) -> dict[int, float]:
    """The probability that each token had when it was decided."""
    first = len(result.prompt_ids)
    entries = result.logprobs or []
    return {first + i: float(np.exp(entry["logprob"])) for i, entry in enumerate(entries)}


def decisions_by_block(result: Result, block: int) -> list[list[BlockDecision]]:
    """The decisions of every block, in order."""
    by_forward: dict[int, list[int]] = {}
    for event in result.trace:
        if event.reason != "edited":
            by_forward.setdefault(event.forward, []).extend(event.positions)
    by_block: dict[int, list[BlockDecision]] = {}
    before = 0
    for forward, positions in by_forward.items():
        number = min(positions, default=0) // block
        by_block.setdefault(number, []).append(BlockDecision(positions, forward - before))
        before = forward
    return [decisions for _, decisions in sorted(by_block.items())]
