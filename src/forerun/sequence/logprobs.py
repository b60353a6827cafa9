"""Log-probabilities of decided tokens, for requests that ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired, TypedDict

import torch
from torch import Tensor

from forerun.errors import NotAble

CHUNK = 64  # tokens whose laws are looked at together


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
        self.wanted = top is not None
        self.entries: list[TokenLogprob] = []  # of published tokens, from left to right
        self._answered: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._decided: dict[int, TokenLogprob] = {}

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

    def given(self, positions: Sequence[int], tokens: Sequence[int]) -> list[TokenLogprob]:
        """The log-probabilities of tokens that nobody drew, as last answered: the host waits for
        the device once per chunk, not per token."""
        found: list[TokenLogprob] = []
        for first in range(0, len(tokens), CHUNK):
            chunk = slice(first, first + CHUNK)
            found += self._given(positions[chunk], tokens[chunk])
        return found

    def _given(self, positions: Sequence[int], tokens: Sequence[int]) -> list[TokenLogprob]:
        pairs = [self._answered[0, position] for position in positions]
        model_NV = torch.stack([logits_V for logits_V, _ in pairs]).double().log_softmax(-1)
        law_NV = torch.stack([law_V for _, law_V in pairs]).double().log()
        index_N1 = torch.tensor(tokens, device=model_NV.device)[:, None]
        best = model_NV.topk(min(self.top or 0, model_NV.shape[-1]))
        own = model_NV.gather(1, index_N1)[:, 0].tolist()
        drawn = law_NV.gather(1, index_N1)[:, 0].tolist()
        tops = zip(best.indices.tolist(), best.values.tolist())
        return [
            {
                "token": token,
                "logprob": logprob,
                "sampled_logprob": sampled,
                "top": [{"token": i, "logprob": p} for i, p in zip(*top)],
            }
            for token, logprob, sampled, top in zip(tokens, own, drawn, tops)
        ]

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
