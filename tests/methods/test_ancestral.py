"""The schedule of the reverse process."""

import pytest

from forerun.methods import ancestral
from forerun.probability.selection import reveal
from tests.helpers import model


def test_every_step_reveals_its_share_of_what_is_left(monkeypatch):
    """From time t to s a blank is revealed with probability (t - s) / t: a quarter of all, a third
    of the rest, then half of it, then all of it."""
    asked = []
    monkeypatch.setattr(ancestral, "reveal", lambda p: asked.append(p) or reveal(p))
    how = dict(method="ancestral", steps=4, temperature=1.0, ignore_eos=True, seed=0)
    result = model("masked").generate([5, 6], max_tokens=40, **how)
    assert asked == pytest.approx([1 / 4, 1 / 3, 1 / 2, 1])
    assert len(result.token_ids) == 40 and result.stats.forwards == 4


def test_nothing_is_asked_once_the_text_has_ended():
    how = dict(method="ancestral", steps=30, temperature=1.0, allowed_tokens=[5], seed=2)
    result = model("masked").generate([5, 6], max_tokens=12, stop_token_ids=[5], **how)
    assert result.finish_reason == "stop" and len(result.token_ids) == 1
    assert result.stats.forwards == len(result.trace)
