"""Drafts on a canvas: independent marginals, conditioned on the language of the whole hole."""

import itertools
import math

import numpy as np
import pytest
import torch

from forerun.constraints.automaton import token_automaton, with_ends
from forerun.constraints.canvas import OPEN, OnCanvas, Stretch, Walk
from forerun.constraints.regular import language_of_regex
from forerun.constraints.spelling import Spelling
from forerun.constraints.sum_product import conditioned
from forerun.options import Sampling
from forerun.probability.logits import ChainRows, TokenHistory, laws_from_logits

SPELLING = Spelling([b"a", b"b", b"ab", None])
VOCAB = 4


def automaton_of(regex):
    return token_automaton(language_of_regex(regex), SPELLING)


def texts(automaton, tokens):
    choices = [range(VOCAB) if token == OPEN else [token] for token in tokens]
    return [text for text in itertools.product(*choices) if automaton.accepts(text)]


def logits_of(rows, seed):
    logits = torch.from_numpy(np.random.default_rng(seed).normal(size=(rows, VOCAB)) * 2)
    logits[:, 3] = -math.inf
    return logits


def by_trying_all(automaton, tokens, rows, law):
    """The law of every row's place under the product of the laws, given that the text is one of the
    language; and the likeliest text."""
    marginal = torch.zeros_like(law)
    best = (0.0, ())
    for text in texts(automaton, tokens):
        chance = math.prod(float(law[row, text[place]]) for place, row in rows.items())
        best = max(best, (chance, text))
        for place, row in rows.items():
            marginal[row, text[place]] += chance
    return marginal / marginal.sum(-1, keepdim=True), best[1]


CASES = [
    ("(a|b)*abb", [OPEN] * 4, {0: 0, 1: 1, 2: 2, 3: 3}),
    ("(ab)+|b+", [OPEN, OPEN, 1, OPEN], {0: 0, 1: 1, 3: 2}),  # a token between
    ("a?b{1,3}", [0, OPEN, OPEN], {1: 0, 2: 1}),
]


@pytest.mark.parametrize(("regex", "tokens", "rows"), CASES)
@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
def test_marginals_are_those_of_the_product_given_the_language(regex, tokens, rows, temperature):
    automaton = automaton_of(regex)
    walk = Walk.begin(Stretch(0, len(tokens), automaton), np.array(tokens))
    logits = logits_of(len(rows), 3)
    law = (logits / temperature).softmax(-1)
    expected, _ = by_trying_all(automaton, tokens, rows, law)
    found = (conditioned(logits, walk, rows, (), temperature) / temperature).softmax(-1)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("regex", "tokens", "rows"), CASES)
def test_at_temperature_0_the_likeliest_tokens_are_those_of_the_likeliest_text(regex, tokens, rows):
    automaton = automaton_of(regex)
    walk = Walk.begin(Stretch(0, len(tokens), automaton), np.array(tokens))
    for seed in range(8):
        logits = logits_of(len(rows), seed)
        _, best = by_trying_all(automaton, tokens, rows, logits.softmax(-1))
        found = conditioned(logits, walk, rows, (), 0.0).argmax(-1).tolist()
        assert found == [best[place] for place in rows]


def test_blanks_without_a_row_may_hold_anything():
    """Of (ab)+ in three tokens, the last two are drafted: what fits the first counts alike."""
    automaton = automaton_of("(ab)+")
    walk = Walk.begin(Stretch(0, 3, automaton), np.array([OPEN] * 3))
    found = conditioned(torch.zeros(2, VOCAB).double(), walk, {1: 0, 2: 1}, (), 1.0).softmax(-1)
    every = texts(automaton, [OPEN] * 3)
    for row, place in enumerate((1, 2)):
        support = {text[place] for text in every}
        assert set(found[row].nonzero()[:, 0].tolist()) == support


def test_ends_count_as_texts_do():
    automaton = with_ends(automaton_of("(ab)+"), [3])
    walk = Walk.begin(Stretch(0, 3, automaton), np.array([OPEN] * 3))
    rows = {0: 0, 1: 1, 2: 2}
    logits = logits_of(3, 5).nan_to_num(neginf=0.3)
    expected, _ = by_trying_all(automaton, [OPEN] * 3, rows, logits.softmax(-1))
    found = conditioned(logits, walk, rows, (), 1.0).softmax(-1)
    torch.testing.assert_close(found, expected)


def history(regex, blanks, **sampling):
    constraint = OnCanvas([Stretch(0, blanks, automaton_of(regex))], [OPEN] * blanks, VOCAB)
    options = Sampling(temperature=1.0, **sampling)
    return TokenHistory(options, np.zeros(0, np.int64), VOCAB, frozenset(), constraint=constraint)


def test_the_next_blanks_own_law_is_not_touched_and_others_are():
    """Lemma 1 of any-subset decoding: it is drawn from and not judged again."""
    sequence = history("aab|bbb|bba", 3)
    logits = logits_of(3, 1)
    plain = ChainRows(sequence, (), [0] * 3, [0, 1, 2], positions=[0, 1, 2])
    drafts = ChainRows(sequence, (), [0] * 3, [0, 1, 2], positions=[0, 1, 2], drafts=True)
    by_itself = laws_from_logits(logits, [plain])
    together = laws_from_logits(logits, [drafts])
    torch.testing.assert_close(together[0], by_itself[0])
    assert (together[1] - by_itself[1]).abs().max() > 0.01


def test_rows_that_leave_nothing_for_each_other_stay_as_they_were():
    """As when the token before them came out differently: such a draft is rejected, not an
    error."""
    automaton = automaton_of("aa|bb")
    walk = Walk.begin(Stretch(0, 2, automaton), np.array([OPEN, OPEN]))
    certain = torch.full((2, VOCAB), -math.inf).double()
    certain[0, 0] = certain[1, 1] = 0
    found = conditioned(certain, walk, {0: 0, 1: 1}, (), 1.0)
    assert torch.equal(found, certain)
