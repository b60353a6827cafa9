"""A draft model seen through the target's vocabulary."""

import numpy as np
import pytest
import torch

from forerun.backbones.translated import TranslatedBackbone
from forerun.engine.pack import Batch
from forerun.sequence.rows import TOKEN, Plan, causal_rows


class Spoken:
    """A backbone of five tokens that notes what it hears and answers with its token numbers."""

    context = cost = layers = heads = key_heads = head_dim = 1
    device = torch.device("cpu")
    dtype = torch.float64
    capturable = has_fixed_kernels = deterministic = False

    def forward(self, batch, slots):
        self.heard = batch.tokens_T.tolist()
        self.planned = [s.plan.rows[TOKEN].tolist() for s in batch.segments]
        return torch.arange(5.0, dtype=torch.float64).expand(len(batch.reads_R), 5)


# Ours 0 is their 3; ours 1 they lack; ours 2 is their 1; ours 3 they lack; the number 4 is a mask.
THEIRS = torch.tensor([3, -1, 1, -1])


@pytest.fixture
def heard_and_said():
    backbone = Spoken()
    rows = causal_rows(np.array([0, 2, 1, 4], np.int32))
    plan = Plan(rows, [np.array([3])], 4)
    batch = Batch([(0, plan, 1)], 8, backbone.device)
    logits = TranslatedBackbone(backbone, THEIRS, mask=4).forward(batch, None)
    return backbone, batch, logits


def test_a_token_that_the_draft_lacks_is_never_drafted(heard_and_said):
    _, _, logits = heard_and_said
    assert logits.tolist() == [[3.0, -torch.inf, 1.0, -torch.inf]]


def test_the_draft_hears_its_own_tokens_and_its_own_mask(heard_and_said):
    backbone, batch, _ = heard_and_said
    assert backbone.heard == [1, 0, 4]  # of what runs; a token that it lacks reads as 0
    assert backbone.planned == [[3, 1, 0, 4]]  # and of what need not run
    assert batch.tokens_T.tolist() == [2, 1, 4], "the target's batch stays as it was"
