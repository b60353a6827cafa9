"""Which blanks are decided now: rules on laws of three numbers."""

import pytest
import torch

from forerun.probability.lossy import tempered_ratio, tolerant
from forerun.probability.noise import Noise
from forerun.probability.selection import (
    above_threshold,
    edits,
    entropy_bounded,
    most_confident,
    ranking,
    reveal,
)


class Likeliest:
    """A sampler that draws the likeliest, and remembers which laws it was shown."""

    def __init__(self):
        self.shown = []

    def __call__(self, law):
        self.shown.append(law)
        return law.argmax(-1)

    many = __call__


def two_outcomes(*first):
    """Laws over two tokens, from the probability of the first."""
    p = torch.tensor([list(first)], dtype=torch.float64)
    return torch.stack([p, 1 - p], -1)


def chosen(rule, law, where=None, *more):
    where = torch.arange(law.shape[1])[None] if where is None else torch.tensor([where])
    outcome = rule(where, *more, law, law, Likeliest())
    return [i for i, is_chosen in enumerate(outcome.chosen[0].tolist()) if is_chosen]


def entropy(p):
    return float(torch.special.entr(torch.tensor([p, 1 - p], dtype=torch.float64)).sum())


def test_entropies_may_add_up_to_the_bound_without_the_largest_of_them():
    law = two_outcomes(0.7, 0.99, 0.9, 0.5)  # from the surest: blanks 1, 2, 0, 3
    sums = [0.0]
    for p in (0.99, 0.9, 0.7):
        sums.append(sums[-1] + entropy(p))
    order = [1, 2, 0, 3]
    for count in range(1, 5):
        least = sums[count - 1]  # what a bound must allow for so many blanks
        assert chosen(entropy_bounded(least + 1e-9), law) == sorted(order[:count])
        if count > 1:
            assert chosen(entropy_bounded(least - 1e-9), law) == sorted(order[: count - 1])


def test_a_bound_of_zero_decides_the_surest_blank():
    assert chosen(entropy_bounded(0.0), two_outcomes(0.7, 0.9, 0.8)) == [1]


def test_padding_is_never_decided():
    law = two_outcomes(0.9, 0.8, 1.0)
    where = [4, 7, -1]
    assert chosen(entropy_bounded(100.0), law, where) == [0, 1]
    assert chosen(most_confident(3), law, where) == [0, 1]
    assert chosen(above_threshold(0.5), law, where) == [0, 1]
    assert chosen(edits(0.5), law, where, torch.tensor([[1, 0, 1]])) == [0]


def test_the_most_confident_are_decided_and_of_equals_the_first():
    law = two_outcomes(0.8, 0.9, 0.8, 0.7)
    assert chosen(most_confident(1), law) == [1]
    assert chosen(most_confident(2), law) == [0, 1]


def test_a_threshold_that_is_just_reached_is_reached():
    law = two_outcomes(0.75, 0.5, 0.875)
    assert chosen(above_threshold(0.75), law) == [0, 2]
    assert chosen(above_threshold(0.76), law) == [2]
    assert chosen(above_threshold(1.0), law) == [2]  # nothing reaches 1: the surest anyway
    assert chosen(edits(1.0), two_outcomes(1.0), None, torch.tensor([[1]])) == []


def test_a_blank_is_revealed_with_the_probability_that_was_asked_for():
    law = two_outcomes(0.9, 0.5)
    sample = Likeliest()
    reveal(0.25)(torch.tensor([[3, 4]]), law, sample)
    [shown] = sample.shown
    expected = torch.tensor([[[0.225, 0.025, 0.75], [0.125, 0.125, 0.75]]], dtype=torch.float64)
    assert torch.allclose(shown, expected)


def test_a_blank_that_draws_the_mask_stays_one():
    where = torch.tensor([[3, 4, -1]])
    outcome = reveal(0.6)(where, two_outcomes(0.9, 0.5, 0.9), Likeliest())
    assert outcome.chosen.tolist() == [[True, False, False]]  # 0.54 > 0.4 > 0.3; the last pads
    assert outcome.tokens[0, 0] == 0


def test_guesses_are_likeliest_tokens_with_what_they_are_ordered_by():
    law = two_outcomes(0.5, 0.9, 0.2, 0.9)
    where = torch.tensor([[0, 1, 2, -1]])
    found = ranking()(where, law, Likeliest())
    assert found.tokens.tolist() == [[0, 0, 1, 0]]
    assert found.score.tolist() == found.confidence.tolist()
    assert found.confidence[0].tolist() == pytest.approx([0.5, 0.9, 0.8, 0.0])
    margins = ranking("margin")(where, law, Likeliest())
    assert margins.score[0].tolist() == pytest.approx([0.0, 0.8, 0.6, 0.0])
    assert margins.confidence.tolist() == found.confidence.tolist()


def test_dreams_orders_look_at_the_law_and_not_at_what_was_drawn():
    """By confidence the second, by margin the first, by entropy the third."""
    law = torch.tensor([[[0.48, 0.1, 0.14, 0.14, 0.14], [0.5, 0.32, 0.06, 0.06, 0.06]]])
    law = torch.cat([law, torch.tensor([[[0.49, 0.49, 0.02, 0.0, 0.0]]])], 1)
    where = torch.tensor([[0, 1, 2]])
    for order, first in (("confidence", 1), ("margin", 0), ("entropy", 2)):
        chosen = most_confident(1, order)(where, law, law, Likeliest()).chosen
        assert chosen.tolist() == [[i == first for i in range(3)]]


@pytest.mark.parametrize(
    "make,value",
    [
        (most_confident, 2),
        (above_threshold, 0.5),
        (edits, 0.5),
        (entropy_bounded, 0.5),
        (reveal, 0.5),
        (ranking, "margin"),
        (tolerant, 0.5),
        (tempered_ratio, 0.5),
    ],
)
def test_the_same_options_give_the_same_rule_so_that_sequences_share_a_batch(make, value):
    assert make(value) is make(value)


def test_padding_is_never_edited():
    law = torch.tensor([[[0.1, 0.9], [0.1, 0.9]]])
    found = edits(0.5)(torch.tensor([[4, -1]]), torch.tensor([[0, 0]]), law, law, Noise([(1, 0)]))
    assert found.columns()["chosen"].tolist() == [[True, False]]
