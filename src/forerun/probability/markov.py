"""Laws of a draft that the token before corrects: a matrix of low rank, added to logits (DSpark).

The tokens of a draft are drawn from left to right, each from its law given the one before it. So
rejection judges them exactly.

N rows, B sequences, K drafted tokens, R rank, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from forerun.probability.acceptance import Sampler, rule_factory
from forerun.probability.distributions import point_mass
from forerun.probability.outcomes import Tokens
from forerun.probability.pending import PendingLaws
from forerun.probability.transfer import can_fuse


@dataclass(frozen=True, eq=False)
class Markov:
    """How a token moves the logits of the one after it: row of the first times the second."""

    before_VR: Tensor
    after_VR: Tensor
    tokens_N: Tensor | None = None  # that are ever drafted, where those are few
    # Rows times the second matrix, of the tokens that are ever drafted, where a machine has its own
    # product: then whoever drafts there gets the same bits.
    product: Callable[[Tensor], Tensor] | None = None

    def law(self, law_NV: Tensor, before_N: Tensor, temperature: float) -> Tensor:
        """Untempered laws, corrected by the tokens before and then tempered. What was impossible
        stays so."""
        logits_NV = self.moved(law_NV.log(), before_N)
        if temperature == 0:
            return point_mass(logits_NV.argmax(-1), law_NV.shape[-1], law_NV.dtype)
        return (logits_NV / temperature).softmax(-1).nan_to_num()  # rows that pad have no mass

    def moved(self, logits_NV: Tensor, before_N: Tensor) -> Tensor:
        """Logits, corrected by the tokens before."""
        return logits_NV + self._before(before_N) @ self.after_VR.T

    def likeliest_chain(self, logits_BKV: Tensor, last_B: Tensor) -> Tensor:
        """The likeliest token of each of some logits, [B, K], each moved by the one before it: on a
        GPU, in a launch for each."""
        if can_fuse(logits_BKV):
            from forerun.probability import kernels

            return kernels.likeliest_chain(logits_BKV, last_B, self.before_VR, self.after_VR)
        if self.tokens_N is not None:
            logits_BKV = logits_BKV[..., self.tokens_N]
        tokens = [last_B]
        for logits_BN in logits_BKV.unbind(1):
            best_B = (logits_BN + self._times_after(self._before(tokens[-1]))).argmax(-1)
            tokens.append(best_B if self.tokens_N is None else self.tokens_N[best_B])
        return torch.stack(tokens[1:], 1)

    def _times_after(self, rows_BR: Tensor) -> Tensor:
        return rows_BR @ self._after_RN if self.product is None else self.product(rows_BR)

    def _before(self, token_B: Tensor) -> Tensor:
        return self.before_VR[token_B.clamp(min=0)]

    @cached_property
    def _after_RN(self) -> Tensor:
        """Of the tokens that are ever drafted."""
        few = self.tokens_N
        return self.after_VR.T if few is None else self.after_VR[few].T.contiguous()

    def pending(self, law: Tensor, before_N: Tensor) -> Tensor:
        """The corrected laws under a request's own sampling parameters, where these keep all
        tokens: made in the rule that judges them."""
        if not isinstance(law, PendingLaws):
            raise TypeError("only laws that are not made yet")
        moved_NV = self.before_VR[before_N] @ self.after_VR.T
        logits_NV = law.logits_NV
        exact = torch.promote_types(logits_NV.dtype, torch.float32)
        corrected_NV = logits_NV.to(exact) + moved_NV.to(exact)
        return PendingLaws.of(corrected_NV, 0, len(corrected_NV), law.parts[0].sampling)


class ChainRule:
    """One token from each of K laws, from left to right, each corrected by the one before it."""

    def __init__(self, markov: Markov, temperature: float):
        self.markov = markov
        self.temperature = temperature

    def __call__(self, where_BK: Tensor, last_BN: Tensor, p_BKV: Tensor, sample: Sampler) -> Tokens:
        if self.temperature == 0:
            return self.likeliest(where_BK, last_BN, p_BKV.log())
        return _of(where_BK, self._drawn(p_BKV.log(), last_BN[:, 0], sample))

    def likeliest(self, where_BK: Tensor, last_BN: Tensor, logits_BKV: Tensor) -> Tokens:
        """Nothing is left to chance: no laws are needed."""
        return _of(where_BK, self.markov.likeliest_chain(logits_BKV, last_BN[:, 0]))

    def _drawn(self, logits_BKV: Tensor, before_B: Tensor, sample: Sampler) -> Tensor:
        drawn = []
        for logits_BV in logits_BKV.unbind(1):
            corrected_BV = self.markov.moved(logits_BV, before_B)
            before_B = sample((corrected_BV / self.temperature).softmax(-1).nan_to_num())
            drawn.append(before_B)
        return torch.stack(drawn, 1)


def _of(where_BK: Tensor, tokens_BK: Tensor) -> Tokens:
    """Tokens where there are blanks."""
    return Tokens.of_batch(tokens=torch.where(where_BK >= 0, tokens_BK, 0))


draw_chain: Callable[[Markov, float], ChainRule] = rule_factory(ChainRule)
