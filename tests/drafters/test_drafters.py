"""What the lookup drafter copies, and how much of it."""

import numpy as np
import pytest
import torch

from forerun.drafters.diffusion import reveal_chances
from forerun.drafters.lookup import continuation
from forerun.drafters.odds import ModelOdds
from tests.helpers import fresh, model


@pytest.mark.parametrize(
    "text, k, expected",
    [
        ([1, 2, 3, 1, 2], 2, [3, 1]),
        ([1, 2, 3, 9, 1, 2, 4, 8, 1, 2], 2, [4, 8]),  # the latest occurrence wins
        ([7, 1, 2, 3, 8, 2, 4, 0, 1, 2], 1, [3]),  # a longer match wins over a later one
        ([1, 2, 3], 3, []),
        ([5], 3, []),
        ([5, 5], 3, [5, 5, 5]),  # a copy that reaches the end goes on with itself
        ([1, 2, 1, 2], 5, [1, 2, 1, 2, 1]),
    ],
)
def test_what_followed_before_is_expected_again(text, k, expected):
    assert continuation(np.array(text), 3, k) == expected


def test_bytes_between_two_tokens_are_no_match():
    # from their second byte on, the first two tokens read 5 and 6
    assert continuation(np.array([0x500, 0x600, 9, 5, 6], np.int32), 2, 1) == []
    assert continuation(np.array([5, 8, 0x500, 5], np.int32), 1, 1) == [8]


def test_no_match_is_longer_than_asked_for():
    text = np.array([1, 2, 3, 7, 9, 3, 8, 1, 2, 3])
    assert continuation(text, 3, 1) == [7] and continuation(text, 1, 1) == [8]


def drafted(token, **options):
    import torch

    m = fresh()
    m.backbone.forward = lambda batch, slots: torch.nn.functional.one_hot(
        torch.full((len(batch.reads_R),), token), m.vocab
    ).float()
    r = m.generate([5, 5, 5], method="lookup", ignore_eos=True, max_tokens=40, **options)
    return [len(e.drafted) for e in r.trace if e.drafted]


def test_drafts_grow_while_they_are_accepted():
    assert drafted(5, k=10)[:3] == [3, 7, 10]


def test_drafts_are_as_long_as_asked_without_adapting():
    assert drafted(5, k=10, adapt=False)[:2] == [10, 10]


def test_a_draft_ends_with_the_end_token():
    m = fresh()
    end = next(iter(m.eos))
    r = m.generate([end, 5, end, 5], method="lookup", k=6, adapt=False, max_tokens=10)
    assert r.trace[0].drafted == [end]


def test_a_token_after_no_draft_is_sampled_and_no_bonus():
    """Nothing repeats in the first text, and the last token of any text is not drafted."""
    m = fresh()
    fixed = m.generate([1, 2, 3, 4, 5, 6], method="lookup", max_tokens=12, ignore_eos=True)
    drafted_at = {event.forward for event in fixed.trace if event.drafted}
    for event in fixed.trace:
        if event.reason in ("bonus", "resampled"):
            assert event.forward in drafted_at
        if event.reason == "sampled":
            assert event.forward not in drafted_at
    assert fixed.trace[0].reason == "sampled"
    assert sum(len(event.tokens) for event in fixed.trace) == 12


def test_the_reverse_process_reveals_with_the_schedules_probabilities():
    """After step i of T a share of i / T is revealed; what is left at last, for certain."""
    for steps in (1, 2, 5):
        masked = 1.0
        for step, chance in enumerate(reveal_chances(steps)[:-1], 1):
            masked *= 1 - chance
            assert masked == pytest.approx(1 - step / steps, abs=2e-5)
        assert reveal_chances(steps)[-1] == 1.0


def test_the_papers_drafter_takes_its_steps_and_writes_what_the_target_writes():
    target, small = model("llama", torch.float64), model("masked", torch.float64)
    plain = target.generate([5, 6, 7], max_tokens=12, ignore_eos=True)
    for steps in (1, 2, 4):
        how = dict(method="specdiff-ddpm", draft=small, k=6, steps=steps)
        fast = target.generate([5, 6, 7], max_tokens=12, ignore_eos=True, **how)
        assert fast.token_ids == plain.token_ids and fast.guarantee == "approximate"
        drafts = len({event.forward for event in fast.trace if event.drafted})
        assert fast.stats.draft_forwards <= (steps + 1) * drafts
        assert steps > 1 or fast.stats.draft_forwards == drafts


def test_alpha_counts_judged_tokens_only():
    target = model("llama", torch.float64)
    result = target.generate([5, 6, 5, 6, 5], method="lookup", max_tokens=16, ignore_eos=True)
    verdicts = [event for event in result.trace if event.drafted]
    accepted = sum(event.accepted for event in verdicts)
    rejections = sum(bool(event.rejected) for event in verdicts)
    assert result.stats.alpha == pytest.approx(accepted / (accepted + rejections))


def test_requests_that_run_at_once_learn_from_each_other():
    known = ModelOdds([0.7])
    one, other = known.of_request(), known.of_request()
    alone = known.of_request(learns=False)
    for _ in range(20):
        one.count(0, False)
    assert one.chance(0) < other.chance(0) < 0.3, (
        "the model is known better, the request still more"
    )
    before = other.chance(0)
    for _ in range(20):
        alone.count(0, True)
    assert other.chance(0) == before
