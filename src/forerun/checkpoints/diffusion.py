"""Diffusion checkpoints whose own code lives on a hub: their weights under the names of the
library's classes, no remote code.

Masked: LLaDA is a Llama under other names; Dream (and DiffuCoder) has Qwen2's names and speaks of
the position after a row's own; MDLM and SEDD are a network of their own (`backbones/dit.py`). In
blocks: SDAR is Qwen3 or its mixture of experts by its own names; Fast-dLLM v2 is Qwen2, shifted;
LLaDA2 computes what GLM-4's mixture of experts does, under other names; BD3-LM is MDLM's network.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forerun.backbones.dit import DiTBackbone, DiTShape, frequencies, tensor_shapes
from forerun.checkpoints.files import Source, first_line, has_file, path_of, read_json
from forerun.checkpoints.hub import check_finite, refuse_pickled_code
from forerun.checkpoints.tokenizers import check_files_fit, load_tokenizer
from forerun.errors import BadCheckpoint, NotAble

if TYPE_CHECKING:
    from transformers import (
        GenerationConfig,
        PretrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )

RawConfig = dict[str, Any]  # a config.json as it is written
Arguments = dict[str, object]  # of a native config
Weights = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]

GENERATION_KEYS = (
    "eos_token_id",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
)

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

    def mask_token_of(self, raw: RawConfig) -> int:
        return raw.get("mask_token_id") or self.mask_token

    def family_settings(self, name: str, raw: RawConfig) -> Arguments:
        """What the native config must say, so that the family is found."""
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
        tie_word_embeddings=raw.get("weight_tying", False),
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
        norm_topk_prob=raw.get("norm_topk_prob", True),
        use_qk_norm=True,
    )


FORMATS = {
    "llada": Format("llama", _llada, LLADA, 126336),
    "dream": Format("qwen2", _qwen, SAME_KEYS, 151666, shifted=True),
    "sdar": Format("qwen3", _qwen, SAME_KEYS, 151669, block=4),
    "sdar_moe": Format("qwen3_moe", _qwen_moe, SAME_KEYS, 151669, block=4),
    "fast_dllm_qwen": Format("qwen2", _qwen, SAME_KEYS, 151665, shifted=True, block=32),
    "llada2_moe": Format("glm4_moe", _llada2, LLADA2, 156895, block=32),
}


def read_raw_config(source: Source) -> RawConfig | None:
    """The config as it is written, of a checkpoint in one of these formats."""
    if source.gguf:
        return None
    try:
        raw = json.loads(path_of(source, "config.json").read_text())
    except (OSError, ValueError):
        return None  # whatever is wrong with it, the library says it better
    kind = str(raw.get("model_type", "sedd" if _is_sedd(raw) else "")).lower()
    if kind not in FORMATS and kind not in DIFFUSION_TRANSFORMERS:
        return None
    return {**raw, "model_type": kind}


def _is_sedd(raw: RawConfig) -> bool:
    """SEDD's config is that of its training run. It names no model type, but a graph."""
    return all(isinstance(raw.get(part), dict) for part in ("graph", "model"))


def load(
    source: Source, raw: RawConfig, device: torch.device, dtype: torch.dtype | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """(network, tokenizer): the native class with this checkpoint's weights, every one of them
    accounted for."""
    form = FORMATS[raw["model_type"]]
    config = _native_config(source, raw, form)
    tokenizer = load_tokenizer(source)
    check_files_fit(source, tokenizer, config.vocab_size)
    network = _empty_network(config, form, dtype)
    weights = native_layout(
        {_native_key(key, form, source): tensor for key, tensor in _read_weights(source).items()},
        config,
    )
    if config.tie_word_embeddings and "model.embed_tokens.weight" in weights:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    _check_weights(source, shapes, weights)
    network.load_state_dict(weights, assign=True)
    network.tie_weights()
    _place(network, weights, device, dtype or weights["model.embed_tokens.weight"].dtype)
    network.generation_config = generation_config(source)
    return network.eval(), tokenizer


def generation_config(source: Source) -> GenerationConfig:
    """What a checkpoint recommends of how to sample and where to stop. What else is in that file
    belongs to a sampler of its own."""
    from transformers import GenerationConfig

    written = read_json(source, "generation_config.json")
    known = {key: written[key] for key in GENERATION_KEYS if written.get(key) is not None}
    return GenerationConfig(**known)


def _native_config(source: Source, raw: RawConfig, form: Format) -> PretrainedConfig:
    from transformers import AutoConfig

    try:
        arguments = form.config(raw)
    except KeyError as error:
        raise BadCheckpoint(f"model={source.name!r}: its config has no {error}.") from error
    settings = form.family_settings(source.name, raw)
    ends = dict(eos_token_id=raw.get("eos_token_id"), bos_token_id=None, pad_token_id=None)
    config = AutoConfig.for_model(form.native, **arguments, **ends, forerun=settings)
    mask_token = form.mask_token_of(raw)
    if mask_token >= config.vocab_size:
        raise BadCheckpoint(
            f"model={source.name!r}: its mask token {mask_token} is not among its "
            f"{config.vocab_size} tokens."
        )
    return config


def _empty_network(
    config: PretrainedConfig, form: Format, dtype: torch.dtype | None
) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    options: dict[str, str] = {}
    if dtype == torch.float64 and form.native.endswith("_moe"):
        # the library's fast products of experts know no float64
        options["experts_implementation"] = "eager"
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, **options)


def _place(
    network: PreTrainedModel, weights: Weights, device: torch.device, dtype: torch.dtype
) -> None:
    """Move a network to a device. What would lose by rounding keeps its precision."""
    base: Any = network.model
    # Rounded frequencies of rotations are far off a thousand tokens on.
    rotary = type(base.rotary_emb)(network.config)
    base.rotary_emb = torch.nn.Identity()
    torch.nn.Module.to(network, device, dtype)
    base.rotary_emb = rotary.to(device)
    for name, buffer in network.named_buffers():
        if name in weights:  # what chooses experts is small and stays exact
            buffer.data = weights[name].to(device, torch.float32)


def native_layout(weights: Weights, config: PretrainedConfig) -> Weights:
    """Split queries, keys and values where they are one matrix; stack the experts of a layer where
    each has matrices of its own."""
    found: Weights = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in weights.items():
        if name.endswith("self_attn.qkv_proj.weight"):
            heads = config.num_attention_heads * config.head_dim
            keys = config.num_key_value_heads * config.head_dim
            for part, matrix in zip("qkv", tensor.split([heads, keys, keys])):
                found[name.replace("qkv_proj", f"{part}_proj")] = matrix.contiguous()
        elif expert := re.fullmatch(
            r"(.*\.mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.weight", name
        ):
            experts.setdefault(expert[1] + expert[3], {})[int(expert[2])] = tensor
        else:
            found[name] = tensor
    return found | _stacked_experts(experts)


def _stacked_experts(experts: dict[str, dict[int, Tensor]]) -> Weights:
    """All experts of a layer in one tensor. `experts` holds their matrices by layer and part."""
    found: Weights = {}
    for prefix in {name.rpartition(".")[0] for name in experts}:
        gate, up, down = (
            [matrix for _, matrix in sorted(experts.get(f"{prefix}.{part}", {}).items())]
            for part in ("gate", "up", "down")
        )
        if not len(gate) == len(up) == len(down):
            continue  # the check of the weights names what is missing
        found[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gate, up)])
        found[f"{prefix}.down_proj"] = torch.stack(down)
    return found


def load_diffusion_transformer(
    source: Source,
    raw: RawConfig,
    device: torch.device,
    dtype: torch.dtype | None,
    context: int | None,
) -> tuple[DiTBackbone, PreTrainedTokenizerBase | None]:
    """(backbone, tokenizer) of MDLM's, SEDD's or BD3-LM's. The mask is the last token. They may
    come without their tokenizer, GPT-2's."""
    try:
        shape = DIFFUSION_TRANSFORMERS[raw["model_type"]](source, raw)
    except KeyError as error:
        raise BadCheckpoint(f"model={source.name!r}: its config has no {error}.") from error
    tokenizer = load_tokenizer(source)
    check_files_fit(source, tokenizer, shape.vocab)
    weights = {name.removeprefix("backbone."): t for name, t in _read_weights(source).items()}
    _check_rotary(source, weights.pop("rotary_emb.inv_freq", None), shape.hidden // shape.heads)
    _check_weights(source, tensor_shapes(shape), weights)
    dtype = dtype or weights["vocab_embed.embedding"].dtype
    weights = {name: tensor.to(device, dtype) for name, tensor in weights.items()}
    backbone = DiTBackbone(
        weights,
        heads=shape.heads,
        vocab=shape.vocab,
        context=min(context or shape.context, shape.context),
        mask_token=shape.vocab - 1 if raw["model_type"] == "sedd" else None,
    )
    return backbone, tokenizer


def _mdlm(source: Source, raw: RawConfig) -> DiTShape:
    if raw.get("time_conditioning"):
        raise NotAble(
            f"model={source.name!r} conditions on the noise level, which is untried for MDLM: it "
            "is refused."
        )
    return DiTShape(
        hidden=raw["hidden_dim"],
        conditioning=raw["cond_dim"],
        vocab=raw["vocab_size"],
        layers=raw["n_blocks"],
        context=int(raw["model_length"]),
        heads=int(raw["n_heads"]),
    )


def _sedd(source: Source, raw: RawConfig) -> DiTShape:
    """The mask comes on top of SEDD's tokens."""
    if raw["graph"]["type"] != "absorb":
        raise BadCheckpoint(
            f"model={source.name!r}: its graph is {raw['graph']['type']!r}, whose noise is other "
            "tokens; only 'absorb' has a mask."
        )
    model = raw["model"]
    return DiTShape(
        hidden=model["hidden_size"],
        conditioning=model["cond_dim"],
        vocab=raw["tokens"] + 1,
        layers=model["n_blocks"],
        context=int(model["length"]),
        heads=int(model["n_heads"]),
    )


def _bd3lm(source: Source, raw: RawConfig) -> DiTShape:
    if raw.get("causal") or not raw.get("adaln", True) or not raw.get("cross_attn", True):
        raise NotAble(
            f"model={source.name!r} is a BD3-LM that is causal, or without conditioning or blocks: "
            "it is refused."
        )
    if not block_size(source.name, raw):
        raise BadCheckpoint(f"model={source.name!r}: its config has no 'block_size'.")
    return _mdlm(source, raw)


DIFFUSION_TRANSFORMERS = {"mdlm": _mdlm, "sedd": _sedd, "bd3lm": _bd3lm}


def _check_rotary(source: Source, stored: Tensor | None, head_dim: int) -> None:
    """These checkpoints may hold the frequencies of their rotary embedding. They follow from the
    head size, so they must be ours."""
    if stored is None:
        return
    ours = frequencies(head_dim // 2)
    # bfloat16 rounds them
    if stored.shape != ours.shape or not torch.allclose(stored.double(), ours, rtol=1e-2):
        raise BadCheckpoint(
            f"model={source.name!r}: rotary_emb.inv_freq is not the series down from 1 that its "
            "config means."
        )


def _native_key(key: str, form: Format, source: Source) -> str:
    for pattern, name in form.keys.items():
        found = re.fullmatch(pattern, key)
        if found:
            return found.expand(name)
    raise BadCheckpoint(
        f"model={source.name!r}: the weight {key!r} has no place in a model of this format."
    )


def _check_weights(source: Source, shapes: Shapes, weights: Weights) -> None:
    """Refuse a checkpoint with other weights than its config means."""
    both = shapes.keys() & weights.keys()
    wrong = {
        "missing": shapes.keys() - weights.keys(),
        "unexpected": weights.keys() - shapes.keys(),
        "of another shape": {name for name in both if tuple(weights[name].shape) != shapes[name]},
    }
    if any(wrong.values()):
        said = "; ".join(
            f"{len(names)} {kind} ({', '.join(sorted(names)[:3])})"
            for kind, names in wrong.items()
            if names
        )
        raise BadCheckpoint(f"model={source.name!r}: weights do not match its config: {said}.")


def _read_weights(source: Source) -> Weights:
    found: Weights = {}
    for name in _weight_files(source):
        try:
            found |= _read_file(path_of(source, name))
        except Exception as error:
            refuse_pickled_code(source, error)
            raise BadCheckpoint(
                f"model={source.name!r}: {name} cannot be read: {first_line(error)}"
            ) from error
    check_finite(source, found.items())
    return found


def _weight_files(source: Source) -> list[str]:
    """The files that hold the weights, whole or in shards, safetensors before pickles."""
    for whole in ("model.safetensors", "pytorch_model.bin"):
        index = read_json(source, f"{whole}.index.json")
        if index.get("weight_map"):
            return sorted(set(index["weight_map"].values()))
        if has_file(source, whole):
            return [whole]
    raise BadCheckpoint(
        f"model={source.name!r} has no weights: no model.safetensors and no pytorch_model.bin, "
        "whole or with an index."
    )


def _read_file(path: Path) -> Weights:
    from safetensors.torch import load_file

    if path.suffix == ".bin":
        return torch.load(path, map_location="cpu", weights_only=True)
    return load_file(path)
