"""A canvas is filled up to the token that ends its text, and everything counts what was filled."""

import numpy as np
import pytest

from forerun.errors import NotAble
from forerun.options import Sampling
from forerun.probability.logits import TokenHistory
from forerun.sequence.canvas import BLANK, Canvas

END = 9


def canvas(tokens=(1, 2, BLANK, BLANK, BLANK, BLANK), **sampling):
    sampling = Sampling(temperature=1.0, frequency_penalty=1.0, **sampling)
    history = TokenHistory(sampling, np.array([1, 2]), 10, frozenset([END]))
    return Canvas(
        list(tokens), history=history, ending=lambda token: "stop" if token == END else None
    )


def test_nothing_is_filled_past_the_end():
    seq = canvas()
    seq.fill([2, 3, 4, 5], [7, END, 7, 8], "said")
    assert seq.tokens.tolist() == [1, 2, 7, END, BLANK, BLANK]
    assert seq.output == [7, END] and seq.finish_reason == "stop"
    assert seq.history.generated == 2 and seq.history.in_output_V[7] == 1
    [event] = seq.trace.events
    assert (list(event.positions), list(event.tokens)) == ([2, 3], [7, END])
    assert seq.remaining == 2


def test_an_end_behind_a_blank_ends_nothing_yet():
    seq = canvas()
    seq.fill([4, 5], [END, 7], "said")
    assert not seq.done and seq.known == 2 and seq.output == [] and seq.remaining == 2
    assert seq.next(9) == [2, 3] and seq.next(1) == [2] and seq.first_blank == 2
    seq.fill([2, 3], [7, 8], "said")
    assert seq.finish_reason == "stop" and seq.output == [7, 8, END] and seq.known == 5


def test_the_last_blank_ends_the_text_by_its_length():
    seq = canvas([1, BLANK, 2, BLANK, 3])
    assert not seq.at_last
    seq.fill([1], [7], "said")
    assert seq.at_last and seq.known == 3 and not seq.done and seq.text.tolist() == [1, 7, 2]
    seq.fill([3], [8], "said")
    assert seq.finish_reason == "length" and seq.known == 5 and seq.remaining == 0


def test_the_trace_says_what_was_rejected_even_if_nothing_was_kept():
    seq = canvas()
    seq.fill([2], [7], "said", drafted=[5, 6])
    seq.fill([], [], "said", drafted=[4])
    seq.fill([], [], "said")
    first, second = seq.trace.events
    assert list(first.rejected) == [6] and list(second.rejected) == [4]
    assert list(second.positions) == []


def test_drafts_are_cut_behind_the_token_that_ends_the_text():
    seq = canvas()
    assert seq.up_to_end([3, END, 4]) == [3, END] and seq.up_to_end((3, 4)) == [3, 4]


@pytest.mark.parametrize("token", [-1, 10])
def test_a_number_that_is_no_token_is_refused(token):
    with pytest.raises(NotAble, match="0 to 9"):
        canvas().fill([2], [token], "said")


def test_an_edit_counts_the_new_token_and_no_longer_the_old():
    seq = canvas()
    seq.finalize(2)
    seq.fill([2, 3], [7, 7], "said")
    seq.edit([(3, 8)])
    counts = seq.history.in_output_V
    assert (counts[7], counts[8]) == (1, 1) and seq.known == 2 and seq.history.generated == 2
    seq.finalize(4)
    assert seq.output == [7, 8] and seq.known == 4
