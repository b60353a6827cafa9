"""`custom_generate=forerun.custom_generate` beside plain `generate`, on the same network."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    MaxTimeCriteria,
    StoppingCriteria,
    TextIteratorStreamer,
)
from transformers.generation.streamers import BaseStreamer

import forerun
from forerun.checkpoints import tiny
from forerun.errors import BadOption, NotAble

PROMPT = torch.tensor([[10, 20, 30, 10, 20]])
METHODS = ["ar", "lookup", "jacobi", "lookahead", "multiblock"]


@pytest.fixture(scope="module")
def network():
    return tiny.build("llama")


def plain(network, ids=PROMPT, **settings):
    return network.generate(ids, pad_token_id=0, **settings)


def ours(network, ids=PROMPT, **settings):
    return plain(network, ids, custom_generate=forerun.custom_generate, **settings)


@pytest.mark.parametrize("method", METHODS)
def test_greedy_output_is_generate_s(network, method):
    wanted = plain(network, do_sample=False, max_new_tokens=24)
    found = ours(network, do_sample=False, max_new_tokens=24, method=method)
    assert found.tolist() == wanted.tolist() and found.dtype == wanted.dtype
    assert plain(network, do_sample=False, max_new_tokens=24).tolist() == wanted.tolist()


def test_a_batch_with_padding_ends_row_by_row(network):
    ids = torch.tensor([[0, 0, 10, 20, 30], [7, 8, 9, 10, 11]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    row = plain(network, ids[1:], do_sample=False, max_new_tokens=12)[0].tolist()
    settings = dict(attention_mask=mask, do_sample=False, max_new_tokens=12, eos_token_id=row[8])
    wanted = plain(network, ids, **settings)
    found = ours(network, ids, method="lookup", **settings)
    assert found.tolist() == wanted.tolist() and found[1, -1] == 0, "its end token came early"


def test_options_and_drafts_reach_the_method(network):
    with pytest.raises(BadOption, match="'kk'"):
        ours(network, max_new_tokens=4, method="lookup", method_options={"kk": 3})
    draft = forerun.load("tiny:llama:1")
    wanted = plain(network, do_sample=False, max_new_tokens=8)
    found = ours(network, do_sample=False, max_new_tokens=8, method="speculative", draft=draft)
    assert found.tolist() == wanted.tolist()
    bound = partial(forerun.custom_generate, method="jacobi", method_options={"block": 4})
    assert plain(network, custom_generate=bound, do_sample=False, max_new_tokens=8).tolist() == (
        wanted.tolist()
    )


def test_penalties_and_least_lengths_are_generate_s(network):
    settings = dict(do_sample=False, max_new_tokens=16, repetition_penalty=1.4)
    first = plain(network, **settings)[0, 5].item()
    settings |= dict(min_new_tokens=6, eos_token_id=first, suppress_tokens=[3, 4])
    assert (
        ours(network, method="lookup", **settings).tolist() == plain(network, **settings).tolist()
    )


def test_samples_have_generate_s_law(network):
    """Each of the few tokens that are left by top_k is drawn as often as it should be."""
    settings = dict(do_sample=True, temperature=0.7, top_k=4, max_new_tokens=1)
    logits = network(PROMPT).logits[0, -1] / 0.7
    best = logits.topk(4)
    law = best.values.softmax(-1).tolist()
    many = PROMPT.repeat(400, 1)
    torch.manual_seed(0)
    drawn = ours(network, many, **settings)[:, -1].tolist()
    counts = [drawn.count(token) for token in best.indices.tolist()]
    assert sum(counts) == 400
    assert np.allclose(np.array(counts) / 400, law, atol=0.09)
    torch.manual_seed(0)
    assert ours(network, many, **settings)[:, -1].tolist() == drawn
    assert ours(network, many, seed=5, **settings)[:, -1].tolist() != drawn


class After(StoppingCriteria):
    """Ends a row that holds so many tokens in all; notes every length it was asked about."""

    def __init__(self, length):
        self.length = length
        self.asked = []

    def __call__(self, input_ids, scores, **_):
        self.asked.append(input_ids.shape[1])
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


@pytest.mark.parametrize("method", ["ar", "lookup", "multiblock"])
def test_criteria_are_asked_after_every_token(network, method):
    theirs, mine = After(12), After(12)
    wanted = plain(network, do_sample=False, max_new_tokens=20, stopping_criteria=[theirs])
    settings = dict(do_sample=False, max_new_tokens=20, method=method)
    found = ours(network, stopping_criteria=[mine], **settings)
    assert found.tolist() == wanted.tolist() and mine.asked == theirs.asked
    assert len(ours(network, stopping_criteria=[MaxTimeCriteria(0.0)], **settings)[0]) == 6


class Notes(BaseStreamer):
    def __init__(self):
        self.tokens = []
        self.ended = 0

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("method", ["ar", "lookup"])
def test_a_streamer_gets_every_token(network, method):
    theirs, mine = Notes(), Notes()
    plain(network, do_sample=False, max_new_tokens=10, streamer=theirs)
    found = ours(network, do_sample=False, max_new_tokens=10, streamer=mine, method=method)
    assert mine.tokens == theirs.tokens == found[0].tolist() and mine.ended == 1
    text = TextIteratorStreamer(tiny.tokenizer(), skip_prompt=True)
    ours(network, do_sample=False, max_new_tokens=10, streamer=text, stopping_criteria=[After(9)])
    assert "".join(text) == tiny.tokenizer().decode(found[0, 5:9])


def test_weights_that_change_are_noticed():
    network = tiny.build("llama", 3)
    before = ours(network, do_sample=False, max_new_tokens=12)
    with torch.no_grad():
        network.lm_head.weight.add_(torch.randn_like(network.lm_head.weight))
    after = ours(network, do_sample=False, max_new_tokens=12)
    assert after.tolist() == plain(network, do_sample=False, max_new_tokens=12).tolist()
    assert after.tolist() != before.tolist()


def test_a_network_is_saved_and_copied_without_what_we_keep(network, tmp_path):
    wanted = ours(network, do_sample=False, max_new_tokens=2)
    twin = copy.deepcopy(network)
    assert ours(twin, do_sample=False, max_new_tokens=2).tolist() == wanted.tolist()
    torch.save(network, tmp_path / "whole.pt")
    network.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {*again.state_dict()} == {*network.state_dict()}


class Custom(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


def test_what_cannot_be_honoured_is_refused_by_name(network):
    with pytest.raises(NotAble, match="Custom"):
        ours(network, max_new_tokens=4, logits_processor=[Custom()])
    with pytest.raises(NotAble, match="num_beams=2"):
        ours(network, max_new_tokens=4, num_beams=2)
    with pytest.raises(NotAble, match="output_scores"):
        ours(network, max_new_tokens=4, return_dict_in_generate=True, output_scores=True)
    with pytest.raises(BadOption, match="arr"):
        ours(network, max_new_tokens=4, method="arr")
    found = ours(network, do_sample=False, max_new_tokens=4, return_dict_in_generate=True)
    assert found.sequences.shape == (1, 9)
