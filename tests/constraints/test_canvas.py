"""At every blank of a canvas exactly the tokens that some completion has, whatever is decided
first."""

import itertools
import time

import numpy as np
import pytest

from forerun.constraints.automaton import token_automaton, with_ends, without_ends
from forerun.constraints.base import tokens_of
from forerun.constraints.canvas import OPEN, OnCanvas, Stretch
from forerun.constraints.regular import language_of_choices, language_of_regex
from forerun.constraints.spelling import Spelling

TOKENS = [b"a", b"b", b"ab", None]
SPELLING = Spelling(TOKENS)
REGEXES = ["(ab)*", "a?b{1,3}", "(a|b)*abb", "a*|b*", "(aa)*b"]


def automaton_of(regex):
    return token_automaton(language_of_regex(regex), SPELLING)


def completions(automaton, tokens):
    """All texts of the language that agree with what is known: by trying every one."""
    choices = [range(len(TOKENS)) if token == OPEN else [token] for token in tokens]
    return [text for text in itertools.product(*choices) if automaton.accepts(text)]


def allowed(constraint, position, chain=(), places=()):
    [mask_W] = constraint.masks(list(chain), list(places), [len(chain)], [position])
    return set(tokens_of(mask_W).tolist())


@pytest.mark.parametrize("regex", REGEXES)
def test_a_blank_may_hold_exactly_what_some_completion_has_there(regex):
    automaton = automaton_of(regex)
    for known in itertools.product([OPEN, 0, 1, 2], repeat=4):
        texts = completions(automaton, known)
        constraint = OnCanvas([Stretch(1, 5, automaton)], [3, *known, 3], len(TOKENS))
        assert constraint.possible == bool(texts)
        for place in [i for i, token in enumerate(known) if token == OPEN]:
            assert allowed(constraint, place + 1) == {text[place] for text in texts}


@pytest.mark.parametrize("regex", REGEXES)
def test_no_order_of_decisions_comes_to_a_dead_end(regex):
    """And every decision updates what is allowed, as if all were computed from scratch."""
    automaton = automaton_of(regex)
    rng = np.random.default_rng(0)
    for length, _ in itertools.product(automaton.lengths(6), range(8)):
        tokens = [OPEN] * length
        constraint = OnCanvas([Stretch(0, length, automaton)], tokens, len(TOKENS))
        for place in rng.permutation(length).tolist():
            texts = completions(automaton, tokens)
            assert allowed(constraint, place) == {text[place] for text in texts}
            tokens[place] = int(rng.choice(sorted(allowed(constraint, place))))
            constraint.add(place, tokens[place])
        assert automaton.accepts(tokens) and constraint.met


def test_placed_tokens_count_as_decided_and_leave_no_trace():
    automaton = automaton_of("(ab)*")
    constraint = OnCanvas([Stretch(0, 3, automaton)], [OPEN] * 3, len(TOKENS))
    assert allowed(constraint, 0) == {0, 2}
    assert allowed(constraint, 0, [1], [2]) == {2}
    assert allowed(constraint, 1, [1, 2], [2, 0]) == {0}
    assert allowed(constraint, 1) == {0, 1, 2}


def test_rows_of_a_chain_see_its_tokens_one_after_the_other():
    automaton = automaton_of("a?b{1,3}")
    constraint = OnCanvas([Stretch(0, 3, automaton)], [OPEN] * 3, len(TOKENS))
    masks = constraint.masks([0, 1], [0, 1], [0, 1, 2], [0, 1, 2])
    assert [tokens_of(mask).tolist() for mask in masks] == [[0, 1, 2], [1], [1]]


def test_rows_behind_an_impossible_token_are_free():
    """Nothing leads there, and a law without mass would be no law."""
    constraint = OnCanvas([Stretch(0, 3, automaton_of("(ab)*"))], [OPEN] * 3, len(TOKENS))
    assert allowed(constraint, 1, [1], [0]) >= set(range(len(TOKENS)))


def test_every_hole_has_its_own_language_and_free_blanks_have_none():
    holes = [
        Stretch(1, 3, automaton_of("a*")),
        Stretch(4, 5, token_automaton(language_of_choices(("b", "ab")), SPELLING)),
    ]
    constraint = OnCanvas(holes, [1, OPEN, OPEN, 1, OPEN, OPEN], len(TOKENS))
    assert allowed(constraint, 1) == {0}
    assert allowed(constraint, 4) == {1, 2}
    assert allowed(constraint, 5) >= set(range(len(TOKENS)))
    constraint.add(5, 3)
    assert allowed(constraint, 4) == {1, 2}


def test_what_is_decided_at_once_is_kept_while_it_can_stand_together():
    constraint = OnCanvas([Stretch(0, 2, automaton_of("aa|bb"))], [OPEN] * 2, len(TOKENS))
    assert constraint.compatible([(0, 0), (1, 1)]) == [(0, 0)]
    assert constraint.compatible([(1, 1), (0, 0)]) == [(1, 1)]
    assert constraint.compatible([(0, 1), (1, 1)]) == [(0, 1), (1, 1)]


def test_texts_end_early_only_where_the_language_does_and_not_before_they_may():
    end = 3
    automaton = with_ends(automaton_of("(ab)+"), [end])
    stretch = Stretch(0, 4, automaton, early=without_ends(automaton), late=2)
    constraint = OnCanvas([stretch], [OPEN] * 4, len(TOKENS))
    assert allowed(constraint, 1) == {0, 1, 2}
    assert allowed(constraint, 2) == {0, 1, 2, end}
    constraint.add(0, 0)
    constraint.add(1, 1)
    assert allowed(constraint, 2) == {0, 2, end}
    assert not constraint.met
    constraint.add(2, end)
    assert allowed(constraint, 3) == set(range(4))
    assert constraint.met


def test_forced_tokens_are_known_without_a_model():
    constraint = OnCanvas([Stretch(0, 4, automaton_of("abba?"))], [OPEN] * 4, len(TOKENS))
    assert constraint.forced() == 0
    assert constraint.likely(9) == [0, 1, 1, 0]
    assert constraint.usable([0, 1, 1, 1]) == 3
    constraint.add(0, 0)
    assert constraint.forced() == 1


def test_a_decision_that_leaves_no_completion_is_our_own_mistake():
    constraint = OnCanvas([Stretch(0, 2, automaton_of("aa"))], [OPEN] * 2, len(TOKENS))
    with pytest.raises(AssertionError, match="no completion"):
        constraint.add(0, 1)


def test_a_large_automaton_is_fast_enough_for_every_forward():
    """150 states and 24 places: about 3 ms on the machine this was written on; the limit leaves
    room for slower ones."""
    letters = Spelling([bytes([byte]) for byte in range(32, 127)] + [b"ab", b"  ", b"the"])
    automaton = token_automaton(language_of_regex("([a-z]{1,10} ){13}[0-9]+"), letters)
    assert automaton.states > 140
    best = np.inf
    for _ in range(5):
        began = time.perf_counter()
        constraint = OnCanvas([Stretch(0, 28, automaton)], [OPEN] * 28, len(letters))
        constraint.masks([], [], [0] * 28, range(28))
        best = min(best, time.perf_counter() - began)
    assert constraint.possible
    assert best < 0.03
