"""Distilling a drafter: the loss is what it says, and the teacher's text is written once."""

import dataclasses

import numpy as np
import pytest
import torch

from forerun import zoo
from forerun.errors import BadCheckpoint, BadOption
from forerun.train import distil, samples
from forerun.train.data import Corpus, MixedCorpus
from forerun.train.distil import DistilDrafterObjective
from forerun.train.loop import train
from forerun.train.objectives import make_objective
from forerun.train.recipe import Recipe
from tests.helpers import network
from tests.train.test_train import SHAPE

MASK = 7


def test_drafts_are_drawn_to_the_teachers_law_and_the_rest_to_the_text(monkeypatch):
    student = network("llama", torch.float64)
    target = network("llama", torch.float64, 1)
    monkeypatch.setattr(distil, "load_teacher", lambda name: target)
    objective = DistilDrafterObjective(
        mask_token=MASK,
        drafts=0.5,
        draft_longest=4,
        discount=0.5,
        suffix=1.0,
        longest=5,
        sampled=0.0,
    )
    tokens = torch.randint(8, 250, (6, 14), generator=torch.Generator().manual_seed(1))
    batch = objective.prepare(tokens, np.random.default_rng(2), 0)
    _, masked, weight, end, draft = batch
    assert 0 < draft.sum() < 6
    total = 0.0
    with torch.no_grad():
        for b in range(6):
            n = int(end[b])
            ids = torch.where(masked[b, :n], MASK, tokens[b, :n])[None]
            logits = student(
                ids, attention_mask=torch.ones(1, 1, n, n, dtype=torch.bool), use_cache=False
            ).logits[0]
            logits[:, MASK] = -torch.inf
            q = logits.log_softmax(-1)
            theirs = target(tokens[b : b + 1]).logits[0]
            theirs[:, MASK] = -torch.inf
            p = theirs.softmax(-1)
            for i in masked[b].nonzero()[:, 0].tolist():
                nats = -(p[i - 1] * q[i].clamp(min=-1e6)).sum() if draft[b] else -q[i, tokens[b, i]]
                total += float(weight[b, i] * nats)
        found = float(objective.loss(student, *batch))
        shares = [float(objective.loss(student, *(x[b : b + 1] for x in batch))) for b in range(6)]
    assert found == pytest.approx(total / 6, abs=1e-4) and np.mean(shares) == pytest.approx(
        found, abs=1e-5
    )


def test_a_draft_is_a_prefix_and_masks_and_weighs_less_and_less():
    objective = DistilDrafterObjective(drafts=1.0, draft_longest=4, discount=0.5, sampled=0.0)
    _, masked, weight, end, draft = objective.prepare(
        torch.zeros(50, 20, dtype=torch.long), np.random.default_rng(0), 0
    )
    assert draft.all()
    for b in range(50):
        where = masked[b].nonzero()[:, 0]
        assert len(where) == 4 and where[0] > 0 and where[-1] == end[b] - 1
        assert weight[b, where].tolist() == pytest.approx([8 / 15, 4 / 15, 2 / 15, 1 / 15])


def test_the_teachers_text_is_written_once_chunk_by_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "CHUNK", 4)
    temperatures = []
    continue_texts = samples.continue_texts

    def counted(network, prompts, length, temperature):
        temperatures.append(temperature)
        return continue_texts(network, prompts, length, temperature)

    monkeypatch.setattr(samples, "continue_texts", counted)
    tokens = np.arange(8, 208) % 250
    source = Corpus(tokens, tokens)
    plan = samples.SamplePlan(10, 16, (0.0, 1.0), seed=3)
    written = samples.write_samples(network("llama"), source, plan, tmp_path)
    assert written.shape == (10, 16) and temperatures == [0.0, 1.0] * 3
    (tmp_path / "samples.npz").unlink()
    (tmp_path / "chunk1.npy").unlink()
    again = samples.write_samples(network("llama"), source, plan, tmp_path)
    assert len(temperatures) == 8 and np.array_equal(again, written)
    with pytest.raises(BadCheckpoint, match="differs in length"):
        shorter = dataclasses.replace(plan, length=12)
        samples.write_samples(network("llama"), source, shorter, tmp_path)


def test_a_share_of_every_batch_is_written_text():
    tokens = np.arange(1000)
    mixed = MixedCorpus(Corpus(tokens, tokens), np.full((5, 8), 7777), 0.5)
    batch = mixed.batch(3, 200, 8, seed=0)
    written = (batch == 7777).all(1)
    assert 60 < written.sum() < 140 and torch.equal(batch, mixed.batch(3, 200, 8, seed=0))
    assert not torch.equal(batch, mixed.batch(4, 200, 8, seed=0))


def test_training_runs_and_resumes(corpus, tmp_path, monkeypatch):
    student = dict(SHAPE)
    monkeypatch.setattr(
        distil, "load_teacher", lambda name: zoo.load("drafter", torch.float32, "cpu")[0]
    )
    recipe = Recipe(
        objective="distil-drafter",
        options=dict(samples=8, draft_longest=4),
        model=student,
        context=24,
        batch=4,
        steps=4,
        validate_every=2,
        save_every=2,
    )
    whole = train(recipe, corpus, tmp_path / "whole")
    for stop in (2, None):
        parts = train(recipe, corpus, tmp_path / "parts", stop_at=stop)
    for a, b in zip(whole.state_dict().values(), parts.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert whole.config.forerun["family"] == "masked"
    assert dataclasses.asdict(make_objective("distil-drafter", {}).held_out())["suffix"] == 0.0


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(drafts=2), "drafts"),
        (dict(samples=0), "samples"),
        (dict(discount=-1), "discount"),
        (dict(draft_longest=0), "draft_longest"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, said):
    with pytest.raises(BadOption, match=said):
        make_objective("distil-drafter", options)
