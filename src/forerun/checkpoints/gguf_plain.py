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

from forerun.backbones.plain import KINDS, PlainConfig, PlainNetwork
from forerun.checkpoints.gguf_blocks import widen
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


def read(path: Path, dtype: torch.dtype | None) -> PlainNetwork | None:
    """The network of a file; None where it has another shape, or is not what such files are."""
    try:
        file = read_header(path)
        config = _config(file)
        if config is None:
            return None
        names = [_named(tensor.name) for tensor in file.tensors]
        weights = (_weight(tensor, config) for tensor in file.tensors)
        kind = dtype or torch.float32
        return PlainNetwork(config, {name: w.to(kind) for name, w in zip(names, weights)})
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


def _weight(tensor: GGUFTensor, config: PlainConfig) -> Tensor:
    values = torch.from_numpy(widen(tensor.data, tensor.kind)).view(tensor.shape)
    if config.model_type != "llama" or not re.search(r"\.attn_[qk]\.", tensor.name):
        return values
    # numbers of a head that are turned together lie side by side: the library has them in halves
    heads = values.unflatten(0, (-1, config.head_dim // 2, 2))
    return heads.transpose(1, 2).flatten(0, 2)
