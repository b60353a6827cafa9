"""The joint loss of any-subset models, against brute force, and how its prompts are drawn."""

import numpy as np
import pytest
import torch

from forerun.errors import BadOption
from forerun.train.any_subset import AnySubsetObjective, prompt_lengths, runs, two_streams
from forerun.train.objectives import make_objective
from tests.helpers import network

MASK = 7


def one_at_a_time(net, tokens, order, known, horizon):
    """Each blank's negative log-likelihood from a forward of its own, its attention spelt out row
    by row."""
    total = 0.0
    for rank in range(known, len(tokens)):
        seen = order[: horizon[rank]]
        ids = [int(tokens[p]) for p in seen] + [MASK]
        at = [int(p) for p in seen] + [int(order[rank])]
        mask = torch.zeros(len(ids), len(ids), dtype=torch.bool)
        for i in range(len(seen)):
            for j in range(len(seen)):
                mask[i, j] = bool((i < known and j < known) or j <= i)
        mask[-1] = True  # the query sees all that is known to it, and itself
        logits = net(
            input_ids=torch.tensor([ids]),
            position_ids=torch.tensor([at]),
            attention_mask=mask[None, None],
            use_cache=False,
        ).logits[0, -1]
        total -= float(logits.log_softmax(-1)[tokens[order[rank]]])
    return total


@pytest.mark.parametrize(
    "options",
    [dict(spans=0.0), dict(spans=1.0), dict(ahead=0.7, ahead_most=3), dict(any_permutation=True)],
    ids=str,
)
def test_the_packed_loss_is_the_sum_of_separate_forwards(options):
    net = network("llama", torch.float64)
    tokens = torch.randint(8, 250, (3, 12), generator=torch.Generator().manual_seed(1))
    objective = AnySubsetObjective(mask_token=MASK, masked=(0.2, 1.0), **options)
    batch = objective.prepare(tokens, np.random.default_rng(5), 0)
    _, order, known, horizon, _ = (x.numpy() for x in batch)
    with torch.no_grad():
        each = [
            one_at_a_time(net, tokens[b].numpy(), order[b], known[b], horizon[b]) for b in range(3)
        ]
        packed = float(objective.loss(net, *batch))
        shares = [float(objective.loss(net, *(x[b : b + 1] for x in batch))) for b in range(3)]
    assert packed == pytest.approx(sum(each) / float((12 - known).sum()), abs=1e-5)
    assert np.mean(shares) == pytest.approx(packed, abs=1e-6)


def test_orders_are_the_prompt_and_then_the_blanks_each_from_left_to_right():
    objective = AnySubsetObjective()
    rng = np.random.default_rng(0)
    for _ in range(50):
        known = int(rng.integers(0, 20))
        order = objective._order(rng, known, 20)
        assert sorted(order) == list(range(20))
        assert list(order[:known]) == sorted(order[:known]) and list(order[known:]) == sorted(
            order[known:]
        )
    mixed = AnySubsetObjective(any_permutation=True)._order(rng, 4, 20)
    assert list(mixed[:4]) == sorted(mixed[:4]) and list(mixed[4:]) != sorted(mixed[4:])


def test_prompt_lengths_cover_the_range_evenly_in_every_batch():
    rng = np.random.default_rng(3)
    for _ in range(20):
        blank = 100 - np.sort(prompt_lengths(rng, 10, 100, 0.2, 0.9))
        edges = 100 * (0.2 + 0.7 * np.arange(11) / 10)
        assert all(low - 1 <= b <= high + 1 for b, low, high in zip(blank[::-1], edges, edges[1:]))
    assert prompt_lengths(rng, 50, 8, 0.0, 0.0).max() == 7  # one token is always left to predict


def test_runs_have_the_right_number_of_blanks_in_at_most_three_pieces():
    rng = np.random.default_rng(2)
    for _ in range(200):
        blanks = int(rng.integers(1, 30))
        blank = runs(rng, blanks, 30)
        pieces = int(np.diff(np.concatenate([[0], blank.astype(int)])).clip(0).sum())
        assert blank.sum() == blanks and 1 <= pieces <= 3


def test_the_masked_share_warms_up():
    objective = AnySubsetObjective(masked=(0.9, 0.99), masked_start=0.15, masked_warmup=100)
    assert objective.masked_range(0) == (0.15, 0.15)
    assert objective.masked_range(50) == pytest.approx((0.525, 0.57))
    assert objective.masked_range(100) == objective.masked_range(10**6) == (0.9, 0.99)


def test_nobody_sees_a_query_but_itself_and_the_prompt_sees_itself_whole():
    mask = two_streams(torch.tensor([2]), torch.tensor([[2, 2, 2, 3]]))[0]
    assert mask[:2, :4].tolist() == [[True, True, False, False]] * 2
    assert mask[2:4, :4].tolist() == [[True, True, True, False], [True] * 4]
    assert mask[:4, 4:].sum() == 0 and torch.equal(mask[4:, 4:], torch.eye(4, dtype=torch.bool))
    assert mask[7, :4].tolist() == [True, True, True, False]


def test_a_share_of_queries_is_asked_before_its_turn():
    tokens = torch.zeros(8, 64, dtype=torch.long)
    _, _, known, horizon, _ = AnySubsetObjective(ahead=0.5, masked=(0.9, 0.9)).prepare(
        tokens, np.random.default_rng(0), 0
    )
    early = (horizon < torch.arange(64)) & (torch.arange(64) >= known[:, None])
    assert 0.3 < early.float().mean() < 0.6 and (horizon >= known[:, None]).all()
    _, _, known, horizon, _ = (
        AnySubsetObjective(ahead=0.5).held_out().prepare(tokens, np.random.default_rng(0), 0)
    )
    assert torch.equal(horizon, torch.maximum(torch.arange(64), known[:, None]))


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(masked=(0.5, 0.2)), "masked"),
        (dict(spans=2), "spans"),
        (dict(masked_warmup=5), "masked_start"),
        (dict(maskd=1), "'masked'"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, said):
    with pytest.raises(BadOption, match=said):
        make_objective("any-subset", options)
