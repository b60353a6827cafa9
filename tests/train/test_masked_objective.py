"""The masked-diffusion loss, against its definition."""

import numpy as np
import pytest
import torch

from forerun.errors import BadOption
from forerun.train.masked import MaskedObjective
from forerun.train.objectives import make_objective
from tests.helpers import network

MASK = 7


@pytest.mark.parametrize(
    "options",
    [dict(suffix=0.0), dict(suffix=1.0, longest=5), dict(suffix=1.0, whole=1.0, longest=6)],
    ids=str,
)
def test_the_loss_is_the_weighted_sum_over_masked_tokens(options):
    net = network("llama", torch.float64)
    tokens = torch.randint(8, 250, (4, 14), generator=torch.Generator().manual_seed(1))
    objective = MaskedObjective(mask_token=MASK, **options)
    batch = objective.prepare(tokens, np.random.default_rng(3), 0)
    _, masked, weight, end = batch
    total = 0.0
    with torch.no_grad():
        for b in range(4):
            n = int(end[b])
            # what lies behind the region is not there at all
            ids = torch.where(masked[b, :n], MASK, tokens[b, :n])[None]
            logits = net(
                ids, attention_mask=torch.ones(1, 1, n, n, dtype=torch.bool), use_cache=False
            ).logits[0]
            logits[:, MASK] = -torch.inf
            laws = logits.log_softmax(-1)
            total -= sum(
                float(weight[b, i] * laws[i, tokens[b, i]]) for i in range(n) if masked[b, i]
            )
        packed = float(objective.loss(net, *batch))
        shares = [float(objective.loss(net, *(x[b : b + 1] for x in batch))) for b in range(4)]
    assert packed == pytest.approx(total / 4, abs=1e-4) and np.mean(shares) == pytest.approx(
        packed, abs=1e-5
    )


def test_regions_are_masked_at_their_rate_and_weighted_against_it():
    tokens = torch.zeros(400, 64, dtype=torch.long)
    _, masked, weight, end = MaskedObjective(suffix=0.5, longest=16, whole=0.5).prepare(
        tokens, np.random.default_rng(0), 0
    )
    assert 0.4 < (end < 64).float().mean() < 0.6
    # The expected weight of a sequence is one: the bound counts every token of its region once.
    assert float(weight.sum(1).mean()) == pytest.approx(1, abs=0.1)
    assert not (masked & (torch.arange(64) >= end[:, None])).any()
    _, masked, _, end = (
        MaskedObjective(suffix=0.5).held_out().prepare(tokens, np.random.default_rng(0), 0)
    )
    assert (end == 64).all()


@pytest.mark.parametrize(
    "options, said",
    [(dict(suffix=2), "suffix"), (dict(least=0), "least"), (dict(whole=-1), "whole")],
)
def test_options_that_mean_nothing_are_refused(options, said):
    with pytest.raises(BadOption, match=said):
        make_objective("masked", options)
