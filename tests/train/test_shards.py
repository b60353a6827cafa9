"""Two processes that share a network out train the network that one process trains, for every
objective, and one process goes on from what two have saved."""

import dataclasses
import subprocess
import sys

import pytest
import torch

from forerun.errors import BadOption, NotAble
from forerun.train.loop import train
from forerun.train.recipe import Recipe
from forerun.train.shards import layers_of, recompute
from tests.train.test_train import SHAPE, _environment

STOPPED = 1
PLAIN = Recipe(
    objective="ar",
    model={**SHAPE, "num_hidden_layers": 2},
    context=32,
    batch=4,
    steps=2,
    warmup=1,
    learning_rate=1e-3,
    validate_every=4,
    save_every=1,
    shard=True,
    recompute=True,
)
DISTILLED = {"samples": 8, "teacher": "zoo:ar", "temperatures": [0.0]}
OPTIONS = {
    "ar": {},
    "any-subset": {"mask_token": 1},
    "masked": {"mask_token": 1},
    "block": {"mask_token": 1, "sizes": [4, 8]},
    "distil-drafter": {"mask_token": 1, **DISTILLED},
    "distil-block": {"mask_token": 1, "sizes": [4, 8], **DISTILLED},
    "consistency": {"block": 4, "blocks": 4, "sequences": 8, "window": 2},
}
RECIPES = {
    name: dataclasses.replace(PLAIN, objective=name, options=options)
    for name, options in OPTIONS.items()
}
DDP = dataclasses.replace(RECIPES["consistency"], shard=False)


def close(one, two):
    return all(
        torch.allclose(a, b, atol=1e-4)
        for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True)
    )


def test_two_processes_train_the_same_network_in_shards_and_one_goes_on(
    corpus, tmp_path, monkeypatch
):
    monkeypatch.setattr("forerun.train.loop.held_out_loss", lambda *_: 0.0)  # not looked at here
    torch.save(corpus, tmp_path / "corpus.pt")
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    words += ["--master_port", "29534", "-m", "tests.train.sharding"]
    done = subprocess.run(
        [*words, str(tmp_path / "corpus.pt"), str(tmp_path / "two")],
        capture_output=True,
        text=True,
        env=_environment(),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for name, recipe in RECIPES.items():
        folder = tmp_path / "two" / name
        assert [file.name for file in (folder / "checkpoint").glob("step*")] == [f"step{STOPPED}"]
        assert len([*(folder / "checkpoint" / f"step{STOPPED}").glob("*.distcp")]) == 2, (
            "two shares"
        )
        resumed = train(recipe, corpus, folder)
        # not spread, nothing run twice: what is computed stays the same
        alone = dataclasses.replace(recipe, shard=False, recompute=False)
        assert close(train(alone, corpus, tmp_path / "one" / name), resumed), name
    # the wrapper of DDP has no config of its own
    both = torch.load(tmp_path / "two" / "ddp" / "checkpoint.pt", weights_only=True)["network"]
    one = torch.load(tmp_path / "one" / "consistency" / "checkpoint.pt", weights_only=True)
    assert all(torch.allclose(one["network"][name], both[name], atol=1e-4) for name in both)


@pytest.fixture
def fresh_accelerate():
    """Accelerate lets a process choose its precision once."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()
    yield AcceleratorState._reset_state
    AcceleratorState._reset_state()


def test_activations_in_bfloat16_train_too(corpus, tmp_path, fresh_accelerate):
    full = []
    plain = dataclasses.replace(PLAIN, shard=False)
    train(plain, corpus, tmp_path / "full", report=full.append)
    fresh_accelerate()
    half = []
    recipe = dataclasses.replace(plain, bfloat16=True)
    train(recipe, corpus, tmp_path / "half", report=half.append)
    assert half[-1]["valid_loss"] == pytest.approx(full[-1]["valid_loss"], rel=1e-2)
    assert half[-1]["loss"] != full[-1]["loss"]
    with pytest.raises(BadOption, match="bfloat16"):
        train(recipe, corpus, tmp_path / "full")


def test_what_cannot_be_shared_out_is_refused():
    with pytest.raises(BadOption, match="needs no shard"):
        dataclasses.replace(PLAIN, lora=4)
    with pytest.raises(NotAble, match="no list of layers"):
        layers_of(torch.nn.Linear(2, 2))
    with pytest.raises(NotAble, match="cannot run its layers again"):
        recompute(torch.nn.Linear(2, 2))
