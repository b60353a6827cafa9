"""Every sampling parameter against `transformers`' own processors, and its meaning at the edges."""

import math

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from forerun.errors import BadOption
from forerun.options import Sampling
from forerun.probability.logits import ChainRows, TokenHistory, laws_from_logits

VOCAB = 50


def ours(logits, chain=(), prompt=(1, 2, 2), output=(), stops=(), rows=None, **options):
    history = TokenHistory(Sampling(**options), np.array(prompt), VOCAB, frozenset(stops))
    for token in output:
        history.add(token)
    return laws_from_logits(
        logits,
        [
            ChainRows(
                history, list(chain), range(len(chain) + 1 - (rows or len(logits)), len(chain) + 1)
            )
        ],
    )


@pytest.fixture
def logits():
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize(
    "options, theirs",
    [
        ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
        ({"temperature": 1.0, "top_k": 5}, [TopKLogitsWarper(5)]),
        ({"temperature": 1.0, "top_k": 500}, []),
        ({"temperature": 1.3, "top_p": 0.8}, [TemperatureLogitsWarper(1.3), TopPLogitsWarper(0.8)]),
        ({"temperature": 1.0, "top_p": 1e-6}, [TopPLogitsWarper(1e-6)]),
        ({"temperature": 1.0, "min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        (
            {"temperature": 1.0, "top_k": 8, "top_p": 0.9, "min_p": 0.05},
            [TopKLogitsWarper(8), TopPLogitsWarper(0.9), MinPLogitsWarper(0.05)],
        ),
        ({"temperature": 1.0, "repetition_penalty": 1.7}, [RepetitionPenaltyLogitsProcessor(1.7)]),
    ],
)
def test_a_parameter_means_what_transformers_means_by_it(logits, options, theirs):
    expected = logits.clone()
    for step in theirs:
        expected = step(torch.tensor([[1, 2, 2]]), expected)
    assert torch.allclose(ours(logits, **options), expected.softmax(-1), atol=1e-6)


def test_temperature_zero_is_certain_of_the_arg_max(logits):
    assert ours(logits)[0, logits.argmax()] == 1 and ours(logits).sum() == 1


def test_top_p_keeps_the_token_that_crosses():
    law = ours(
        torch.tensor([[0.5, 0.3, 0.2] + [0.0] * (VOCAB - 3)]).log(), temperature=1.0, top_p=0.6
    )
    assert torch.allclose(law[0, :3], torch.tensor([0.625, 0.375, 0.0]))


def test_top_p_stops_where_its_mass_is_reached_exactly():
    law = ours(
        torch.tensor([[0.5, 0.25, 0.25] + [0.0] * (VOCAB - 3)]).log(), temperature=1.0, top_p=0.5
    )
    assert law[0, :3].tolist() == [1.0, 0.0, 0.0]


def test_min_p_of_one_keeps_the_likeliest(logits):
    assert ours(logits, temperature=1.0, min_p=1.0)[0, logits.argmax()] == 1


def test_a_row_that_keeps_all_is_untouched_by_a_neighbours_top_p():
    tail = torch.linspace(0, -60, VOCAB)[None]  # probabilities down to 1e-26
    histories = [
        TokenHistory(Sampling(temperature=1.0, top_p=p), np.array([1]), VOCAB, frozenset())
        for p in (1.0, 0.3)
    ]
    both = laws_from_logits(tail.expand(2, VOCAB), [ChainRows(h, [], [0]) for h in histories])
    assert (
        torch.equal(both[0], laws_from_logits(tail, [ChainRows(histories[0], [], [0])])[0])
        and (both[0] > 0).all()
    )


def test_repetition_penalty_counts_a_token_that_occurred_once_in_the_output(logits):
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[1, 2, 2, 9]]), logits.clone())
    assert torch.allclose(
        ours(logits, output=[9], temperature=1.0, repetition_penalty=1.7),
        expected.softmax(-1),
        atol=1e-6,
    )


def test_float64_penalties_are_float64(logits):
    law = ours(logits.double(), output=[4], temperature=1.0, presence_penalty=0.1)
    expected = logits.double().clone()
    expected[0, 4] -= 0.1
    assert torch.allclose(law, expected.softmax(-1), atol=1e-15)


def test_presence_and_frequency_count_the_output_only(logits):
    law = ours(
        logits, output=[4, 4, 7], temperature=1.0, presence_penalty=0.5, frequency_penalty=0.25
    )
    expected = logits.clone()
    expected[0, 4] -= 0.5 + 2 * 0.25
    expected[0, 7] -= 0.5 + 0.25
    assert torch.allclose(law, expected.softmax(-1), atol=1e-6)


def test_penalties_hold_inside_a_drafted_chain(logits):
    chain, options = (
        [4, 9, 4],
        dict(temperature=1.0, repetition_penalty=1.5, presence_penalty=0.3, frequency_penalty=0.2),
    )
    together = ours(logits.expand(4, VOCAB), chain=chain, output=[3], **options)
    for i in range(4):
        alone = ours(logits, output=[3, *chain[:i]], **options)
        assert torch.allclose(together[i], alone[0], atol=1e-6)


def test_only_the_rows_that_are_read_are_edited(logits):
    chain, options = [4, 9], dict(temperature=1.0, frequency_penalty=1.0)
    assert torch.equal(
        ours(logits, chain=chain, rows=1, **options),
        ours(logits.expand(3, VOCAB), chain=chain, **options)[-1:],
    )


def test_min_tokens_forbids_the_end_inside_a_chain(logits):
    law = ours(
        logits.expand(4, VOCAB),
        chain=[4, 5, 6],
        output=[3],
        stops=[9],
        temperature=1.0,
        min_tokens=3,
    )
    assert (law[:, 9] > 0).tolist() == [False, False, True, True]
    assert torch.allclose(law.sum(-1), torch.ones(4))


def test_allowed_tokens_are_the_only_ones(logits):
    law = ours(logits, temperature=1.0, allowed_tokens=[3, 8])
    assert set(torch.nonzero(law[0]).flatten().tolist()) == {3, 8}
    assert ours(logits, allowed_tokens=[3])[0, 3] == 1


def test_logit_bias_is_added(logits):
    biased = logits.clone()
    biased[0, 3] += 2.5
    assert torch.allclose(
        ours(logits, temperature=1.0, logit_bias={3: 2.5}), biased.softmax(-1), atol=1e-6
    )


def test_penalties_are_taken_of_what_the_bias_has_added(logits):
    for token, bias in ((1, 9.0), (2, -9.0)):
        biased = logits.clone()
        biased[0, token] += bias
        expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[1, 2, 2]]), biased)
        law = ours(logits, temperature=1.0, repetition_penalty=1.7, logit_bias={token: bias})
        assert torch.allclose(law, expected.softmax(-1), atol=1e-6)


def test_min_p_is_a_share_of_what_top_p_has_left():
    """Had min-p cut first, the likeliest would have 0.625 of the rest, and top-p keep it alone."""
    law = torch.tensor([[0.5, 0.3, 0.2] + [0.0] * (VOCAB - 3)])
    found = ours(law.log(), temperature=1.0, top_p=0.6, min_p=0.5)
    assert torch.allclose(found[0, :3], torch.tensor([0.625, 0.375, 0.0]))


def test_rows_of_one_batch_keep_their_own_parameters(logits):
    options = [
        {"temperature": 0.0},
        {"temperature": 0.5, "top_k": 3},
        {"temperature": 2.0, "top_p": 0.5, "frequency_penalty": 1.0},
    ]
    histories = [TokenHistory(Sampling(**o), np.array([1]), VOCAB, frozenset()) for o in options]
    together = laws_from_logits(logits.expand(3, VOCAB), [ChainRows(h, [], [0]) for h in histories])
    for row, history in zip(together, histories):
        assert torch.equal(row, laws_from_logits(logits, [ChainRows(history, [], [0])])[0])


def test_logits_are_left_as_they_were(logits):
    before = logits.clone()
    ours(logits, temperature=1.0, top_p=0.5, logit_bias={1: 1.0}, output=[4], presence_penalty=1.0)
    assert torch.equal(logits, before)


def test_half_precision_logits_give_float32_laws(logits):
    assert ours(logits.bfloat16(), temperature=1.0).dtype == torch.float32
    assert ours(logits.double(), temperature=1.0).dtype == torch.float64


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": math.nan},
        {"temperature": -1},
        {"temperature": "hot"},
        {"max_tokens": 0},
        {"max_tokens": -3},
        {"max_tokens": 2.5},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"n": 0},
        {"logprobs": -1},
        {"allowed_tokens": []},
        {"min_tokens": 5, "max_tokens": 3},
        {"logit_bias": {3: math.inf}},
        {"seed": 1.5},
    ],
)
def test_a_value_that_means_nothing_is_refused_by_name(options):
    with pytest.raises(BadOption, match=next(iter(options))):
        Sampling(**options)
