"""Log-probabilities of decided tokens, for requests that ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired, TypedDict

from torch import Tensor

from forerun.errors import NotAble


class Alternative(TypedDict):
    """A token that could have stood there."""

    token: int
    logprob: float
    text: NotRequired[str]


class TokenLogprob(TypedDict):
    """Log-probabilities of one token: under the model's own law (the softmax of its logits), and
    under the law after the sampling parameters, from which it was drawn."""

    token: int
    logprob: float
    sampled_logprob: float
    top: list[Alternative]
    text: NotRequired[str]


class LogprobRecord:
    """The laws of the last answer, and the log-probabilities of what was decided from them.

    `top` is how many alternatives are kept per token; None keeps nothing at all.
    """

    def __init__(self, top: int | None):
        self.top = top
        self.entries: list[TokenLogprob] = []  # of published tokens, from left to right
        self._answered: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._decided: dict[int, TokenLogprob] = {}

    @property
    def wanted(self) -> bool:
        return self.top is not None

    def answered(
        self, branch: int, positions: Sequence[int], logits_NV: Tensor, law_NV: Tensor
    ) -> None:
        """Keep what a forward said of some positions, until tokens are decided there."""
        for row, position in enumerate(positions):
            self._answered[branch, int(position)] = (logits_NV[row], law_NV[row])

    def decided(self, position: int, token: int, branch: int = 0) -> None:
        """A token was drawn from the law that this branch of the last answer has there."""
        if (branch, position) in self._answered:
            logits_V, law_V = self._answered[branch, position]
            self._decided[position] = self._entry(token, logits_V, law_V)

    def publish(self, position: int) -> None:
        """The token at this position is final."""
        if position in self._decided:
            self.entries.append(self._decided.pop(position))
        elif self.wanted:
            raise NotAble(
                f"logprobs={self.top}: the method decided position {position} without a law of the "
                "model's there. Leave logprobs= out, or have its questions name their positions."
            )

    def forget_answers(self) -> None:
        self._answered.clear()

    def model_logprob(self, position: int, token: int) -> float:
        """The log-probability of a token under the model's own law, as last answered."""
        logits_V, _ = self._answered[0, position]
        return float(logits_V.double().log_softmax(-1)[token])

    def entry(self, position: int, token: int) -> TokenLogprob:
        """The log-probabilities of any token there, as last answered."""
        return self._entry(token, *self._answered[0, position])

    def _entry(self, token: int, logits_V: Tensor, law_V: Tensor) -> TokenLogprob:
        model_V = logits_V.double().log_softmax(-1)
        return {
            "token": token,
            "logprob": float(model_V[token]),
            "sampled_logprob": float(law_V[token].double().log()),
            "top": _likeliest(model_V, self.top) if self.top else [],
        }


def _likeliest(model_V: Tensor, count: int) -> list[Alternative]:
    best = model_V.topk(min(count, len(model_V)))
    pairs = zip(best.indices.tolist(), best.values.tolist())
    return [{"token": int(i), "logprob": float(p)} for i, p in pairs]
