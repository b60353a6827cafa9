"""What is said of two methods follows from their answers."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import binomtest

from forerun.evaluate.statistics import mcnemar, paired_bootstrap, pass_at_k, sentence


@pytest.mark.parametrize("samples, passed, k", [(5, 2, 1), (5, 2, 3), (6, 1, 6), (4, 0, 2)])
def test_pass_at_k_is_the_share_of_choices_with_one_that_passes(samples, passed, k):
    choices = list(itertools.combinations([True] * passed + [False] * (samples - passed), k))
    assert pass_at_k(samples, passed, k) == pytest.approx(np.mean([any(c) for c in choices]))


def test_pass_at_k_is_not_the_biased_estimate():
    assert pass_at_k(5, 2, 3) != pytest.approx(1 - (1 - 2 / 5) ** 3)


def test_mcnemar_is_the_exact_binomial_test_of_what_differs():
    ours = [1] * 9 + [0] * 2 + [1] * 30 + [0] * 20
    theirs = [0] * 9 + [1] * 2 + [1] * 30 + [0] * 20
    assert mcnemar(ours, theirs) == pytest.approx(binomtest(2, 11, 0.5).pvalue)
    assert mcnemar(ours, ours) == 1.0


class TestBootstrap:
    def test_its_interval_covers_the_truth_as_often_as_it_says(self):
        rng = np.random.default_rng(1)
        covered = 0
        for trial in range(200):
            theirs = rng.random(120) < 0.5
            ours = np.where(rng.random(120) < 0.2, rng.random(120) < 0.7, theirs)
            found = paired_bootstrap(ours, theirs, seed=trial, draws=500)
            covered += found.low <= 0.2 * (0.7 - 0.5) <= found.high
        assert 0.89 <= covered / 200 <= 0.99

    def test_items_are_paired(self):
        """Two methods that are right on the same items differ by nothing, however hard those
        are."""
        scores = np.random.default_rng(0).random(100) < 0.5
        assert paired_bootstrap(scores, scores).largest < 0.04
        shuffled = np.random.default_rng(1).permutation(scores)
        assert paired_bootstrap(scores, shuffled).largest > 0.1

    def test_where_nothing_differs_something_still_could(self):
        same = paired_bootstrap([1.0] * 50, [1.0] * 50)
        # were more than this share to differ, 50 items without one would have a chance below 5 %
        assert (1 - same.largest) ** 50 == pytest.approx(0.05)

    def test_the_sentence_says_what_the_numbers_say(self):
        rng = np.random.default_rng(0)
        theirs = (rng.random(1000) < 0.6).astype(float)
        few = theirs.copy()
        few[:5] = 1 - few[:5]
        unclear = paired_bootstrap(few, theirs)
        assert sentence(unclear, 0.5) == (
            f"no difference larger than {100 * unclear.largest:.1f} points at 95 %"
        )
        worse = theirs * (rng.random(1000) < 0.9)
        clear = paired_bootstrap(worse, theirs)
        words = sentence(clear, mcnemar(worse, theirs))
        assert f"{-100 * clear.mean:.1f} points less" in words and "p = " in words
        assert not math.isnan(clear.low) and clear.high < 0
