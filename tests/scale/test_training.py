"""What a training run takes is arithmetic, and the page shows what the command prints."""

import json
import sys

import pytest

from forerun.profile.shapes import Shape
from forerun.scale import training
from forerun.scale.training import DrafterRun, Run
from tests.helpers import ROOT

# layers of 4 x 16 x 16 + 3 x 16 x 32 = 2560 weights; two embeddings of 64 x 16
SHAPE = Shape("llama", 2, 16, 32, 4, 4, 64)
GIBIBYTE = 2**30


def test_memory_and_hours_follow_from_the_shape():
    assert training.weights_of(SHAPE) == 2 * 2560 + 2 * 1024
    run = Run(SHAPE, gpus=4, share=2, rows=8, sequences=16, steps=10)
    memory = training.memory_of(run)
    kept = (8 * 16 + 4 * 32) * 2
    assert memory.state * GIBIBYTE == 16 * 7168 / 4
    assert memory.gathered * GIBIBYTE == 2 * (2 * 2560 + 2048)
    assert memory.activations * GIBIBYTE == 2 * 16 * 16 * 2 + 16 * kept
    assert memory.logits * GIBIBYTE == 16 * 64 * 16
    assert training.memory_of_step(run).state * GIBIBYTE == 4 * 7168
    # 16 sequences are two forwards on each of four; weights come twice, gradients go once
    assert training.network_gigabytes(run) == pytest.approx(2 * 7168 * 0.75 * 8 / 1e9)
    assert training.hours_of(run, 3.0, efficiency=0.5) == pytest.approx(10 * 2 * 3 / 0.5 / 3600)


def test_a_drafter_keeps_all_its_layers_and_some_logits(monkeypatch):
    monkeypatch.setattr("forerun.train.head_loss.LOGITS", 2048)
    run = DrafterRun(SHAPE, 1, 2, texts=3, longest=10, anchors=4, block=5, markov_rank=2, written=7)
    assert run.weights == 2560 + 2 * 16 * 16 + 2 * 2 * 64
    memory = training.memory_of_drafter(run)
    rows = 3 * (10 + 4 * 5)
    assert memory.state * GIBIBYTE == 16 * run.weights
    assert memory.activations * GIBIBYTE == rows * (8 * 16 + 4 * 32) * 2 + 3 * 10 * 2 * 16 * 2
    assert memory.logits * GIBIBYTE == 2048 * 16
    assert memory.frozen * GIBIBYTE == 2 * 7168
    slots = 7 * 10 * (2 * 2 * 4 * 4 * 2)
    assert training.memory_of_own_text(run) * GIBIBYTE == 2 * 7168 + slots


def test_the_page_shows_what_the_commands_print(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    for name in ("recipes", "plan"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import plan
    import recipes

    page = (ROOT / "docs" / "scale.md").read_text()
    measured = json.loads((ROOT / "docs" / "train-step.json").read_text())
    assert recipes.table(measured) in page
    assert plan.costs(str(ROOT / "src/forerun/scale/measured/qwen2.5-7b.json")) in page
