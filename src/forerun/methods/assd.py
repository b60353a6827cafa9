"""Any-subset speculative decoding (Guo & Ermon, Algorithms 1 and 2): a model drafts blanks in
parallel and judges its own draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor, cat

from forerun.drafters.adaptive import PayingLength
from forerun.drafters.base import Drafter
from forerun.errors import unknown
from forerun.families.any_subset import SubsetScorer
from forerun.methods.speculative import SpeculativeOptions, speculative
from forerun.options import Sampling, check_between
from forerun.probability.acceptance import VerdictRule, rejection, sample_each
from forerun.probability.lossy import tolerant
from forerun.registry import method
from forerun.sequence.canvas import Canvas

ROWS_EACH = 3  # of a token in a verdict: as context, as a question, and of the draft behind it
AHEAD = ("none", "bonus", "whole", "every")


@dataclass(frozen=True)
class AssdOptions(SpeculativeOptions):
    ahead: str = field(
        default="whole",
        metadata={
            "help": "what a verdict asks besides: none (Algorithm 1 as printed), bonus (the token "
            "after the draft), whole (also the next draft, should this one be accepted whole), "
            "every (also the next draft, wherever this one is rejected)"
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ahead not in AHEAD:
            raise unknown("ahead", self.ahead, AHEAD)

    forgives: ClassVar[bool] = False  # might the rule accept what its law gives nothing?

    def follows_costs(self, sampling: Sampling) -> bool:
        return not self.forgives and super().follows_costs(sampling)

    @property
    def bonus(self) -> bool:
        """Does a verdict also give the token after the draft?"""
        return self.ahead != "none"


@dataclass(frozen=True)
class TolerantOptions(AssdOptions):
    forgives = True  # what it writes at temperature 0, too, hangs on how much is drafted
    tolerance: float = field(default=0.01, metadata={"help": "added to every acceptance ratio"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("tolerance", self.tolerance)


@method("assd", guarantee="exact", reference="sequential")
async def assd(
    seq: Canvas, target: SubsetScorer, options: AssdOptions, drafter: Drafter | None = None
) -> None:
    """Draft the next k blanks at once with the model itself (or n-grams), judge them in one
    forward, keep what holds."""
    if drafter is not None:  # Algorithm 2: any other drafter, judged whole
        await speculative.run(seq, target, options, drafter)
    else:
        await self_drafted(seq, target, options, rejection)


@method(
    "assd-tolerant",
    guarantee="approximate",
    reference="sequential",
    reason="drafts are accepted with a ratio that is too large by the tolerance",
)
async def tolerant_assd(seq: Canvas, target: SubsetScorer, options: TolerantOptions) -> None:
    """Any-subset speculative decoding with a tolerance: a little faster, and no longer the model's
    own law."""
    await self_drafted(seq, target, options, tolerant(options.tolerance))


async def self_drafted(
    seq: Canvas, target: SubsetScorer, options: AssdOptions, rule: VerdictRule
) -> None:
    """Algorithm 1. `q` holds the laws of the next draft if the last verdict gave them; then no pass
    is spent on drafting."""
    q: Tensor | None = None
    length = PayingLength(seq, target, options, rows_each=ROWS_EACH)
    begin = seq.filled
    healed = seq.trace.forwards  # what the end of a text prompt took
    while seq.goes_on():
        k = options.k or max(2, length())
        q = still_open(q, seq.filled - begin)
        first_is_certain = q is None
        if q is None:
            q = await target.marginals(seq, seq.next(k))  # lines 5-8
        drawn = await seq.draw(sample_each, seq.next(len(q)), q)
        x = drawn.tokens[: len(q)]
        if first_is_certain:  # Lemma 1: the first token was drawn from its own conditional
            seq.fill(seq.next(1), x[:1], "first")
            q = q[1:]
            x = x[1:]
        x = seq.up_to_end(x)[: seq.remaining - options.bonus]
        if options.forgives:
            x = seq.usable(x)
        if seq.done or (not x and not options.bonus):  # line 9, and k = 1
            q = None
            continue
        prefixes = drafted_prefixes(len(x), options.ahead)
        p, *laws = await target.verdict_and_drafts(seq, x, k, prefixes)  # lines 13-15
        n = await judge(seq, x, q[: len(x)], p, rule, options.bonus)
        q = next_laws(n, len(x), laws)
        begin = seq.filled
    forwards = seq.trace.forwards - healed
    assert forwards <= seq.history.generated, "Theorem 1: no more forwards than tokens"


def still_open(q: Tensor | None, decided: int) -> Tensor | None:
    """The laws behind some places that are decided by now."""
    return q[decided:] if q is not None and decided < len(q) else None


def drafted_prefixes(length: int, ahead: str) -> list[int]:
    """After which prefixes of a chain the next draft is asked for."""
    if ahead == "every":
        return list(range(length + 1))
    return [length] if ahead == "whole" else []


async def judge(
    seq: Canvas, x: list[int], q: Tensor | None, p: Tensor, rule: VerdictRule, bonus: bool = True
) -> int:
    """Lines 16-25: commit what the rule keeps of the draft, and the token after it. How many
    drafted tokens were kept."""
    positions = seq.next(len(x))
    seq.note_draft(positions, x, q)
    if not bonus:
        p = cat([p[: len(x)], p[-1:]])  # no row for a bonus token: the token drawn there is unused
    verdict = await seq.draw(rule, x, q, p)
    n = verdict.accepted
    seq.fill(positions[:n], x[:n], "accepted", drafted=x)
    if not seq.done and (n < len(x) or bonus):
        seq.fill(seq.next(1), [verdict.token], "resampled" if n < len(x) else "bonus")
    return n


def next_laws(n: int, drafted: int, laws: Sequence[Tensor]) -> Tensor | None:
    """The laws of the next draft after n accepted tokens, if the verdict gave them."""
    index = n - (drafted + 1 - len(laws))  # of every prefix, or of the longest ones only
    return laws[index] if index >= 0 and len(laws[index]) else None
