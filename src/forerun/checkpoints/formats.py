"""Published formats of diffusion checkpoints: which native class computes the same, by which keys
and config, and how a format is recognised.

Masked: LLaDA is a Llama under other names, LLaDA-MoE a Qwen3 with experts; Dream (and DiffuCoder)
has Qwen2's names and speaks of the position after a row's own, and so do DiffuGPT and DiffuLLaMA
with those of GPT-2 and Llama; MDLM and SEDD are a network of their own (`backbones/dit.py`). In
blocks: SDAR is Qwen3 or its mixture of experts by its own names; Fast-dLLM v2 is Qwen2, shifted;
LLaDA2 computes what GLM-4's mixture of experts does, under other names; BD3-LM is MDLM's network.
Nemotron-Labs-Diffusion is a Ministral that is driven in its left-to-right mode.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.checkpoints.files import Source, has_file, path_of, read_json
from forerun.errors import NotAble

RawConfig = dict[str, Any]  # a config.json as it is written
Arguments = dict[str, object]  # of a native config
OWN_NETWORKS = ("mdlm", "sedd", "bd3lm")  # of `backbones/dit.py`

# How published keys are called in the native class, as patterns and their replacements.
LLADA_BLOCK = r"model\.transformer\.blocks\.(\d+)\."
NATIVE_LAYER = r"model.layers.\1."
LLADA = {
    r"model\.transformer\.wte\.weight": "model.embed_tokens.weight",
    r"model\.transformer\.ln_f\.weight": "model.norm.weight",
    r"model\.transformer\.ff_out\.weight": "lm_head.weight",
    LLADA_BLOCK + r"attn_norm\.weight": NATIVE_LAYER + "input_layernorm.weight",
    LLADA_BLOCK + r"ff_norm\.weight": NATIVE_LAYER + "post_attention_layernorm.weight",
    LLADA_BLOCK + r"([qkv]_proj)\.weight": NATIVE_LAYER + r"self_attn.\2.weight",
    LLADA_BLOCK + r"attn_out\.weight": NATIVE_LAYER + "self_attn.o_proj.weight",
    LLADA_BLOCK + r"ff_proj\.weight": NATIVE_LAYER + "mlp.gate_proj.weight",
    LLADA_BLOCK + r"up_proj\.weight": NATIVE_LAYER + "mlp.up_proj.weight",
    LLADA_BLOCK + r"ff_out\.weight": NATIVE_LAYER + "mlp.down_proj.weight",
}
LLADA2_LAYER = r"model\.layers\.(\d+)\."
LLADA2 = {
    r"model\.word_embeddings\.weight": "model.embed_tokens.weight",
    LLADA2_LAYER + r"attention\.query_key_value\.weight": NATIVE_LAYER
    + "self_attn.qkv_proj.weight",
    LLADA2_LAYER + r"attention\.dense\.weight": NATIVE_LAYER + "self_attn.o_proj.weight",
    LLADA2_LAYER + r"attention\.query_layernorm\.weight": NATIVE_LAYER + "self_attn.q_norm.weight",
    LLADA2_LAYER + r"attention\.key_layernorm\.weight": NATIVE_LAYER + "self_attn.k_norm.weight",
    LLADA2_LAYER + r"mlp\.gate\.expert_bias": NATIVE_LAYER + "mlp.gate.e_score_correction_bias",
    r"((?:model\.layers|model\.norm|lm_head)\..*)": r"\1",
}
SAME_KEYS = {r"(.*)": r"\1"}
DENOISER = "denoise_model."  # where DiffuGPT's and DiffuLLaMA's own class keeps the layers
DIFFUGPT = {
    r"embed_tokens\.weight": "transformer.wte.weight",
    r"denoise_model\.h\.\d+\.attn\.(?:masked_)?bias": "",  # the triangle, which is not used
    r"denoise_model\.(.*)": r"transformer.\1",
    r"(lm_head\.weight)": r"\1",
}
DIFFULLAMA = {
    r"embed_tokens\.weight": "model.embed_tokens.weight",
    r"denoise_model\.(.*)": r"model.\1",
    r"((?:model|lm_head)\..*)": r"\1",
}
NEMOTRON = {
    r"encoder\.(.*)": r"model.\1",
    r"diffusion_head\.weight": "lm_head.weight",
}


@dataclass(frozen=True)
class Format:
    """A published format: its native class, that class's config and keys, and the mask token and
    block size that it has unless it names others."""

    native: str
    config: Callable[[RawConfig], Arguments]
    keys: dict[str, str]
    mask_token: int
    shifted: bool = False
    block: int | None = None  # of block diffusion; without one it is masked diffusion
    causal: bool = False  # is it driven from left to right?
    embedding: str = "model.embed_tokens.weight"

    def mask_token_of(self, raw: RawConfig) -> int:
        return raw.get("mask_token_id") or self.mask_token

    def family_settings(self, name: str, raw: RawConfig) -> Arguments:
        """What the native config must say, so that the family is found."""
        if self.causal:
            return {}
        settings: Arguments = dict(mask_token=self.mask_token_of(raw), shifted=self.shifted)
        if self.block is None:
            return settings | dict(family="masked")
        return settings | dict(family="block", block=block_size(name, raw) or self.block)


def block_size(name: str, raw: RawConfig) -> int | None:
    """The block size that a config names, or the end of a checkpoint's name, as in
    SDAR-1.7B-Chat-b32."""
    named = re.search(r"-b(?:lock_size)?(\d+)/?$", name)
    return raw.get("block_size") or raw.get("bd_size") or (int(named[1]) if named else None)


def _llada(raw: RawConfig) -> Arguments:
    odd = [raw.get("layer_norm_type", "rms") != "rms", raw.get("block_type", "llama") != "llama"]
    odd += [raw.get(key) for key in ("alibi", "input_emb_norm", "attention_layer_norm")]
    odd += [raw.get(key) for key in ("include_bias", "include_qkv_bias", "scale_logits")]
    odd += [raw.get("activation_type", "silu") != "silu", not raw.get("rope", True)]
    if any(odd):
        raise NotAble(
            "this LLaDA has other norms, biases, activations, positions or blocks than the "
            "published ones, which is untried: it is refused."
        )
    return dict(
        vocab_size=raw.get("embedding_size") or raw["vocab_size"],
        hidden_size=raw["d_model"],
        num_hidden_layers=raw["n_layers"],
        num_attention_heads=raw["n_heads"],
        num_key_value_heads=raw.get("n_kv_heads") or raw["n_heads"],
        intermediate_size=raw.get("mlp_hidden_size") or raw["mlp_ratio"] * raw["d_model"],
        max_position_embeddings=raw["max_sequence_length"],
        rms_norm_eps=raw.get("rms_norm_eps", 1e-5),
        rope_parameters=_rope(raw, 10000.0),
        tie_word_embeddings=raw.get("weight_tying", True),  # as its authors' class has it
    )


def _qwen(raw: RawConfig) -> Arguments:
    required = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
    )
    optional = (
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
        "head_dim",
        "attention_bias",
    )
    return {**_picked(raw, required, optional), "rope_parameters": _rope(raw, 1e6)}


def _llama(raw: RawConfig) -> Arguments:
    return {**_qwen(raw), "rope_parameters": _rope(raw, 1e4)}


def _gpt2(raw: RawConfig) -> Arguments:
    required = ("vocab_size", "n_embd", "n_layer", "n_head", "n_positions")
    optional = ("n_inner", "layer_norm_epsilon", "activation_function", "tie_word_embeddings")
    return _picked(raw, required, optional)


def _llada_moe(raw: RawConfig) -> Arguments:
    """Experts of a layer, the best of which are weighted by their softmax as it is."""
    other = [
        raw.get("moe_router_score_function") not in (None, "softmax"),
        raw.get("moe_router_enable_expert_bias"),
        raw.get("shared_expert_intermediate_size"),
        raw.get("clip_qkv"),
        not raw.get("qk_layernorm", True),
        raw.get("partial_rotary_factor") not in (None, 1, 1.0),
        not all(raw.get("moe_layer_freq") or [1]),
    ]
    if any(other):
        raise NotAble(
            "this LLaDA-MoE has other gates, shared experts, dense layers or rotations than the "
            "published ones, which is untried: it is refused."
        )
    size = raw["expert_intermediate_size"]
    return dict(
        **_qwen({**raw, "intermediate_size": size}),
        moe_intermediate_size=size,
        num_experts=raw["num_experts"],
        num_experts_per_tok=raw["num_experts_per_tok"],
        norm_topk_prob=False,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ) | {"head_dim": raw["hidden_size"] // raw["num_attention_heads"]}


def _nemotron(raw: RawConfig) -> Arguments:
    rope = raw.get("rope_parameters") or raw.get("rope_scaling")
    if not rope:
        raise KeyError("rope_parameters")
    return {
        **_qwen({**raw, "rope_parameters": None, "rope_scaling": None}),
        "rope_parameters": rope,
    }


def _picked(raw: RawConfig, required: Sequence[str], optional: Sequence[str]) -> Arguments:
    """Some keys of a config, as they are."""
    found: Arguments = {key: raw[key] for key in required}
    return found | {key: raw[key] for key in optional if key in raw}


def _rope(raw: RawConfig, theta: float) -> Arguments:
    """Plain rotations, by the frequencies that the config names in either of the library's ways."""
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind != "default":
        raise NotAble(
            f"this checkpoint scales its rotations ({kind!r}), which is untried for its kind: it "
            "is refused."
        )
    theta = raw.get("rope_theta") or parameters.get("rope_theta") or theta
    return {"rope_type": "default", "rope_theta": theta}


def _qwen_moe(raw: RawConfig) -> Arguments:
    required = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    optional = ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")
    return {**_qwen(raw), **_picked(raw, required, optional)}


def _llada2(raw: RawConfig) -> Arguments:
    sigmoid = raw.get("score_function", "sigmoid") == "sigmoid"
    if not sigmoid or raw.get("use_qkv_bias") or not raw.get("use_qk_norm", True):
        raise NotAble(
            "this LLaDA2 has other gates, biases or no norms of queries and keys, which is "
            "untried: it is refused."
        )
    rope = {**_rope(raw, 6e5), "partial_rotary_factor": raw.get("partial_rotary_factor", 0.5)}
    return dict(
        **{**_qwen(raw), "rope_parameters": rope},
        moe_intermediate_size=raw["moe_intermediate_size"],
        n_routed_experts=raw["num_experts"],
        n_shared_experts=raw.get("num_shared_experts", 1),
        num_experts_per_tok=raw["num_experts_per_tok"],
        n_group=raw.get("n_group", 1),
        topk_group=raw.get("topk_group", 1),
        first_k_dense_replace=raw.get("first_k_dense_replace", 0),
        routed_scaling_factor=raw.get("routed_scaling_factor", 1.0),
        norm_topk_prob=raw["num_experts_per_tok"] > 1,  # whatever the config says of it
        use_qk_norm=True,
    )


FORMATS = {
    "llada": Format("llama", _llada, LLADA, 126336),
    "dream": Format("qwen2", _qwen, SAME_KEYS, 151666, shifted=True),
    "sdar": Format("qwen3", _qwen, SAME_KEYS, 151669, block=4),
    "sdar_moe": Format("qwen3_moe", _qwen_moe, SAME_KEYS, 151669, block=4),
    "fast_dllm_qwen": Format("qwen2", _qwen, SAME_KEYS, 151665, shifted=True, block=32),
    "llada2_moe": Format("glm4_moe", _llada2, LLADA2, 156895, block=32),
    "llada_moe": Format("qwen3_moe", _llada_moe, SAME_KEYS, 156895),
    "diffugpt": Format(
        "gpt2", _gpt2, DIFFUGPT, 10541, shifted=True, embedding="transformer.wte.weight"
    ),
    "diffullama": Format("llama", _llama, DIFFULLAMA, 811, shifted=True),
    "nemotron_labs_diffusion": Format("ministral3", _nemotron, NEMOTRON, 100, causal=True),
}


def family_settings(name: str, raw: RawConfig) -> Arguments:
    """The family of a checkpoint in one of these formats, as our own configs say it."""
    kind = raw["model_type"]
    if kind in FORMATS:
        return FORMATS[kind].family_settings(name, raw)
    vocab = raw["tokens"] + 1 if kind == "sedd" else raw["vocab_size"]
    settings: Arguments = dict(family="masked", mask_token=vocab - 1)
    if kind == "bd3lm":
        settings |= dict(family="block", block=block_size(name, raw))
    return settings


def read_raw_config(source: Source) -> RawConfig | None:
    """The config as it is written, of a checkpoint in one of these formats."""
    if source.gguf:
        return None
    try:
        raw = json.loads(path_of(source, "config.json").read_text())
    except (OSError, ValueError):
        return None  # whatever is wrong with it, the library says it better
    kind = str(raw.get("model_type", "sedd" if _is_sedd(raw) else "")).lower()
    if kind in ("llada", "lladamoe") and "num_experts" in raw:
        kind = "llada_moe"
    elif kind in ("gpt2", "llama") and _is_adapted(source, raw):
        kind = {"gpt2": "diffugpt", "llama": "diffullama"}[kind]
        raw = {"mask_token_id": written_mask(source), **raw}
    if kind not in FORMATS and kind not in OWN_NETWORKS:
        return None
    return {**raw, "model_type": kind}


def _is_adapted(source: Source, raw: RawConfig) -> bool:
    """Is a GPT-2 or Llama one that was made a diffusion model? Its config does not say so, but its
    keys do; DiffuLLaMA was also published under Llama's own keys, where only its name tells."""
    if "forerun" in raw:
        return False
    if raw["model_type"] == "llama" and "diffullama" in source.name.lower():
        return True
    keys = read_json(source, "model.safetensors.index.json").get("weight_map")
    if keys is None and has_file(source, "model.safetensors"):
        keys = _stored_keys(path_of(source, "model.safetensors"))
    return any(key.startswith(DENOISER) for key in keys or ())


def _stored_keys(path: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as stored:
            return list(stored.keys())
    except (OSError, SafetensorError):
        return []  # whatever is wrong with it, the library says it better


def written_mask(source: Source) -> int | None:
    """The id of the mask token that a tokenizer's files name, if they do."""
    settings = read_json(source, "tokenizer_config.json")
    mask = settings.get("mask_token")
    mask = mask.get("content") if isinstance(mask, dict) else mask
    for number, token in (settings.get("added_tokens_decoder") or {}).items():
        if mask is not None and token.get("content") == mask:
            return int(number)
    for name in ("added_tokens.json", "vocab.json"):
        found = read_json(source, name).get(mask) if mask is not None else None
        if found is not None:
            return int(found)
    return None


def _is_sedd(raw: RawConfig) -> bool:
    """SEDD's config is that of its training run. It names no model type, but a graph."""
    return all(isinstance(raw.get(part), dict) for part in ("graph", "model"))
