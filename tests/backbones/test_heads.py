"""Heads that one launch makes are those of three. Without a GPU kernels run under Triton's
interpreter."""

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from forerun.backbones import lean
from forerun.backbones.kernels import heads, launch, matmul
from forerun.checkpoints import tiny
from forerun.engine.pack import Batch, make_tiles
from forerun.sequence.rows import Plan, causal_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter cuts off
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
SMALL = dict(
    num_hidden_layers=2,
    hidden_size=64,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=192,
)


def backbone_of(arch="qwen2", **changes):
    network = tiny.build(arch, dtype=HALF, **{**SMALL, **changes}).to(DEVICE)
    backbone = lean.LeanBackbone(network, tiny.VOCAB, 256, as_tensors=True)
    names = ("qkv", "out", "gate_up", "down")
    backbone.stack = [  # as matrices lie on a GPU
        replace(layer, **{name: getattr(layer, name).t().contiguous().t() for name in names})
        for layer in backbone.stack
    ]
    return backbone


def forwards(backbone, steps):
    """Logits, and what is left in slots, after some steps, each a list of (lane, tokens held,
    tokens)."""
    slots = backbone.make_slots(3, 256)
    backbone.deterministic = True
    logits = []
    for step in steps:
        parts = []
        for lane, held, tokens in step:
            plan = Plan(causal_rows(np.array(tokens)), [np.arange(held, len(tokens))], len(tokens))
            parts.append((lane, plan, held))
        batch = Batch(parts, slots.table, DEVICE)
        batch.tiles = make_tiles(batch, backbone.heads, backbone.key_heads, 64).to(DEVICE)
        logits.append(backbone.forward(batch, slots).float())
    kept = [part.float() for i in range(backbone.layers) for part in slots.flat(i)]
    return logits, [part[: slots.table.scratch_slot] for part in kept]


STEPS = [
    [(0, 0, [9, 8, 7, 6, 5, 4, 3]), (2, 0, [5, 6, 7])],
    [(0, 7, list(range(24)))],  # too many rows
    [(0, 24, list(range(25))), (2, 3, [5, 6, 7, 8])],
]


@torch.inference_mode()
@pytest.mark.parametrize("arch", ["qwen2", "llama"])  # with a bias and without
def test_it_gives_what_single_kernels_give(arch, monkeypatch):
    backbone = backbone_of(arch)
    given = forwards(backbone, STEPS)
    monkeypatch.setattr(launch, "FEW_ROWS", 0)
    wanted = forwards(backbone, STEPS)
    for own, one in zip(given[0] + given[1], wanted[0] + wanted[1], strict=True):
        assert one.abs().sum() > 0
        torch.testing.assert_close(own, one, rtol=0.02, atol=0.02)


@torch.inference_mode()
def test_tiles_of_heads_change_nothing(monkeypatch):
    backbone = backbone_of()
    found = []
    for width in (16, 32):
        tiling = matmul.ProductTiling(16, width, 64, 2)
        monkeypatch.setattr(heads, "TILINGS", {1 << 30: tiling})
        found.append(forwards(backbone, STEPS[:1]))
    for one, other in zip(found[0][0] + found[0][1], found[1][0] + found[1][1], strict=True):
        assert torch.equal(one, other)


def test_heads_with_norms_of_their_own_are_left_to_three():
    assert backbone_of()._joins_heads
    assert not backbone_of("qwen3")._joins_heads
    assert not backbone_of("llama", head_dim=48)._joins_heads
