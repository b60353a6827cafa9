"""GGUF files of the Llama shape, read without the library's classes for models, whose import takes
longer. Every other file is the library's to read (`gguf.py`).

Names, settings and the order of heads are the library's: `tests/checkpoints/test_gguf.py` compares.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.backbones import blocks
from forerun.backbones.blocks import Blocks
from forerun.backbones.plain import KINDS, PlainConfig, PlainNetwork, Weight
from forerun.checkpoints.gguf import widen
from forerun.checkpoints.gguf_header import GGUFFile, GGUFTensor, read_header

OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
IN_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NUMBERS = {
    "max_position_embeddings": "context_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}


def read(path: Path, dtype: torch.dtype | None, *, in_blocks: bool = False) -> PlainNetwork | None:
    """The network of a file; None where it has another shape, or is not what such files are.
    `in_blocks`: matrices stay in the file's blocks, where they may, and a file that is cut short
    before they are taken ends the process."""
    try:
        file = read_header(path)
        config = _config(file)
        if config is None:
            return None
        kind = dtype or torch.float32
        weights = {}
        for tensor in file.tensors:
            found = (_blocks(tensor) if in_blocks else None) or _values(tensor, kind)
            weights[_named(tensor.name)] = _turned(found, tensor, config)
        return PlainNetwork(config, weights)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
        return None  # the library says what is wrong


def _config(file: GGUFFile) -> PlainConfig | None:
    said = file.said
    kind = said["general.architecture"]
    if kind not in KINDS or any(".rope.scaling." in name for name in said):
        return None
    numbers: dict[str, Any] = {name: said[f"{kind}.{key}"] for name, key in NUMBERS.items()}
    heads = numbers["hidden_size"] // numbers["num_attention_heads"]
    size = {"llama": "rope.dimension_count", "qwen3": "attention.key_length"}.get(kind)
    rows = {tensor.name: tensor.shape[0] for tensor in file.tensors}
    return PlainConfig(
        **numbers,
        model_type=kind,
        hidden_act="silu",
        head_dim=said.get(f"{kind}.{size}", heads),
        rope_parameters={"rope_type": "default", "rope_theta": said[f"{kind}.rope.freq_base"]},
        vocab_size=rows["token_embd.weight"],
        tie_word_embeddings="output.weight" not in rows,
        eos_token_id=said["tokenizer.ggml.eos_token_id"],
    )


def _named(name: str) -> str:
    """The library's name of a tensor; a KeyError for one that a plain network has not."""
    if found := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, part, kind = found.groups()
        return f"model.layers.{layer}.{IN_LAYER[part]}.{kind}"
    return f"{OUTSIDE[name.removesuffix('.weight')]}.weight"


def _blocks(tensor: GGUFTensor) -> Blocks | None:
    """A matrix as it lies in the file."""
    kind = blocks.KINDS.get(tensor.kind.name)
    if kind is None or len(tensor.shape) != 2 or tensor.shape[1] % kind.values:
        return None
    return Blocks(tensor.kind.name, torch.from_numpy(tensor.data).view(tensor.shape[0], -1))


def _values(tensor: GGUFTensor, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(widen(tensor.data, tensor.kind)).view(tensor.shape).to(dtype)


def _turned(weight: Weight, tensor: GGUFTensor, config: PlainConfig) -> Weight:
    """Numbers of a head that are turned together lie side by side in files of this kind; the
    library has them in halves."""
    if config.model_type != "llama" or not re.search(r"\.attn_[qk]\.", tensor.name):
        return weight

    def halves(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (-1, config.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)

    return weight.by_outputs(halves) if isinstance(weight, Blocks) else halves(weight)
