"""Speculative decoding (Leviathan et al., 2023, Algorithm 1), with any drafter."""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.drafters.adaptive import DraftLength, PayingLength
from forerun.drafters.base import Draft, Drafter, draft_seconds, spelled_out, without_waste
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
    length = PayingLength(seq, target, options, draft_seconds(drafter))
    while seq.goes_on():
        k = min(length(), seq.remaining - 1)
        draft = spelled_out(seq, k) or await drafter.propose(seq, k)  # x_i ~ q(. | x_<i)
        await judge(seq, target, without_waste(seq, draft))


async def judge(seq: Canvas, target: ChainScorer, draft: Draft) -> int:
    """Score a draft in one forward, keep its longest accepted prefix and one token more. How many
    were accepted.

    A draft that is certain of itself is judged by what plain decoding draws: same seed, same text.
    """
    seq.note_draft(draft.positions, draft.tokens, draft.q)
    verdict: Verdict  # by p(. | x_<i)
    if draft.q is None:
        verdict = await target.judged(seq, draft.tokens, matching)
        seq.draws += verdict.accepted  # as often as plain decoding would have drawn
    else:
        verdict = await target.judged(seq, draft.tokens, rejection, draft.q)
    n = verdict.accepted
    seq.fill(draft.positions[:n], draft.tokens[:n], "accepted", drafted=draft.tokens)
    if not seq.done:
        seq.append(verdict.token, _reason(n, len(draft)))
    return n


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
