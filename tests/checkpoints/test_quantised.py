"""Quantised checkpoints as they are published: their codes are read, and nothing else is."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import forerun
from forerun.backbones import lean
from forerun.checkpoints import quantised as reading
from forerun.checkpoints.files import Source
from forerun.engine.pack import Batch
from forerun.errors import BadCheckpoint, NotAble
from forerun.sequence.rows import Plan, causal_rows
from tests import quantised

CPU = torch.device("cpu")
# how far logits may be off those of the dequantised weights, on a CPU: rows are 8-bit numbers
# there, and 8-bit weights the nearest of that kind
MOST_OFF = 0.1
EXACT = {"gptq desc_act"}  # plain numbers


def logits(backbone):
    plan = Plan(causal_rows(np.arange(24) * 5 % 200), [np.arange(24)], 24, causal=24)
    return backbone.forward(Batch([(0, plan, 0)], 64, CPU), backbone.make_slots(1, 64))


def read_matrices(folder):
    """The matrices of all linear layers, by name, as read."""
    config = forerun.checkpoints.hub.read_config(Source("it", str(folder)))
    network = reading.load(Source("it", str(folder)), config, CPU, torch.float32)
    layers = dict(network.named_modules())
    return network, layers


@pytest.mark.parametrize("kind", quantised.SETTINGS)
@torch.inference_mode()
def test_a_quantised_checkpoint_is_what_its_numbers_say(kind, tmp_path):
    plain = quantised.make(kind, tmp_path)
    _, layers = read_matrices(tmp_path)
    count = 0
    for name, module in plain.named_modules():
        if isinstance(module, torch.nn.Linear):
            weight = layers[name].weight
            found = weight if isinstance(weight, torch.Tensor) else weight.widened()
            count += not isinstance(weight, torch.Tensor)
            assert torch.equal(found, module.weight), name
            if module.bias is not None:
                assert torch.equal(layers[name].bias, module.bias)
    assert count == (0 if kind in EXACT else 14)  # codes, as they are
    model = forerun.load(str(tmp_path), lanes=2, max_context=64)
    ours = logits(model.backbone)
    wanted = logits(lean.LeanBackbone(plain, model.vocab, 64))
    error = (ours - wanted).norm() / wanted.norm()
    assert error < (1e-5 if kind in EXACT else MOST_OFF)
    if kind not in EXACT:
        told = model.backbone.kinds.values()
        assert any("its own codes" in how or "nearest" in how for how in told)
        assert model.backbone.quantize in model.generate([5, 6], max_tokens=2).reference


@pytest.mark.parametrize("kind", ["awq", "gptq", "fp8 blocks", "fp8 tensor", "int4 zeros"])
@torch.inference_mode()
def test_on_a_gpu_their_codes_are_packed(kind, tmp_path, monkeypatch):
    pytest.importorskip("triton")
    from forerun.backbones.kernels.packed import PackedMatrix

    plain = quantised.make(kind, tmp_path)
    network, _ = read_matrices(tmp_path)
    monkeypatch.setattr(lean, "packs_on", lambda device: True)
    backbone = lean.LeanBackbone(network, 257, 64)
    own = plain.model.layers[1]
    matrix = backbone.stack[1].down
    assert isinstance(matrix, PackedMatrix)
    assert torch.equal(matrix.widened(), own.mlp.down_proj.weight)
    assert matrix.nbytes < 0.32 * own.mlp.down_proj.weight.nbytes
    assert isinstance(backbone.stack[0].qkv, PackedMatrix) and backbone.capturable


def broken(folder, change):
    """A checkpoint with something changed."""
    quantised.make("awq", folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def test_what_is_not_whole_is_refused_by_name(tmp_path):
    name = "model.layers.0.mlp.up_proj"

    def nan(tensors):
        tensors[f"{name}.scales"][0, 0] = torch.nan

    def short(tensors):
        tensors[f"{name}.qweight"] = tensors[f"{name}.qweight"][:, :8].contiguous()

    cases = {
        "not whole": lambda t: t.pop(f"{name}.qzeros"),
        "not finite": nan,
        "up_proj": short,
        "1 missing": lambda t: t.pop("model.norm.weight"),
        "1 unexpected": lambda t: t.update({"model.more": torch.ones(2)}),
    }
    for words, change in cases.items():
        with pytest.raises(BadCheckpoint, match=words):
            forerun.load(broken(tmp_path, change), max_context=64)
    quantised.make("awq", tmp_path)
    with pytest.raises(NotAble, match="quantised already"):
        forerun.load(str(tmp_path), max_context=64, quantize="int8")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["version"] = "gemv"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(NotAble, match="gemm"):
        forerun.load(str(tmp_path), max_context=64)
