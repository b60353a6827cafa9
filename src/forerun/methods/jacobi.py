"""Jacobi decoding (Song et al., 2021; Santilli et al., 2023): guess a window of tokens, and let the model correct all of it at
once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.accept import iteration
from forerun.core import Canvas, Conditional
from forerun.errors import unknown
from forerun.noise import mix
from forerun.parameters import check_flag, check_whole
from forerun.registry import method

STARTS = ("repeat", "text", "random")


@dataclass(frozen=True)
class Jacobi:
    block: int = field(default=16, metadata={"help": "tokens that are guessed at once (n in the paper)"})
    start: str = field(
        default="repeat",
        metadata={"help": "first guesses: repeat (the last token), text (tokens of the text so far), random (any)"},
    )
    refill: bool = field(default=True, metadata={"help": "keep the window full; else a block is finished before the next begins"})

    def __post_init__(self) -> None:
        check_whole("block", self.block)
        check_flag("refill", self.refill)
        if self.start not in STARTS:
            raise unknown("start", self.start, STARTS)


@method("jacobi", guarantee="exact", reference="ar", options=Jacobi)
async def jacobi(seq: Canvas, target: Conditional, block: int, start: str, refill: bool) -> None:
    """Guess a block of tokens, ask what follows every prefix of them, keep what is right, and guess again with what the model said.

    At temperature 0 this is the fixed-point iteration of equation 3, and its fixed point is greedy decoding. Above it a guess is a
    draft that is certain of itself, judged by rejection.
    """
    y: list[int] = []
    while not seq.done:
        if refill or not y:
            y = y + guess(seq, y, block - len(y), start)
        y = y[: seq.remaining - 1]
        [p_LV] = await target.conditionals(seq, y)  # p(. | x, y_<i)
        accepted, token, *said = await seq.draw(iteration, y, p_LV)
        seq.fill(seq.next(accepted), y[:accepted], "accepted", drafted=y)
        if not seq.done:
            seq.fill(seq.next(1), [token], "resampled" if accepted < len(y) else "bonus")
        y = said[accepted + 1 : len(y)]


def guess(seq: Canvas, ahead: Sequence[int], count: int, start: str) -> list[int]:
    """Tokens for places that nothing is known about, with `ahead` between them and the text. What looks random is a hash of the
    place: a guess must not depend on what is drawn."""
    if not len(seq.text):
        start = "random"  # there is nothing to repeat
    if start == "repeat":
        return [ahead[-1] if ahead else int(seq.text[-1])] * count
    first = seq.known + len(ahead)
    numbers = [mix(place) for place in range(first, first + count)]
    return [int(seq.text[i % len(seq.text)]) if start == "text" else i % seq.history.vocab for i in numbers]
