"""What self-speculation of masked models does besides writing the right text."""

import pytest
import torch

from forerun.families.masked import CacheScope
from forerun.methods.ssd import Guess, chain, likeliest, mixed, next_guesses
from tests.helpers import PROMPTS, ask, fresh, model, stepped


@pytest.mark.parametrize("tree", ["mixed", "chain"])
def test_its_log_probabilities_are_those_of_the_law_that_each_token_was_drawn_from(tree):
    m = model("masked", torch.float64)
    how = dict(max_tokens=16, ignore_eos=True, logprobs=0, block=8)
    for prompt in PROMPTS:
        expected = m.generate(prompt, method="stepwise", **how)
        found = m.generate(prompt, method="ssd", tree=tree, drafts=4, **how)
        assert found.token_ids == expected.token_ids
        pairs = zip(found.logprobs, expected.logprobs, strict=True)
        assert all(a["logprob"] == pytest.approx(b["logprob"], abs=1e-9) for a, b in pairs)


def test_without_drafts_it_draws_no_more_than_stepwise():
    m = stepped(fresh("masked", torch.float64))
    how = dict(max_tokens=8, ignore_eos=True, block=4)
    draws = []
    for options in (dict(method="stepwise"), dict(method="ssd", drafts=0)):
        jobs = m.submit(PROMPTS[0], **options, **how)
        m.engine.run()
        draws.append(jobs.jobs[0].seq.draws)
    assert draws[0] == draws[1]


def guesses(*confidences, block=0):
    return [Guess((i, 7), c, c, block) for i, c in enumerate(confidences)]


def test_a_decision_that_was_passed_over_leads_back_to_the_chain():
    nodes, leads = mixed(guesses(0.9, 0.8, 0.7), most=10)
    assert len(nodes) == 6  # 2N, as in Table 3
    swapped = leads[0, (1, 7)]
    assert nodes[swapped] == [(1, 7)]
    assert nodes[leads[swapped, (0, 7)]] == [(0, 7), (1, 7)]


def test_trees_keep_to_the_canvases_that_there_is_room_for():
    five = guesses(0.9, 0.8, 0.7, 0.6, 0.5)
    for most in range(1, 12):
        assert len(chain(five, most).nodes) == min(most, 6)
        assert len(mixed(five, most).nodes) <= most
        found = likeliest(five, 5, most).nodes
        assert len(found) == most and found[0] == [] and len({frozenset(n) for n in found}) == most


def test_the_likeliest_canvases_finish_a_block_before_the_next():
    first = [Guess((0, 7), 0.1, 0.1, 0), Guess((1, 7), 0.9, 0.9, 1), Guess((2, 7), 0.8, 0.8, 1)]
    for placed in likeliest(first, 3, 8).nodes[1:]:
        assert (0, 7) in placed


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_drafts_cross_the_border_of_a_block_under_a_cache(cache):
    """A block's first forward has a draft, and keeps to what stepwise decoding writes."""
    m = model("masked", torch.float64)
    how = dict(max_tokens=12, block=3, cache=cache, ignore_eos=True)
    for prompt in PROMPTS:
        slow = m.generate(prompt, method="stepwise", **how)
        fast = m.generate(prompt, method="ssd", drafts=2, tree="chain", **how)
        assert fast.token_ids == slow.token_ids
        decided = 0
        begins = set()  # forwards that begin a block, but for the first
        for event in fast.trace:
            if decided and decided % 3 == 0:
                begins.add(event.forward)
            decided += len(event.positions)
        drafted = {event.forward for event in fast.trace if event.drafted}
        assert begins and begins <= drafted


@pytest.mark.parametrize("kind", ["masked", "masked-shifted"])
def test_a_look_beyond_the_block_changes_nothing_inside(kind):
    """Rows for the next block's guesses are seen by nobody, and see their own canvas."""
    m = model(kind, torch.float64)
    canvas = [3, 5, *[None] * 6]
    placed = [(), [(2, 9)], [(2, 9), (3, 8)]]
    inside = [[2, 3, 4], [3, 4], [4]]
    scope = CacheScope("dual", 2, 5, fresh=True)
    plain = ask(m, canvas, lambda target, seq: target.canvases(seq, inside, placed, scope))
    with_more = [[*where, 5, 6, 7] for where in inside]
    looked = ask(m, canvas, lambda target, seq: target.canvases(seq, with_more, placed, scope))
    for where, (_, before), (_, after) in zip(inside, plain, looked, strict=True):
        torch.testing.assert_close(before.tensor, after.tensor[: len(where)], rtol=0, atol=1e-12)
        assert after[len(where) :].isfinite().all()
    assert not torch.allclose(looked[1].model_law[-1], looked[2].model_law[-1])


def test_worth_cuts_along_the_order_of_decisions():
    """A sure blank of the next block is no reason to guess an unsure one of this."""

    class Order:
        by = "confidence"
        small_canvases = False
        rows_are_cheap = False

        def number(self, position):
            return position // 2

    class Sequence:
        done = False
        tokens = [-1] * 4

        async def draw(self, rule, *arguments):
            return Ranked()

        def compatible(self, placement):
            return placement

    class Ranked:
        tokens = [1, 2, 3, 4]
        confidence = [0.9, 0.5, 0.95, 0.99]
        score = confidence

    class Options:
        drafts = 4
        worth = 0.6

    class Last:
        blanks = [0, 1, 2, 3]
        model_law = torch.zeros(4, 5)

    waiting = next_guesses(Sequence(), Order(), Last(), Options())
    with pytest.raises(StopIteration) as done:
        waiting.send(None)
    assert [guess.decision for guess in done.value.value] == [(0, 1)]  # 0.9, then 0.45
