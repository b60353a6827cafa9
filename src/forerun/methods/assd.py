"""Any-subset speculative decoding (Guo & Ermon, Algorithms 1 and 2): a model drafts blanks in parallel and judges its own draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, cat

from forerun.accept import each, rejection
from forerun.accept_lossy import tolerant
from forerun.core import AnySubset, Canvas, Drafter
from forerun.errors import unknown
from forerun.methods.speculative import Speculative, speculative
from forerun.parameters import check_between
from forerun.registry import method

AHEAD = ("none", "bonus", "whole", "every")


@dataclass(frozen=True)
class Assd(Speculative):
    ahead: str = field(
        default="whole",
        metadata={
            "help": "what a verdict asks besides: none (Algorithm 1 as printed), bonus (the token after the draft), whole (also "
            "the next draft, should this one be accepted whole), every (also the next draft, wherever this one is rejected)"
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ahead not in AHEAD:
            raise unknown("ahead", self.ahead, AHEAD)


@dataclass(frozen=True)
class Tolerant(Assd):
    tolerance: float = field(default=0.01, metadata={"help": "added to every acceptance ratio"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("tolerance", self.tolerance)


@method("assd", guarantee="exact", reference="sequential", options=Assd)
async def assd(seq: Canvas, target: AnySubset, k: int, ahead: str, drafter: Drafter | None = None) -> None:
    """Draft the next k blanks at once with the model itself (or n-grams), judge them in one forward, keep what holds."""
    if drafter is not None:  # Algorithm 2: any other drafter, judged whole
        return await speculative.run(seq, target, drafter, k)
    await self_drafted(seq, target, k, ahead, rejection)


@method(
    "assd-tolerant",
    guarantee="approximate",
    reference="sequential",
    options=Tolerant,
    reason="drafts are accepted with a ratio that is too large by the tolerance",
)
async def tolerant_assd(seq: Canvas, target: AnySubset, k: int, ahead: str, tolerance: float) -> None:
    """Any-subset speculative decoding that forgives: a little faster, and no longer the model's own law."""
    await self_drafted(seq, target, k, ahead, tolerant(tolerance))


async def self_drafted(seq: Canvas, target: AnySubset, k: int, ahead: str, rule: Callable[..., tuple[Tensor, ...]]) -> None:
    """Algorithm 1. `q` holds the laws of the next draft if the last verdict gave them; then no pass is spent on drafting."""
    q: Tensor | None = None
    while not seq.done:
        certain = q is None
        if q is None:
            q = await target.marginals(seq, seq.next(k))  # lines 5-8
        x = (await seq.draw(each, seq.next(len(q)), q))[: len(q)]
        if certain:  # Lemma 1: the first token was drawn from its own conditional
            seq.fill(seq.next(1), x[:1], "first")
            q, x = q[1:], x[1:]
        x = upto_end(seq, x)[: seq.remaining - (ahead != "none")]
        if seq.done or (not x and ahead == "none"):  # line 9, and k = 1
            q = None
            continue
        p, *laws = await target.outlook(seq, x, k, {"every": range(len(x) + 1), "whole": [len(x)]}.get(ahead, []))  # lines 13-15
        q = await judge(seq, x, q[: len(x)], p, rule, ahead, laws)
    assert seq.forwards <= seq.history.generated, "Theorem 1: no more forwards than tokens"


async def judge(
    seq: Canvas, x: list[int], q: Tensor | None, p: Tensor, rule: Any, ahead: str, laws: Sequence[Tensor]
) -> Tensor | None:
    """Lines 16-25: commit what the rule keeps of the draft and the token after it; return the laws of the next draft, if known."""
    positions = seq.next(len(x))
    if ahead == "none":
        p = cat([p[: len(x)], p[-1:]])  # no row for a bonus token: what is drawn there is thrown away
    n, token = await seq.draw(rule, x, q, p)
    seq.fill(positions[:n], x[:n], "accepted", drafted=x)
    if not seq.done and (n < len(x) or ahead != "none"):
        seq.fill(seq.next(1), [token], "resampled" if n < len(x) else "bonus")
    known = {"every": n, "whole": 0 if n == len(x) else None}.get(ahead)
    return laws[known] if known is not None and len(laws[known]) else None


def upto_end(seq: Canvas, x: list[int]) -> list[int]:
    """A draft up to the token that ends the text: what follows it is wasted."""
    return next((x[: i + 1] for i, token in enumerate(x) if seq.ends(token)), x)
