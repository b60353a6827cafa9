"""Trajectories are those of decoding, files lose nothing, and the consistency loss is the sum it
says it is."""

import copy
import dataclasses
import json

import numpy as np
import pytest
import torch

import forerun
from forerun.errors import BadCheckpoint, BadOption, NotAble
from forerun.train import trajectories
from forerun.train.consistency import ConsistencyObjective, TrajectoryBatch, TrajectorySource
from forerun.train.loop import train
from forerun.train.objectives import make_objective
from forerun.train.recipe import Recipe
from forerun.train.samples import continue_texts
from forerun.train.trajectories import (
    Trajectories,
    TrajectoryPlan,
    block_mask,
    collect,
    packed_logits,
    read_folder,
    states,
)
from tests.helpers import network, run
from tests.train.test_train import SHAPE

PROMPTS = torch.randint(8, 250, (3, 6), generator=torch.Generator().manual_seed(2))
PLAN = TrajectoryPlan(blocks=2, block=4, start="repeat")


@pytest.mark.parametrize("seed", [0, 3])
def test_blocks_side_by_side_iterate_as_decoding_iterates_them(seed):
    net = network("llama", torch.float64, seed)
    text = continue_texts(net, PROMPTS, 6 + 12, temperature=0)
    found = states(net, text, TrajectoryPlan(3, 4, "repeat"), 0)
    m = forerun.from_network(net, None, lanes=1, max_context=64)
    for b, number in np.ndindex(3, 3):
        before = text[b, : 6 + 4 * number].tolist()
        result = m.generate(
            before, method="jacobi", block=4, refill=False, max_tokens=5, ignore_eos=True
        )
        assert result.token_ids[:4] == text[b, 6 + 4 * number : 10 + 4 * number].tolist()
        done = []
        seen = []
        for event in result.trace:
            if event.drafted:
                seen.append((done + event.drafted)[:4])
            done = done + event.tokens
        seen = [state for state in seen if len(state) == 4]
        assert seen == found[b, : len(seen), 4 * number : 4 * number + 4].tolist()


def test_the_last_state_is_the_text_and_every_step_settles_a_token():
    net = network("llama", torch.float64)
    text = continue_texts(net, PROMPTS, 6 + 12, temperature=0)
    for start in ("repeat", "text", "random"):
        plan = TrajectoryPlan(3, 4, start)
        found = Trajectories(PROMPTS.numpy(), states(net, text, plan, 1).numpy(), 4)
        assert (found.states_SJL[:, -1] == text[:, 6:].numpy()).all()
        assert (found.noisy() <= np.arange(4, -1, -1)[None, :, None]).all()


def test_only_what_changed_is_stored_and_nothing_is_lost(tmp_path):
    net = network("llama")
    text = continue_texts(net, PROMPTS, 18, temperature=0)
    found = states(net, text, TrajectoryPlan(3, 4, "random"), 0)
    trajectories.write_chunk(tmp_path / "c.npz", text, found, 6)
    again = trajectories.read_chunk(tmp_path / "c.npz", 4)
    assert (again.states_SJL == found.numpy()).all() and (again.prompts_SP == PROMPTS.numpy()).all()


def test_an_interrupted_collection_goes_on_and_several_processes_share_it(tmp_path, monkeypatch):
    monkeypatch.setattr(trajectories, "CHUNK", 1)
    net = network("llama")
    whole = collect(net, PROMPTS, PLAN, tmp_path / "whole")
    assert collect(net, PROMPTS, PLAN, tmp_path / "parts", share=(1, 2)) is None
    with pytest.raises(BadCheckpoint, match=r"lacks chunk0\.npz, chunk2\.npz"):
        read_folder(tmp_path / "parts")
    parts = collect(net, PROMPTS, PLAN, tmp_path / "parts", share=(0, 2))
    assert (parts.states_SJL == whole.states_SJL).all() and len(parts) == 3


def test_files_of_another_model_and_damaged_ones_are_refused(tmp_path):
    collect(network("llama"), PROMPTS, PLAN, tmp_path)
    with pytest.raises(BadCheckpoint, match="differs in model"):
        collect(network("llama", seed=1), PROMPTS, PLAN, tmp_path)
    # as after training adapters: the embeddings are the same
    tuned = copy.deepcopy(network("llama"))
    with torch.no_grad():
        tuned.model.layers[-1].mlp.down_proj.weight += 0.01
    with pytest.raises(BadCheckpoint, match="differs in model"):
        collect(tuned, PROMPTS, PLAN, tmp_path)
    with pytest.raises(BadCheckpoint, match="differs in blocks"):
        collect(network("llama"), PROMPTS, dataclasses.replace(PLAN, blocks=3), tmp_path)
    with pytest.raises(BadCheckpoint, match="differs in prompts"):
        collect(network("llama"), PROMPTS + 1, PLAN, tmp_path)
    with pytest.raises(NotAble, match="gpt_neo"):
        collect(network("gpt_neo"), PROMPTS, PLAN, tmp_path / "neo")
    file = tmp_path / "chunk0.npz"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(BadCheckpoint, match="or a part of one"):
        read_folder(tmp_path)
    with pytest.raises(BadCheckpoint, match="no folder of trajectories"):
        read_folder(tmp_path / "nowhere")


def test_facts_of_a_trajectory_counted_by_hand():
    final = [1, 2, 3, 4, 5]
    one = np.array([[[9, 9, 9, 9, 9], [1, 9, 3, 4, 5], [1, 2, 3, 4, 5]]])
    facts = Trajectories(np.zeros((1, 1), int), one, 5).facts()
    assert one[0, -1].tolist() == final and facts["iterations per block"] == 2
    assert facts["fast-forwarded tokens per iteration"] == 2.5
    assert facts["stationary tokens"] == 1.5  # 3, 4 and 5 in one of two unfinished states
    assert facts["useful n-grams"] == 0.5


@pytest.mark.parametrize("context", ["clean", "noisy", "window"])
def test_a_guess_sees_what_its_mask_says_and_nothing_else(context):
    """By perturbation: change one row, and see whose outputs move."""
    net = network("llama", torch.float64)
    given = 3
    blocks = 4
    block = 2
    window = 2
    mask = block_mask(given, blocks, block, context, window)
    text = torch.randint(
        8, 250, (1, given + blocks * block), generator=torch.Generator().manual_seed(0)
    )
    guess = torch.randint(8, 250, (1, blocks * block), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = packed_logits(net, text, guess, mask)
        for row in range(mask.shape[0]):
            changed = torch.cat([text, guess], 1)
            changed[0, row] = 7
            after = packed_logits(
                net, changed[:, : text.shape[1]], changed[:, text.shape[1] :], mask
            )
            moved = (after - before).abs().amax(-1)[0] > 1e-9
            sees = mask[:, row].clone()
            while True:  # whoever sees a row that sees it, sees it too
                sees_through = sees | (mask & sees[None]).any(1)
                if torch.equal(sees_through, sees):
                    break
                sees = sees_through
            assert torch.equal(moved, sees)
    own = torch.arange(blocks * block) // block
    rows = mask[text.shape[1] :]
    for i, b in enumerate(own.tolist()):
        seen_text = rows[i, : text.shape[1]].sum().item()
        seen_blocks = set(own[rows[i, text.shape[1] :]].tolist())
        first = {"clean": b, "noisy": 0, "window": b // window * window}[context]
        assert seen_text == given + first * block and seen_blocks == set(range(first, b + 1))


@pytest.mark.parametrize(
    "context, schedule", [("clean", "random"), ("noisy", "progressive"), ("window", "reverse")]
)
def test_the_packed_loss_is_the_sum_of_separate_forwards(context, schedule):
    net = network("llama", torch.float64)
    objective = ConsistencyObjective(
        block=3,
        blocks=4,
        window=2,
        context=context,
        schedule=schedule,
        own_weight=0.5,
        real_weight=2.0,
    )
    text = continue_texts(net, PROMPTS, 6 + 12, temperature=0)
    plan = TrajectoryPlan(4, 3, "random")
    found = Trajectories(PROMPTS.numpy(), states(net, text, plan, 5).numpy(), 3)
    real = torch.randint(8, 250, (3, 18), generator=torch.Generator().manual_seed(4)).numpy()
    written = TrajectoryBatch(real, found.prompts_SP, found.states_SJL, found.noisy())
    batch = objective.prepare(written, np.random.default_rng(0), 0)
    _, clean, guess, taught, share = batch
    total = 0.0
    count = 0
    with torch.no_grad():
        for b, block in np.ndindex(3, 4):
            first = {"clean": block, "noisy": 0, "window": block // 2 * 2}[context]
            before = torch.cat([clean[b, : 6 + first * 3], guess[b, first * 3 : block * 3]])
            student = (
                net(torch.cat([before, guess[b, block * 3 : block * 3 + 3]])[None])
                .logits[0, -3:]
                .log_softmax(-1)
            )
            teacher = net(clean[b : b + 1, : 6 + block * 3 + 3]).logits[0, -3:].log_softmax(-1)
            for i in range(3):
                if taught[b, block * 3 + i]:
                    total += float((teacher[i].exp() * (teacher[i] - student[i])).sum())
                    count += 1

        def plain(ids):
            laws = net(ids).logits[:, :-1].log_softmax(-1)
            return -float(laws.gather(-1, ids[:, 1:, None]).mean())

        expected = total / count + 0.5 * plain(clean) + 2.0 * plain(torch.from_numpy(real))
        assert float(objective.loss(net, *batch)) == pytest.approx(expected, abs=1e-4)
        shares = [float(objective.loss(net, *(x[b : b + 1] for x in batch))) for b in range(3)]
    assert np.mean(shares) == pytest.approx(expected, abs=1e-4) and float(
        share.sum()
    ) == pytest.approx(count)


def test_noise_rises_within_a_window_and_the_nearest_state_is_taken():
    states_SJL = np.tile(np.arange(5)[None, :, None], (64, 1, 16))
    states_SJL[:] = 0
    for j in range(5):  # state j has 4 - j wrong tokens at the end of every block
        for k in range(4):
            states_SJL[:, j, k::4] = 0 if k < j else 1
    found = Trajectories(np.zeros((64, 2), int), states_SJL, 4)
    assert found.noisy()[0, :, 0].tolist() == [4, 3, 2, 1, 0]
    objective = ConsistencyObjective(block=4, blocks=4, window=4)
    real = np.zeros((64, 18), int)
    batch = TrajectoryBatch(real, found.prompts_SP, states_SJL, found.noisy())
    _, _, guess, taught, _ = objective.prepare(batch, np.random.default_rng(0), 0)
    wrong = (guess.reshape(64, 4, 4) == 1).sum(-1)
    assert {tuple(row) for row in wrong.tolist()} == {
        (0, 2, 3, 4),
        (2, 3, 4, 0),
        (3, 4, 0, 2),
        (4, 0, 2, 3),
    }
    assert torch.equal(taught, guess == 1)


def test_consistency_training_lowers_its_loss_and_resumes(corpus, tmp_path):
    options = dict(block=4, blocks=3, window=3, sequences=16)
    recipe = Recipe(
        objective="consistency",
        options=options,
        model=SHAPE,
        context=20,
        batch=8,
        steps=6,
        warmup=1,
        validate_every=3,
        save_every=3,
    )
    rows = []
    whole = train(recipe, corpus, tmp_path / "whole", report=rows.append)
    for stop in (2, None):
        parts = train(recipe, corpus, tmp_path / "parts", stop_at=stop)
    for a, b in zip(whole.state_dict().values(), parts.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert (tmp_path / "whole" / "trajectories" / "chunk0.npz").exists() and rows[-1]["step"] == 6
    with pytest.raises(BadOption, match="leaves nothing to be given"):
        train(dataclasses.replace(recipe, context=12), corpus, tmp_path / "short")


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(schedule="up"), "progressive"),
        (dict(context="none"), "clean"),
        (dict(block=0), "block"),
        (dict(start="x"), "repeat"),
        (dict(real_weight=-1), "real_weight"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, said):
    with pytest.raises(BadOption, match=said):
        make_objective("consistency", options)


def test_a_batch_is_a_function_of_its_step(corpus):
    made = Trajectories(np.arange(20).reshape(10, 2), np.zeros((10, 3, 4), int), 2)
    written = TrajectorySource(corpus, made)
    a, b, c = (written.batch(step, 4, 8, seed=1) for step in (5, 5, 6))
    assert all((x == y).all() for x, y in zip(a[:4], b[:4])) and not (a[1] == c[1]).all()


def test_the_command_collects_shows_and_refuses(tmp_path):
    out = str(tmp_path / "t")
    words = [
        "trajectories",
        "collect",
        "--out",
        out,
        "--count",
        "3",
        "--given",
        "4",
        "--blocks",
        "2",
        "--block",
        "4",
    ]
    prompts = tmp_path / "p.txt"
    prompts.write_text("def add(a, b):\nimport os, sys, json\nx\nclass Stack(object): pass\n")
    facts = json.loads(run(*words, "--prompts", str(prompts), "--json").stdout)
    assert facts["sequences"] == 3 and facts["iterations per block"] > 1
    assert "accepted" in run("trajectories", "show", out).stdout
    assert len(json.loads(run("trajectories", "show", out, "--json").stdout)["states"]) == 5
    bad = {
        "repeat": [*words, "--start", "x"],
        "block": [*words, "--block", "0"],
        "index=7": ["trajectories", "show", out, "--index", 7],
    }
    for said, command in bad.items():
        assert said in str(run(*command).exception)
