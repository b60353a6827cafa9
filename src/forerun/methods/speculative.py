"""Speculative decoding (Leviathan et al., 2023, Algorithm 1), with any drafter."""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.accept import rejection
from forerun.core import Canvas, Conditional, Drafter
from forerun.parameters import check_whole
from forerun.registry import method


@dataclass(frozen=True)
class Speculative:
    k: int = field(default=5, metadata={"help": "tokens drafted per verdict"})

    def __post_init__(self) -> None:
        check_whole("k", self.k)


@dataclass(frozen=True)
class Lookup(Speculative):
    k: int = field(default=10, metadata={"help": "tokens copied per verdict"})


@method("speculative", guarantee="exact", reference="ar", options=Speculative)
async def speculative(seq: Canvas, target: Conditional, drafter: Drafter, k: int) -> None:
    """Draft k tokens, score them in one forward, keep the longest accepted prefix and one token more."""
    while not seq.done:
        draft = await drafter.propose(seq, min(k, seq.remaining - 1))  # x_i ~ q(. | x_<i)
        [p_LV] = await target.conditionals(seq, draft.tokens)  # p(. | x_<i)
        n, token = await seq.draw(rejection, draft.tokens, draft.q, p_LV)
        seq.fill(draft.positions[:n], draft.tokens[:n], "accepted", drafted=draft.tokens)
        if not seq.done:
            seq.fill(seq.next(1), [token], "resampled" if n < len(draft) else "bonus")


lookup = method("lookup", guarantee="exact", reference="ar", options=Lookup, drafter="lookup")(speculative.run)
