"""What SpecDiff's equations expect of a draft length gamma and T draft steps."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def expected_tokens(alpha: float, gamma: int) -> float:
    """Equation 2: tokens per verdict when each drafted token is accepted with probability
    alpha."""
    if alpha >= 1:
        return float(gamma + 1)
    return (1 - alpha ** (gamma + 1)) / (1 - alpha)


def expected_speed(alpha: float, gamma: int, steps: int, c1: float, c2: float) -> float:
    """Equation 3: tokens per second, for a draft forward that takes c1 seconds and a target forward
    that takes c2."""
    return expected_tokens(alpha, gamma) / (steps * c1 + c2)


def fit_steps(alphas: Mapping[int, float]) -> tuple[float, float]:
    """c4 and c5 of equation 6, alpha = 1 - c4 - c5 / T, by least squares over the measured T."""
    inverse = [1 / steps for steps in alphas]
    rejected = [1 - alpha for alpha in alphas.values()]
    if len(alphas) < 2:
        return rejected[0], 0.0
    c5, c4 = np.polyfit(inverse, rejected, 1)
    return float(c4), float(c5)
