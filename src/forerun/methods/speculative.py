"""Speculative decoding (Leviathan et al., 2023, Algorithm 1), with any drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.drafters.adaptive import DraftLength, PayingLength
from forerun.drafters.base import (
    Draft,
    Drafter,
    draft_seconds,
    drafts_alike,
    most_drafted,
    spelled_out,
    without_waste,
)
from forerun.families.base import ChainScorer
from forerun.options import check_whole
from forerun.probability.acceptance import matching, rejection
from forerun.probability.outcomes import Verdict
from forerun.registry import method
from forerun.sequence.canvas import Canvas


@dataclass(frozen=True)
class SpeculativeOptions(DraftLength):
    k: int | None = field(
        default=None,
        metadata={
            "help": "tokens drafted per verdict; not given: at temperature 0 as many as pay here, "
            "else 5"
        },
    )
    usual = 5

    def __post_init__(self) -> None:
        if self.k is not None:
            check_whole("k", self.k)


@dataclass(frozen=True)
class LookupOptions(SpeculativeOptions):
    k: int | None = field(
        default=None,
        metadata={"help": "tokens copied per verdict; not given: as many as pay here"},
    )
    usual = 10
    certain = True


@method("speculative", guarantee="exact", reference="ar")
async def speculative(
    seq: Canvas, target: ChainScorer, options: SpeculativeOptions, drafter: Drafter
) -> None:
    """Draft k tokens, score them in one forward, keep the longest accepted prefix and one token
    more."""
    seconds, most = draft_seconds(drafter), most_drafted(drafter)
    length = PayingLength(seq, target, options, seconds, most=most)
    alike = drafts_alike(drafter)
    while seq.goes_on():
        k = min(length(), seq.remaining - 1)
        draft = spelled_out(seq, k) or await drafter.propose(seq, k)  # x_i ~ q(. | x_<i)
        await judge(seq, target, without_waste(seq, draft), repeats=length.stays if alike else 0)


async def judge(seq: Canvas, target: ChainScorer, draft: Draft, repeats: int = 0) -> int:
    """Score a draft in one forward, keep its longest accepted prefix and one token more. How many
    were accepted. `repeats`: so many more will be drafted and judged in the same way, so the engine
    may do so by itself.

    A draft that is certain of itself is judged by what plain decoding draws: same seed, same text.
    """
    seq.note_draft(draft.positions, draft.tokens, draft.q)
    certain = draft.q is None
    rule = matching if certain else rejection
    asked = target.judged(seq, draft.tokens, rule, *(() if certain else (draft.q,)))
    asked.repeats = repeats
    verdict: Verdict = await asked  # by p(. | x_<i)
    if certain:
        seq.draws += verdict.accepted  # as often as plain decoding would have drawn
    keep(seq, draft.tokens, verdict.accepted, verdict.token)
    async for further in seq.rounds_ahead():
        keep(seq, further.drafted, further.accepted, further.token)
    return verdict.accepted


def keep(seq: Canvas, drafted: Sequence[int], accepted: int, token: int) -> None:
    """Keep what is accepted of a draft of the next blanks, and the token behind that."""
    seq.fill(seq.next(accepted), drafted[:accepted], "accepted", drafted=drafted)
    if not seq.done:
        seq.append(token, _reason(accepted, len(drafted)))


def _reason(accepted: int, drafted: int) -> str:
    """Why the token after a draft is there."""
    if drafted == 0:
        return "sampled"  # the drafter had nothing to say: plain decoding
    return "resampled" if accepted < drafted else "bonus"


lookup = method(
    "lookup",
    guarantee="exact",
    reference="ar",
    options=LookupOptions,
    drafter="lookup",
    about="Draft what followed the last tokens where they stood before in the text, and judge it "
    "in one forward: speculative decoding without a second model.",
)(speculative.run)
