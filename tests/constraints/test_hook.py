"""A constraint in the laws of rows, whoever the constraint is."""

import numpy as np
import torch

from forerun.constraints.base import bitmask, only_token, tokens_of
from forerun.constraints.left_to_right import LeftToRight
from forerun.families.causal import Causal
from forerun.options import Sampling
from forerun.probability.logits import ChainRows, TokenHistory, allowed_by, laws_from_logits
from forerun.sequence.canvas import BLANK, Canvas
from forerun.sequence.question import Branch, BranchQuestion

VOCAB = 40
END = 39


class Words:
    """A language of a few words over tokens: a state is what was written."""

    def __init__(self, *words):
        self.words = words

    def start(self):
        return ()

    def advance(self, state, token):
        after = (*state, token)
        return after if any(word[: len(after)] == after for word in self.words) else None

    def allowed(self, state):
        n = len(state)
        return bitmask({w[n] for w in self.words if w[:n] == state and len(w) > n}, VOCAB)

    def accepts(self, state):
        return state in self.words

    def guess(self, state):
        return []

    error = ""

    def settle(self, state):
        pass


def sequence(*words, blanks=6, **sampling):
    constraint = LeftToRight(Words(*words), 2, frozenset([END]), VOCAB)
    options = Sampling(temperature=1.0, **sampling)
    history = TokenHistory(
        options, np.array([1, 2]), VOCAB, frozenset([END]), constraint=constraint
    )
    return Canvas([1, 2, *[BLANK] * blanks], history=history)


def supports(seq, *branches):
    """Which tokens each row's law gives something to."""
    plan = Causal().conditionals(seq, [()])
    chains = BranchQuestion(None, plan, seq, branches, False, False).chains
    rows = sum(chain.rows for chain in chains)
    return [
        law.nonzero()[:, 0].tolist() for law in laws_from_logits(torch.zeros(rows, VOCAB), chains)
    ]


def test_bitmasks_hold_the_tokens_that_they_are_made_of():
    for tokens in ([], [0], [31], [32], [3, 31, 39], range(VOCAB)):
        mask = bitmask(tokens, VOCAB)
        assert mask.dtype == np.int32 and tokens_of(mask).tolist() == list(tokens)
        flags = allowed_by(mask[None], torch.zeros(1, VOCAB))
        assert flags[0].nonzero()[:, 0].tolist() == list(tokens)
        assert only_token(mask) == (next(iter(tokens)) if len(tokens) == 1 else None)


def test_each_row_of_a_chain_sees_the_mask_of_its_own_prefix():
    seq = sequence((5, 6, 7), (5, 8), (9,))
    assert supports(seq, Branch([5, 8], range(3))) == [[5, 9], [6, 8], [END]]


def test_rows_of_a_tail_see_the_chain_up_to_where_they_leave_it():
    seq = sequence((5, 6, 7), (5, 8, 3), (9,))
    rows = supports(seq, Branch([5, 6], range(3)), Branch([5, 8], range(2, 3)))
    assert rows == [[5, 9], [6, 8], [7], [3]]


def test_rows_behind_a_token_that_is_not_allowed_are_free():
    seq = sequence((5, 6), (9,))
    assert supports(seq, Branch([7, 6], range(3)))[1:] == [list(range(VOCAB))] * 2


def test_blanks_that_are_not_next_are_free_and_the_next_is_not():
    seq = sequence((5, 6), (9,))
    free = list(range(VOCAB))
    assert supports(seq, Branch((), [0, 0], [2, 3])) == [[5, 9], free]
    assert supports(seq, Branch([5], [1, 1], [3, 4], [2])) == [[6], free]
    assert supports(seq, Branch([5], [1, 1], ())) == [free, free]  # a draft behind the next token


def test_decisions_move_the_constraint_and_rejected_drafts_do_not():
    seq = sequence((5, 6, 7), (5, 8), (9,))
    supports(seq, Branch([9], range(2)))
    seq.fill([2], [5], "resampled")
    assert supports(seq, Branch([], [0])) == [[6, 8]]


def test_tokens_without_an_alternative_are_placed_without_a_law():
    seq = sequence((5, 6, 7, 8), (5, 6, 7, 9))
    assert seq.goes_on()
    assert seq.output == [5, 6, 7]
    assert [event.reason for event in seq.trace.events] == ["forced"] * 3
    assert supports(seq, Branch([], [0])) == [[8, 9]]


def test_forced_tokens_count_for_penalties():
    seq = sequence((5, 6, 6), (5, 6, 7), presence_penalty=1.0)
    seq.goes_on()
    [law] = laws_from_logits(
        torch.zeros(1, VOCAB), [ChainRows(seq.history, [], [0], positions=[seq.known])]
    )
    assert law[7] > law[6] > 0


def test_with_logprobs_nothing_is_forced():
    seq = sequence((5, 6, 7), logprobs=0)
    assert seq.goes_on() and seq.output == []


def test_a_text_that_is_full_before_the_constraint_is_met_says_so():
    unmet = sequence((5, 6, 7), blanks=2)
    unmet.fill([2, 3], [5, 6], "sampled")
    met = sequence((5, 6), (5, 6, 7), blanks=2)
    met.fill([2, 3], [5, 6], "sampled")
    assert (unmet.finish_reason, met.finish_reason) == ("unmet", "length")


def test_constrained_and_other_sequences_share_a_batch():
    one = sequence((5, 6), (9,))
    free = TokenHistory(Sampling(temperature=1.0), np.array([1]), VOCAB, frozenset())
    chains = [ChainRows(free, [], [0]), ChainRows(one.history, [], [0], positions=[2])]
    laws = laws_from_logits(torch.zeros(2, VOCAB), chains)
    assert [int((law > 0).sum()) for law in laws] == [VOCAB, 2]


def test_an_engine_that_fails_ends_its_own_sequence_only():
    class Failing(Words):
        def allowed(self, state):
            if state:
                raise RuntimeError("too much")
            return super().allowed(state)

    one = sequence((5, 6), (5, 9))
    failing = LeftToRight(Failing((5, 6)), 2, frozenset([END]), VOCAB)
    other = TokenHistory(
        Sampling(temperature=0.0), np.array([1]), VOCAB, frozenset([END]), constraint=failing
    )
    other.add(5, 2)
    chains = [
        ChainRows(other, [], [0], positions=[3]),
        ChainRows(one.history, [5], [1], positions=[3]),
    ]
    laws = laws_from_logits(torch.zeros(2, VOCAB), chains)
    assert not (laws[0] > 0).any() and int((laws[1] > 0).sum()) == 2
    assert "too much" in failing.error and not failing.met
