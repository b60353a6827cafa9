"""What outputs are measured by: pure functions of tokens, texts and samples."""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def shannon_entropy(tokens: Sequence[int]) -> float:
    """Bits per token of a sequence's own token frequencies (Guo & Ermon, equation 22): low where
    text repeats itself."""
    counts = np.array(list(Counter(tokens).values())) / len(tokens)
    return float(-(counts * np.log2(counts)).sum())


def first_line(text: str) -> str:
    """A completion up to the end of the first line that has something in it."""
    lines = text.split("\n")
    first = next((i for i, line in enumerate(lines) if line.strip()), len(lines) - 1)
    return "\n".join(lines[: first + 1]).rstrip()


def parses(code: str) -> bool:
    """Is it Python, up to its last whole line? Up to three broken lines at the end are forgiven."""
    lines = code.split("\n")[:-1] or [code]
    for cut in range(min(4, len(lines))):
        try:
            ast.parse("\n".join(lines[: len(lines) - cut]))
        except (SyntaxError, ValueError):
            continue
        return True
    return False


@dataclass(frozen=True)
class Mean:
    """A mean over samples, and how far off it may be."""

    mean: float
    error: float  # standard error of the mean
    samples: int

    def __str__(self) -> str:
        digits = 3 if abs(self.mean) < 10 else 1
        spread = f" ± {self.error:.{digits}f}" if self.samples > 1 else ""
        return f"{self.mean:.{digits}f}{spread}"


def mean(values: Sequence[float]) -> Mean:
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    return Mean(float(np.mean(values)), spread / math.sqrt(len(values)), len(values))


def t_test(a: Sequence[float], b: Sequence[float]) -> float:
    """The p-value of Welch's t-test: could two samples have the same mean?"""
    from scipy.stats import ttest_ind

    return float(ttest_ind(a, b, equal_var=False).pvalue)


def words(text: str) -> list[str]:
    """Lower-case words and numbers, as ROUGE counts them."""
    return re.findall(r"[a-z0-9]+", text.lower())


def rouge(candidate: str, reference: str) -> dict[str, float]:
    """F1 of shared words, of shared pairs of words, and of the longest common subsequence, in
    percent."""
    candidate_words = words(candidate)
    reference_words = words(reference)
    common = _longest_common(candidate_words, reference_words)
    return {
        "rouge1": _overlap(candidate_words, reference_words, 1),
        "rouge2": _overlap(candidate_words, reference_words, 2),
        "rougeL": _f1(common, len(candidate_words), len(reference_words)),
    }


def _overlap(a: Sequence[str], b: Sequence[str], n: int) -> float:
    """F1 of the runs of n words that both have."""
    runs_a = _runs(a, n)
    runs_b = _runs(b, n)
    return _f1((runs_a & runs_b).total(), runs_a.total(), runs_b.total())


def _runs(sequence: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(sequence[i:] for i in range(n))))


def _f1(shared: int, size_a: int, size_b: int) -> float:
    return 200 * shared / (size_a + size_b) if shared else 0.0


def _longest_common(a: Sequence[str], b: Sequence[str]) -> int:
    """The length of the longest common subsequence."""
    lengths = [0] * (len(b) + 1)
    for x in a:
        diagonal = 0
        for j, y in enumerate(b, 1):
            above = lengths[j]
            lengths[j] = diagonal + 1 if x == y else max(above, lengths[j - 1])
            diagonal = above
    return lengths[-1]
