"""What outputs are measured by: pure functions of tokens, texts and samples."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def shannon_entropy(tokens: Sequence[int]) -> float:
    """Bits per token of a sequence's own token frequencies (Guo & Ermon, equation 22): low where text repeats itself."""
    counts = np.array(list(Counter(tokens).values())) / len(tokens)
    return float(-(counts * np.log2(counts)).sum())


def first_line(text: str) -> str:
    """A completion up to the end of the first line that has something in it."""
    lines = text.split("\n")
    said = next((i for i, line in enumerate(lines) if line.strip()), len(lines) - 1)
    return "\n".join(lines[: said + 1]).rstrip()


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
    """F1 of shared words, of shared pairs of words, and of the longest common subsequence, in percent."""
    ours, theirs = words(candidate), words(reference)
    return {
        "rouge1": _overlap(ours, theirs, 1),
        "rouge2": _overlap(ours, theirs, 2),
        "rougeL": _f1(_longest_common(ours, theirs), len(ours), len(theirs)),
    }


def _overlap(a: Sequence[str], b: Sequence[str], n: int) -> float:
    ours, theirs = (Counter(zip(*(x[i:] for i in range(n)))) for x in (a, b))
    return _f1(sum((ours & theirs).values()), sum(ours.values()), sum(theirs.values()))


def _f1(shared: int, ours: int, theirs: int) -> float:
    return 200 * shared / (ours + theirs) if shared else 0.0


def _longest_common(a: Sequence[str], b: Sequence[str]) -> int:
    row = [0] * (len(b) + 1)
    for x in a:
        previous = 0
        for j, y in enumerate(b, 1):
            previous, row[j] = row[j], previous + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]
