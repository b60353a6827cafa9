"""Small checkpoints in the formats in which quantised weights are published: random weights under
the real names, with the settings that such files have. What their weights stand for is computed
beside them, number by number.

    PYTHONPATH=src:. python -m tests.quantised FORMAT FOLDER      (to look at one)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from forerun.checkpoints import tiny

SHAPE = dict(hidden_size=256, intermediate_size=384, num_hidden_layers=2)
FLOAT8 = torch.float8_e4m3fn
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
LINEAR = ["Linear"]


def compressed(kind, bits, strategy, form, **more):
    """As llm-compressor writes it."""
    weights = dict(num_bits=bits, type=kind, strategy=strategy, symmetric=True, dynamic=False)
    activations = None
    if bits == 8:
        activations = dict(num_bits=8, type=kind, strategy="token", dynamic=True, symmetric=True)
    return dict(
        quant_method="compressed-tensors",
        format=form,
        config_groups=dict(
            group_0=dict(targets=LINEAR, weights=weights | more, input_activations=activations)
        ),
        ignore=["lm_head"],
        kv_cache_scheme=None,
        quantization_status="compressed",
    )


GPTQ = dict(
    bits=4, group_size=128, desc_act=False, sym=False, static_groups=False, true_sequential=True,
    damp_percent=0.01, lm_head=False, quant_method="gptq",
)  # fmt: skip
SETTINGS = {
    "awq": dict(
        bits=4, group_size=128, zero_point=True, version="gemm", quant_method="awq",
        modules_to_not_convert=None,
    ),
    "gptq": GPTQ,
    "gptq_v2": GPTQ | dict(checkpoint_format="gptq_v2"),
    "gptq desc_act": GPTQ | dict(desc_act=True),
    "gptq 8 bits": GPTQ | dict(bits=8, sym=True),
    "fp8 blocks": dict(
        activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[128, 128]
    ),
    "fp8 channel": compressed("float", 8, "channel", "float-quantized"),
    "fp8 tensor": compressed("float", 8, "tensor", "float-quantized"),
    "int8 channel": compressed("int", 8, "channel", "int-quantized"),
    "int4 packed": compressed("int", 4, "group", "pack-quantized", group_size=128),
    "int4 zeros": compressed("int", 4, "group", "pack-quantized", group_size=32, symmetric=False),
}  # fmt: skip


def words_of(numbers, bits, order=None):
    """Rows of numbers as rows of int32 words, lowest bits first."""
    per_word = 32 // bits
    order = order or list(range(per_word))
    out = np.zeros((numbers.shape[0], numbers.shape[1] // per_word), np.uint64)
    for place, which in enumerate(order):
        out |= numbers[:, which::per_word].astype(np.uint64) << np.uint64(bits * place)
    return torch.from_numpy(out.astype(np.uint32).view(np.int32))


def whole_numbers(rng, shape, bits, group, symmetric):
    """Codes, scales and zeros of a matrix [out, in], and what they stand for."""
    outputs, inputs = shape
    codes = rng.integers(0, 1 << bits, shape)
    scales = torch.from_numpy(rng.uniform(0.5, 1.5, (outputs, inputs // group)) * 2.0 ** (1 - bits))
    scales = scales.mul(0.25).half()
    zeros = rng.integers(1, 1 << bits, scales.shape)
    if symmetric:
        zeros = np.full(scales.shape, 1 << (bits - 1))
    return codes, scales, zeros


def stands_for(codes, scales, zeros, group):
    less = np.repeat(zeros, group, 1)
    by = np.repeat(scales.float().numpy(), group, 1)
    return torch.from_numpy((codes - less).astype(np.float32) * by)


def awq(rng, name, shape):
    codes, scales, zeros = whole_numbers(rng, shape, 4, 128, False)
    files = {
        f"{name}.qweight": words_of(codes.T, 4, AWQ_ORDER),
        f"{name}.qzeros": words_of(zeros.T, 4, AWQ_ORDER),
        f"{name}.scales": scales.t().contiguous(),
    }
    return files, stands_for(codes, scales, zeros, 128)


def gptq(rng, name, shape, *, bits=4, less=1, anywhere=False):
    codes, scales, zeros = whole_numbers(rng, shape, bits, 128, bits == 8)
    groups = np.arange(shape[1]) // 128
    if anywhere:
        groups = rng.permutation(groups)
    by = scales.float().numpy()[:, groups]
    dense = torch.from_numpy((codes - zeros[:, groups]).astype(np.float32) * by)
    files = {
        f"{name}.qweight": words_of(codes, bits).t().contiguous(),
        f"{name}.qzeros": words_of(zeros.T - less, bits),
        f"{name}.scales": scales.t().contiguous(),
        f"{name}.g_idx": torch.from_numpy(groups).int(),
    }
    return files, dense


def fp8_blocks(rng, name, shape):
    codes = torch.from_numpy(rng.normal(size=shape)).mul(60).to(FLOAT8)
    counts = [-(-size // 128) for size in shape]
    scales = torch.from_numpy(rng.uniform(1e-3, 3e-3, counts)).float()
    dense = torch.empty(shape)
    for i in range(shape[0]):
        for j in range(0, shape[1], 128):
            dense[i, j : j + 128] = codes[i, j : j + 128].float() * scales[i // 128, j // 128]
    return {f"{name}.weight": codes, f"{name}.weight_scale_inv": scales}, dense


def eight_bits(rng, name, shape, *, floats=True, per_output=True):
    drawn = torch.from_numpy(rng.normal(size=shape))
    codes = drawn.mul(60).to(FLOAT8) if floats else drawn.mul(40).round().clamp(-127, 127).char()
    scales = torch.from_numpy(rng.uniform(1e-3, 3e-3, (shape[0] if per_output else 1, 1)))
    scales = scales.bfloat16()
    files = {f"{name}.weight": codes, f"{name}.weight_scale": scales}
    if not per_output:
        files[f"{name}.weight_scale"] = scales[0]
        files[f"{name}.input_scale"] = torch.ones(1)
    return files, codes.float() * scales.float()


def packed(rng, name, shape, *, group=128, symmetric=True):
    codes, scales, zeros = whole_numbers(rng, shape, 4, group, symmetric)
    files = {
        f"{name}.weight_packed": words_of(codes, 4),
        f"{name}.weight_scale": scales.bfloat16(),
        f"{name}.weight_shape": torch.tensor(shape),
    }
    if not symmetric:
        files[f"{name}.weight_zero_point"] = words_of(zeros.T, 4).t().contiguous()
    return files, stands_for(codes, scales.bfloat16(), zeros, group)


MAKERS = {
    "awq": awq,
    "gptq": gptq,
    "gptq_v2": lambda *a: gptq(*a, less=0),
    "gptq desc_act": lambda *a: gptq(*a, anywhere=True),
    "gptq 8 bits": lambda *a: gptq(*a, bits=8),
    "fp8 blocks": fp8_blocks,
    "fp8 channel": eight_bits,
    "fp8 tensor": lambda *a: eight_bits(*a, per_output=False),
    "int8 channel": lambda *a: eight_bits(*a, floats=False),
    "int4 packed": packed,
    "int4 zeros": lambda *a: packed(*a, group=32, symmetric=False),
}


def make(kind, folder):
    """Write a checkpoint of a kind. Returns the plain network that it stands for, in float32."""
    network = tiny.build("qwen2", **SHAPE, tie_word_embeddings=False)
    rng = np.random.default_rng(0)
    tensors = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    for name, module in network.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            files, dense = MAKERS[kind](rng, name, tuple(module.weight.shape))
            assert dense.shape == module.weight.shape
            module.weight.data = dense
            del tensors[f"{name}.weight"]
            tensors |= files
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    config = network.config.to_dict() | dict(quantization_config=SETTINGS[kind])
    (folder / "config.json").write_text(json.dumps(config))
    tiny.tokenizer().save_pretrained(folder)
    return network


if __name__ == "__main__":
    make(sys.argv[1], sys.argv[2])
