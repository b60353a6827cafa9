"""Penalties look back on what a question supposes, too: tokens placed on a canvas, and the chain
that a tail leaves."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from forerun.families.block import Block, BlockSpan
from forerun.families.causal import Tail
from forerun.families.masked import CacheScope
from forerun.options import Sampling
from forerun.probability.logits import TokenHistory
from forerun.sequence.canvas import BLANK
from tests.helpers import model

PENALISED = Sampling(
    temperature=1.0, repetition_penalty=1.5, presence_penalty=0.7, frequency_penalty=0.4
)


def answers(m, tokens, *questions):
    """What a model answers to questions about one sequence, which each may change."""
    seq = m.canvas(tokens, PENALISED)
    found = []

    async def run():
        for question in questions:
            found.append(await question(m.handle(), seq))

    m.run_to_end(seq, run)
    return found


def filled(position, token, question):
    """The question, after a blank was filled."""

    def ask(target, seq):
        seq.fill([position], [token], "said")
        return question(target, seq)

    return ask


MASKED = CacheScope()
BLOCK = BlockSpan(start=0, end=4, size=4, causal="nothing")


@pytest.mark.parametrize(
    "kind, ask",
    [
        ("masked", lambda at, placed: lambda t, s: t.canvases(s, at, placed, MASKED)),
        ("block", lambda at, placed: lambda t, s: t.blocks(s, at, placed, BLOCK)),
    ],
    ids=["masked", "block"],
)
def test_a_token_placed_on_a_canvas_is_penalised_like_a_decided_one(kind, ask):
    m = model(kind, torch.float64)
    tokens = [5, BLANK, BLANK, BLANK]
    placed = ask([[1, 2, 3], [1, 3]], [(), [(2, 11)]])
    decided = filled(2, 11, ask([[1, 3]], [()]))
    (_, supposed), (told,) = answers(m, tokens, placed, decided)
    assert torch.allclose(supposed.model_law, told.model_law, atol=1e-12)
    assert torch.allclose(supposed.law, told.law, atol=1e-12)


@pytest.mark.parametrize("depart", [0, 1, 2])
def test_a_tail_remembers_the_chain_that_it_leaves(depart):
    chain, tail = [7, 7, 9], [8, 7]
    m = model("llama", torch.float64)
    (_, branch), (alone,) = answers(
        m,
        [5, 6, *[BLANK] * 6],
        lambda t, s: t.branches(s, chain, [Tail(depart, tail)]),
        lambda t, s: t.conditionals(s, [*chain[:depart], *tail]),
    )
    assert torch.allclose(branch, alone[depart + 1 :], atol=1e-9)


def test_a_prompt_token_that_is_no_outcome_is_not_counted():
    history = TokenHistory(Sampling(presence_penalty=1.0), np.array([3, 5, 9]), 5, frozenset())
    assert history.in_prompt_V.tolist() == [0, 0, 0, 1, 0]


def test_a_block_model_is_not_shifted_unless_it_says_so():
    config = SimpleNamespace(forerun={"family": "block", "mask_token": 9, "block": 4})
    assert not Block.of(config).shifted
    config.forerun["shifted"] = True
    assert Block.of(config).shifted


def test_what_methods_share_belongs_to_the_model():
    m = model()
    m.handle().shared_state["a note"] = 1
    assert m.host.shared_state.pop("a note") == 1
