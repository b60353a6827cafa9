"""Bets against a method: for each fault that a verifier might have, a bettor stakes on that fault.

The stake is multiplied by (1 + r/p)/2 of the token that came, for the fault's law r and the
reference's law p. If the output has the law p, no bettor's expected stake grows, and the mean stake
exceeds 1/alpha with probability at most alpha, whenever one looks (Ville's inequality).
"""

from __future__ import annotations

import torch
from torch import Tensor

SHADOWS = 200  # runs in which a fault is real, to measure the test's power
MOST_IMPOSSIBLE = 2  # impossible tokens that rounding at the edge of top-k or top-p may explain


def faults(p_V: Tensor, q_V: Tensor | None) -> dict[str, Tensor]:
    """Laws that broken verifiers would have where the right one has p; q is what the drafter would
    propose here."""

    def tempered(power: float) -> Tensor:
        sharp_V = p_V**power
        return sharp_V / sharp_V.sum()

    wrong = {
        "too sharp (temperature 10 % low)": tempered(1 / 0.9),
        "too flat (temperature 10 % high)": tempered(1 / 1.1),
    }
    if q_V is not None:
        shared_V = torch.minimum(p_V, q_V)
        wrong["no residual after a rejection"] = shared_V + (1 - shared_V.sum()) * p_V
        wrong["drafts accepted unseen"] = q_V
    return wrong


class Bets:
    """The stakes on every fault, for the real run and for shadow runs in which the fault is
    real."""

    def __init__(self, alpha: float, seed: int = 0, shadows: int = SHADOWS):
        self.limit = 1 / alpha
        self.shadows = shadows
        self.stakes: dict[str, float] = {}
        self.best = 1.0
        self.impossible = 0
        self.shadow_stakes: dict[str, dict[str, Tensor]] = {}
        self.caught: dict[str, Tensor] = {}
        self.generator = torch.Generator().manual_seed(seed)

    def record(self, token: int, p_V: Tensor, q_V: Tensor | None) -> None:
        """Settle the bets on one token that the method wrote."""
        p_V = p_V.double().cpu()
        if p_V[token] == 0:
            self.impossible += 1
            return
        wrong = faults(p_V, None if q_V is None else q_V.double().cpu())
        payoffs = {name: (1 + r_V / p_V.clamp(min=1e-300)) / 2 for name, r_V in wrong.items()}
        for name, payoff_V in payoffs.items():
            self.stakes[name] = self.stakes.get(name, 1.0) * float(payoff_V[token])
        self.best = max(self.best, self.evidence)
        for name, r_V in wrong.items() if self.shadows else ():
            self._shadow(name, r_V, payoffs)

    def _shadow(self, name: str, r_V: Tensor, payoffs: dict[str, Tensor]) -> None:
        drawn = torch.multinomial(r_V, self.shadows, replacement=True, generator=self.generator)
        stakes = self.shadow_stakes.setdefault(name, {})
        for bettor, payoff_V in payoffs.items():
            stakes[bettor] = (
                stakes.get(bettor, torch.ones(self.shadows, dtype=torch.float64)) * payoff_V[drawn]
            )
        mean = torch.stack(list(stakes.values())).mean(0)
        self.caught[name] = self.caught.get(name, torch.zeros(self.shadows, dtype=torch.bool)) | (
            mean >= self.limit
        )

    @property
    def refuted(self) -> bool:
        return self.best >= self.limit or self.impossible > MOST_IMPOSSIBLE

    @property
    def evidence(self) -> float:
        return sum(self.stakes.values()) / len(self.stakes) if self.stakes else 1.0

    @property
    def power(self) -> dict[str, float]:
        return {name: float(caught.double().mean()) for name, caught in self.caught.items()}
