"""Chats of any length: what stands before a prompt is nothing, and what stands behind an end token
teaches nothing."""

import json

import numpy as np
import pytest
import torch

from forerun.errors import BadOption
from forerun.train import trajectories
from forerun.train.consistency import ConsistencyObjective, TrajectoryBatch, TrajectorySource
from forerun.train.data import Corpus
from forerun.train.instruct import as_rows, chat_ids
from forerun.train.samples import continue_texts
from forerun.train.trajectories import StoredTrajectories, TrajectoryPlan, collect, read_folder
from tests.helpers import network, run

LENGTHS = (3, 7, 5, 1, 6)
RNG = np.random.default_rng(0)
CHATS = [RNG.integers(8, 250, length).tolist() for length in LENGTHS]


def padded():
    tokens_SP, pads_S = as_rows(CHATS)
    assert pads_S.tolist() == [4, 0, 2, 6, 1]
    return torch.from_numpy(tokens_SP), torch.from_numpy(pads_S)


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    """Trajectories of chats, with an end token that some texts come to."""
    net = network("llama", torch.float64)
    prompts, pads = padded()
    free = continue_texts(net, prompts, 7 + 8, 0, pads)
    end = int(free[0, 7 + 2])  # the third token that the first text goes on with
    plan = TrajectoryPlan(2, 4, "text", (end,))
    folder = tmp_path_factory.mktemp("chats")
    return net, plan, collect(net, prompts, plan, folder, pads_S=pads), folder


def test_a_short_prompt_goes_on_as_if_it_were_alone(collected):
    net, plan, found, _ = collected
    [end] = plan.end_tokens
    assert found.spans.ends_S.min() <= 3
    for row, chat in enumerate(CHATS):
        alone = continue_texts(net, torch.tensor([chat]), len(chat) + 8, 0)[0, len(chat) :]
        stop = int(found.spans.ends_S[row])
        text = found.states_SJL[row, -1]
        assert text[:stop].tolist() == alone[:stop].tolist()
        assert end not in text[: stop - 1] and (text[stop:] == end).all()
        assert stop == 8 or text[stop - 1] == end
        # behind the end every state is right
        assert (found.states_SJL[row, :, stop:] == end).all()


def test_iterates_of_a_padded_text_are_those_of_the_text_alone(collected):
    net, plan, found, _ = collected
    for row in np.flatnonzero(found.spans.ends_S == 8):
        text = torch.tensor([[*CHATS[row], *found.states_SJL[row, -1].tolist()]])
        alone = trajectories.states(net, text, TrajectoryPlan(2, 4, "repeat"), 0)
        tokens, pads = padded()
        whole = torch.cat([tokens, torch.from_numpy(found.states_SJL[:, -1].astype(int))], 1)
        both = trajectories.states(
            net, whole, TrajectoryPlan(2, 4, "repeat", plan.end_tokens), 0, pads
        )
        assert torch.equal(both[row], alone[0])


def test_the_loss_of_padded_texts_is_that_of_each_alone(collected):
    net, _, found, _ = collected
    objective = ConsistencyObjective(block=4, blocks=2, schedule="random", real_weight=0.0)
    real = np.zeros((5, 15), int)
    batch = TrajectoryBatch(real, found.prompts_SP, found.states_SJL, found.noisy(), found.spans)
    whole = objective.prepare(batch, np.random.default_rng(1), 0)
    together = objective.loss(net, *whole)
    _, text, guess, taught, share, pads, own, own_share = whole
    assert not taught[torch.arange(8) >= torch.from_numpy(found.spans.ends_S)[:, None]].any()
    assert own.sum() == found.spans.ends_S.sum()
    consistency = 0.0
    likely = 0.0
    for row, pad in enumerate(pads.tolist()):
        parts = [text[row : row + 1, pad:], guess[row : row + 1]]
        given = parts[0].shape[1] - 8
        mask = trajectories.block_mask(given, 2, 4, "clean")
        with torch.no_grad():
            laws = trajectories.packed_logits(net, *parts, mask)[0].log_softmax(-1)
        student = laws[given + 8 :][taught[row]]
        teacher = laws[given : given + 8][taught[row]]
        consistency += float((teacher.exp() * (teacher - student)).sum())
        for place in torch.nonzero(own[row]).flatten().tolist():
            likely -= float(laws[place - pad - 1, text[row, place]])
    expected = consistency / float(share.sum()) + likely / float(own_share.sum())
    assert float(together.detach()) == pytest.approx(expected, rel=1e-5)


def test_stored_trajectories_are_the_same_in_little_memory(collected, monkeypatch, tmp_path):
    net, plan, _, _ = collected
    corpus = Corpus(np.arange(100), np.arange(100))
    monkeypatch.setattr(trajectories, "CHUNK", 2)
    prompts, pads = padded()
    collect(net, prompts, plan, tmp_path, pads_S=pads)
    stored = StoredTrajectories(tmp_path, most=1)  # one chunk at a time
    assert len(stored) == 5
    in_memory = TrajectorySource(corpus, read_folder(tmp_path))
    for step in range(3):
        a = TrajectorySource(corpus, stored).batch(step, 6, 8, 0)
        b = in_memory.batch(step, 6, 8, 0)
        for x, y in zip([*a[:4], *a.spans], [*b[:4], *b.spans], strict=True):
            assert (x == y).all()
        assert len(stored._kept) == 1
    objective = ConsistencyObjective(block=4, blocks=2, collected=str(tmp_path))
    source = objective.gather(corpus, net, 16, 0, tmp_path / "unused")
    assert len(source.trajectories) == 5
    with pytest.raises(BadOption, match="has 2 blocks of 4"):
        ConsistencyObjective(block=4, blocks=3, collected=str(tmp_path)).gather(
            corpus, net, 16, 0, tmp_path
        )


def test_the_command_takes_chats_and_refuses_a_model_without_a_template(tmp_path):
    chats = tmp_path / "c.jsonl"
    chats.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n")
    words = ["trajectories", "collect", "--out", tmp_path / "t", "--prompts", chats, "--chat"]
    assert "no chat template" in str(run(*words, "--model", "zoo:ar").exception)
    assert not (tmp_path / "t").exists()

    class Told:
        chat_template = "x"

        def apply_chat_template(self, messages, tokenize, add_generation_prompt):
            assert add_generation_prompt and not tokenize
            return "".join(message["content"] for message in messages) + "!"

        def __call__(self, text, add_special_tokens):
            return type("Encoded", (), {"input_ids": [ord(letter) for letter in text]})

    assert chat_ids(Told(), [{"role": "user", "content": "hi"}]) == [*map(ord, "hi!")]
