"""Jacobi decoding (Song et al., 2021; Santilli et al., 2023): guess a window of tokens, and let the
model correct all of it at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.drafters.adaptive import DraftLength, guess_length
from forerun.errors import unknown
from forerun.families.base import ChainScorer
from forerun.options import check_flag, check_whole
from forerun.probability.acceptance import jacobi_step
from forerun.probability.noise import mix
from forerun.probability.outcomes import JacobiStep
from forerun.registry import method
from forerun.sequence.canvas import Canvas

STARTS = ("repeat", "text", "random")


@dataclass(frozen=True)
class JacobiOptions(DraftLength):
    block: int | None = field(
        default=None,
        metadata={
            "help": "tokens that are guessed at once (n in the paper); not given: as many as make "
            "a forward little longer here, at most 16"
        },
    )
    start: str = field(
        default="repeat",
        metadata={
            "help": "first guesses: repeat (the last token), text (tokens of the text so far), "
            "random (any)"
        },
    )
    refill: bool = field(
        default=True,
        metadata={"help": "keep the window full; else a block is finished before the next begins"},
    )

    option = "block"
    usual = 16
    certain = True

    def __post_init__(self) -> None:
        if self.block is not None:
            check_whole("block", self.block)
        check_flag("refill", self.refill)
        if self.start not in STARTS:
            raise unknown("start", self.start, STARTS)


@method("jacobi", guarantee="exact", reference="ar")
async def jacobi(seq: Canvas, target: ChainScorer, options: JacobiOptions) -> None:
    """Guess a block of tokens, ask what follows every prefix of them, keep what is right, and guess
    again with what the model said.

    At temperature 0 this is the fixed-point iteration of equation 3, and its fixed point is greedy
    decoding. Above it a guess is a draft that is certain of itself, judged by what plain decoding
    would draw.
    """
    said: list[int] = []  # of the places from `begin` on
    begin = seq.filled
    while seq.goes_on():
        block = guess_length(seq, target, options)
        y = said[seq.filled - begin :][:block]
        if options.refill or not y:
            y = y + guess(seq, y, block - len(y), options.start)
        y = y[: seq.remaining - 1]
        begin = seq.filled
        step = await judge_guess(seq, target, y)
        said = step.likeliest[: len(y)]


async def judge_guess(seq: Canvas, target: ChainScorer, y: Sequence[int]) -> JacobiStep:
    """Score a guess, keep what is right of it and one token more."""
    seq.note_draft(seq.next(len(y)), y)
    step: JacobiStep = await target.judged(seq, y, jacobi_step)  # by p(. | x, y_<i)
    n = step.accepted
    seq.draws += n  # as often as plain decoding would have drawn: same seed, same text
    seq.fill(seq.next(n), y[:n], "accepted", drafted=y)
    if not seq.done:
        seq.append(step.token, "resampled" if n < len(y) else "bonus")
    return step


def guess(seq: Canvas, ahead: Sequence[int], count: int, start: str) -> list[int]:
    """Tokens for places that nothing is known about, with `ahead` between them and the text.

    What looks random is a hash of the place: a guess must not depend on what is drawn.
    """
    text = seq.text
    if start == "repeat" and len(text):
        last = ahead[-1] if ahead else int(text[-1])
        return [last] * count
    first = seq.known + len(ahead)
    numbers = [mix(place) for place in range(first, first + count)]
    if start == "text" and len(text):
        return [int(text[number % len(text)]) for number in numbers]
    return [number % seq.history.vocab for number in numbers]
