"""A text that is followed while it repeats itself."""

from types import SimpleNamespace

import numpy as np
import pytest

from forerun.drafters import copying
from forerun.drafters.copying import FIRST_ODDS, FIRST_SHARE, Copying
from forerun.drafters.odds import ModelOdds


def canvas(tokens, prompt, known=None):
    text = np.array(tokens)
    return SimpleNamespace(
        tokens=text, known=len(text) if known is None else known, blanks=[prompt]
    )


def a_follower(odds=None):
    odds = odds or ModelOdds(FIRST_ODDS).of_request()
    return Copying(odds, ModelOdds(FIRST_SHARE).of_request())


@pytest.mark.parametrize("pieces", [4096, 3, 1])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 40, 300])
def test_a_prompt_read_at_once_is_known_as_if_read_token_by_token(length, pieces, monkeypatch):
    tokens = np.random.default_rng(length).integers(0, 12, length).tolist()
    one_by_one = a_follower()
    for token in tokens:
        one_by_one._read(token, learns=False)
    monkeypatch.setattr(copying, "AT_ONCE", pieces)
    at_once = a_follower()
    while not at_once.follow(canvas(tokens, length)):
        pass
    assert at_once._text == one_by_one._text == tokens and at_once._bytes == one_by_one._bytes
    if at_once.place:  # what stands before it is what the text ends in
        agrees = at_once.agrees
        assert agrees > 0 and tokens[at_once.place - agrees : at_once.place] == tokens[-agrees:]
    assert bool(at_once.place) == (tokens[-1:] != [] and tokens[-1] in tokens[:-1])


def test_what_is_written_after_a_prompt_is_compared_with_the_copy():
    odds = ModelOdds(FIRST_ODDS).of_request()
    counted = []
    odds.count = lambda agrees, right: counted.append((agrees, right))
    follower = a_follower(odds)
    prompt = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    assert follower.follow(canvas([*prompt, 0, 0], len(prompt), known=len(prompt)))
    assert follower.place == 3 and follower.agrees == 3 and not counted
    assert follower.follow(canvas([*prompt, 4, 9], len(prompt)))
    assert counted == [(3, True), (4, False)] and follower.chances(4) == []


def test_after_a_pause_only_the_last_tokens_are_learnt_from(monkeypatch):
    """To look seldom is to look cheaply: what was written meanwhile is searched, not followed."""
    odds = ModelOdds(FIRST_ODDS).of_request()
    counted = []
    odds.count = lambda agrees, right: counted.append((agrees, right))
    follower = a_follower(odds)
    text = list(range(100, 140)) * 3
    assert follower.follow(canvas(text, 40, known=41)) and not counted
    assert follower.follow(canvas(text, 40)) and len(counted) == copying.LEARNT - 1
    assert all(right for _, right in counted)
    assert text[follower.place] == 100 and follower.agrees >= copying.LONGEST


@pytest.mark.parametrize("change", [0, 2, 5, 1])
def test_the_share_of_all_tokens_that_a_copy_has_right_is_learnt_from_the_text(change):
    """Every so many tokens there is a new one; a copy is found again with the next."""
    prompt = list(range(100, 120))
    text = list(prompt)
    for i in range(120):
        text.append(1000 + i if change and i % change == 0 else prompt[i % len(prompt)])
    follower = a_follower()
    for known in range(len(prompt), len(text) + 1):
        follower.follow(canvas(text, len(prompt), known))
    found = follower.share_right
    if change == 0:
        assert found > 0.85
    elif change == 1:
        assert found < 0.05
    else:  # one new, and the one after it, which nothing stands before
        assert abs(found - (change - 2) / change) < 0.12
