"""Tiny models in the GGUF layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from forerun.checkpoints import tiny

LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTSIDE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def write_gguf(
    path: str | Path,
    arch: str = "llama",
    *,
    scaled: bool = False,
    without: str = " ",
    blocks: str | Callable[[str], str] | None = None,
) -> None:
    """A tiny model of an architecture; `without` tensors whose name begins so. `scaled`: the file
    says something about stretching rotations (that they are not). `blocks`: the kind of blocks that
    its matrices are in, or that one of a name is."""
    import gguf

    network = tiny.build(arch)
    config = network.config
    out = gguf.GGUFWriter(path, arch)
    out.add_block_count(config.num_hidden_layers)
    out.add_context_length(512)
    out.add_embedding_length(config.hidden_size)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_layer_norm_rms_eps(1e-6)
    out.add_rope_freq_base(10000.0)
    out.add_rope_dimension_count(16)
    if scaled:
        out.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if arch == "qwen3":
        out.add_key_length(config.head_dim)
    out.add_vocab_size(tiny.VOCAB)
    _add_tokenizer(out)
    for key, weight in network.state_dict().items():
        told = _name(key)
        if not told.startswith(without):
            named = blocks(told) if callable(blocks) else blocks
            kind = gguf.GGMLQuantizationType[named if named and weight.dim() == 2 else "F32"]
            out.add_tensor(told, gguf.quants.quantize(weight.numpy(), kind), raw_dtype=kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def _add_tokenizer(out) -> None:
    vocab = sorted(tiny.tokenizer().get_vocab().items(), key=lambda kv: kv[1])
    out.add_tokenizer_model("gpt2")
    tokens = [token for token, _ in vocab]
    tokens[200] = "ab"  # a merge needs its result in the vocabulary
    out.add_token_list(tokens)
    out.add_token_types([3 if token == "<|end|>" else 1 for token, _ in vocab])
    out.add_token_merges(["a b"])
    out.add_eos_token_id(tiny.VOCAB - 1)


def _name(key: str) -> str:
    module, kind = key.rsplit(".", 1)
    if module in OUTSIDE:
        return f"{OUTSIDE[module]}.{kind}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{LAYER[part]}.{kind}"
