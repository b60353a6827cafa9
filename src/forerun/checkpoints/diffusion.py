"""Diffusion checkpoints whose own code lives on a hub: their weights under the names of the library's classes, no remote code.

Masked: LLaDA is a Llama under other names; Dream (and DiffuCoder) has Qwen2's names and speaks of the position after a row's own;
MDLM and SEDD are a network of their own (`backbones/dit.py`). In blocks: SDAR is Qwen3 or its mixture of experts by its own names;
Fast-dLLM v2 is Qwen2, shifted; LLaDA2 computes what GLM-4's mixture of experts does, under other names; BD3-LM is MDLM's network.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forerun.checkpoints.causal import Source, first_line, load_tokenizer, quiet
from forerun.errors import BadCheckpoint, NotAble

LLADA = {
    r"model\.transformer\.wte\.weight": "model.embed_tokens.weight",
    r"model\.transformer\.ln_f\.weight": "model.norm.weight",
    r"model\.transformer\.ff_out\.weight": "lm_head.weight",
    r"model\.transformer\.blocks\.(\d+)\.attn_norm\.weight": r"model.layers.\1.input_layernorm.weight",
    r"model\.transformer\.blocks\.(\d+)\.ff_norm\.weight": r"model.layers.\1.post_attention_layernorm.weight",
    r"model\.transformer\.blocks\.(\d+)\.([qkv]_proj)\.weight": r"model.layers.\1.self_attn.\2.weight",
    r"model\.transformer\.blocks\.(\d+)\.attn_out\.weight": r"model.layers.\1.self_attn.o_proj.weight",
    r"model\.transformer\.blocks\.(\d+)\.ff_proj\.weight": r"model.layers.\1.mlp.gate_proj.weight",
    r"model\.transformer\.blocks\.(\d+)\.up_proj\.weight": r"model.layers.\1.mlp.up_proj.weight",
    r"model\.transformer\.blocks\.(\d+)\.ff_out\.weight": r"model.layers.\1.mlp.down_proj.weight",
}


LAYER = r"model\.layers\.(\d+)\."
LLADA2 = {
    r"model\.word_embeddings\.weight": "model.embed_tokens.weight",
    LAYER + r"attention\.query_key_value\.weight": r"model.layers.\1.self_attn.qkv_proj.weight",
    LAYER + r"attention\.dense\.weight": r"model.layers.\1.self_attn.o_proj.weight",
    LAYER + r"attention\.query_layernorm\.weight": r"model.layers.\1.self_attn.q_norm.weight",
    LAYER + r"attention\.key_layernorm\.weight": r"model.layers.\1.self_attn.k_norm.weight",
    LAYER + r"mlp\.gate\.expert_bias": r"model.layers.\1.mlp.gate.e_score_correction_bias",
    r"((?:model\.layers|model\.norm|lm_head)\..*)": r"\1",
}
SAME = {r"(.*)": r"\1"}


@dataclass(frozen=True)
class Format:
    """A published format: which native class it is, how its keys are called there, and its mask token and block size unless it
    names them."""

    native: str
    config: Callable[[dict[str, Any]], dict[str, Any]]
    keys: dict[str, str]
    mask_token: int
    shifted: bool = False
    block: int | None = None  # of block diffusion; without one it is masked diffusion

    def marks(self, name: str, raw: dict[str, Any]) -> dict[str, Any]:
        """What the native config must say, so that the family is found."""
        own = dict(mask_token=raw.get("mask_token_id") or self.mask_token, shifted=self.shifted)
        if self.block is None:
            return dict(family="masked", **own)
        return dict(family="block", block=block_size(name, raw) or self.block, **own)


def block_size(name: str, raw: dict[str, Any]) -> int | None:
    """The block size that a config names, or the end of a checkpoint's name, as in SDAR-1.7B-Chat-b32."""
    named = re.search(r"-b(?:lock_size)?(\d+)/?$", name)
    return raw.get("block_size") or raw.get("bd_size") or (int(named[1]) if named else None)


def _llada(raw: dict[str, Any]) -> dict[str, Any]:
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


def _qwen(raw: dict[str, Any]) -> dict[str, Any]:
    same = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    more = ("max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "head_dim", "attention_bias")
    return {**{key: raw[key] for key in same}, **{key: raw[key] for key in more if key in raw}, "rope_parameters": _rope(raw, 1e6)}


def _rope(raw: dict[str, Any], theta: float) -> dict[str, Any]:
    """Plain rotations, by the frequencies that the config names in either of the library's ways."""
    told = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = told.get("rope_type") or told.get("type") or "default"
    if kind != "default":
        raise NotAble(f"this checkpoint scales its rotations ({kind!r}), which is untried for its kind: it is refused.")
    return {"rope_type": "default", "rope_theta": raw.get("rope_theta") or told.get("rope_theta") or theta}


def _qwen_moe(raw: dict[str, Any]) -> dict[str, Any]:
    same = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    more = ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")
    return {**_qwen(raw), **{key: raw[key] for key in same}, **{key: raw[key] for key in more if key in raw}}


def _llada2(raw: dict[str, Any]) -> dict[str, Any]:
    if raw.get("score_function", "sigmoid") != "sigmoid" or raw.get("use_qkv_bias") or not raw.get("use_qk_norm", True):
        raise NotAble("this LLaDA2 has other gates, biases or no norms of queries and keys, which is untried: it is refused.")
    turned = {"partial_rotary_factor": raw.get("partial_rotary_factor", 0.5)}
    return dict(
        **{**_qwen(raw), "rope_parameters": {**_rope(raw, 6e5), **turned}},
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
    "dream": Format("qwen2", _qwen, SAME, 151666, shifted=True),
    "sdar": Format("qwen3", _qwen, SAME, 151669, block=4),
    "sdar_moe": Format("qwen3_moe", _qwen_moe, SAME, 151669, block=4),
    "fast_dllm_qwen": Format("qwen2", _qwen, SAME, 151665, shifted=True, block=32),
    "llada2_moe": Format("glm4_moe", _llada2, LLADA2, 156895, block=32),
}


def read_raw_config(source: Source) -> dict[str, Any] | None:
    """The config as it is written, of a checkpoint in one of these formats."""
    if source.gguf:
        return None
    try:
        raw = json.loads(_file(source, "config.json").read_text())
    except (OSError, ValueError):
        return None  # whatever is wrong with it, the library says it better
    kind = str(raw.get("model_type", "sedd" if _is_sedd(raw) else "")).lower()
    return {**raw, "model_type": kind} if kind in (*FORMATS, *DIFFUSION_TRANSFORMERS) else None


def _is_sedd(raw: dict[str, Any]) -> bool:
    """SEDD's config is its training run's and names no type of model, but a graph of transitions."""
    return all(isinstance(raw.get(part), dict) for part in ("graph", "model"))


def load(source: Source, raw: dict[str, Any], device: torch.device, dtype: torch.dtype | None) -> tuple[Any, Any]:
    """(network, tokenizer): the native class with this checkpoint's weights, every one of them accounted for."""
    from transformers import AutoConfig, AutoModelForCausalLM

    form = FORMATS[str(raw["model_type"]).lower()]
    try:
        own = form.config(raw)
    except KeyError as error:
        raise BadCheckpoint(f"model={source.name!r}: its config has no {error}.") from error
    marks = form.marks(source.name, raw)
    ends = dict(eos_token_id=raw.get("eos_token_id"), bos_token_id=None, pad_token_id=None)
    config = AutoConfig.for_model(form.native, **own, **ends, forerun=marks)
    if marks["mask_token"] >= config.vocab_size:
        raise BadCheckpoint(
            f"model={source.name!r}: its mask token {marks['mask_token']} is not among its {config.vocab_size} tokens."
        )
    # The library's fast products of experts know no float64.
    slow = {"experts_implementation": "eager"} if dtype == torch.float64 and form.native.endswith("_moe") else {}
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config, **slow)
    state = native_layout({_renamed(key, form, source): tensor for key, tensor in _weights(source).items()}, config)
    if config.tie_word_embeddings and "model.embed_tokens.weight" in state:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    _check(source, network, state)
    network.load_state_dict(state, assign=True)
    network.tie_weights()
    rotary = type(network.model.rotary_emb)(config)
    network.model.rotary_emb = torch.nn.Identity()
    network = network.to(device, dtype or state["model.embed_tokens.weight"].dtype)
    network.model.rotary_emb = rotary.to(device)  # not in the weights' type: rounded frequencies are far off a thousand tokens on
    for name, buffer in network.named_buffers():
        if name in state:  # what chooses experts is small and stays exact
            buffer.data = state[name].to(device, torch.float32)
    return network.eval(), _tokenizer(source)


def native_layout(state: dict[str, Any], config: Any) -> dict[str, Any]:
    """Queries, keys and values apart where they are one matrix; all experts of a layer together where each has matrices of its
    own."""
    found: dict[str, Any] = {}
    experts: dict[str, dict[int, Any]] = {}
    for name, tensor in state.items():
        if name.endswith("self_attn.qkv_proj.weight"):
            heads, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
            for part, own in zip("qkv", tensor.split([heads, keys, keys])):
                found[name.replace("qkv_proj", f"{part}_proj")] = own.contiguous()
        elif expert := re.fullmatch(r"(.*\.mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.weight", name):
            experts.setdefault(expert[1] + expert[3], {})[int(expert[2])] = tensor
        else:
            found[name] = tensor
    for prefix in {name.rpartition(".")[0] for name in experts}:
        gate, up, down = (
            [own for _, own in sorted(experts.get(f"{prefix}.{part}", {}).items())] for part in ("gate", "up", "down")
        )
        if not len(gate) == len(up) == len(down):
            continue  # what is missing is then said by name
        found[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gate, up)])
        found[f"{prefix}.down_proj"] = torch.stack(down)
    return found


def load_diffusion_transformer(
    source: Source, raw: dict[str, Any], device: torch.device, dtype: torch.dtype | None, context: int | None
) -> tuple[Any, Any]:
    """(backbone, tokenizer) of MDLM's, SEDD's or BD3-LM's. The mask is the last token; they may come without their tokenizer,
    GPT-2's."""
    from forerun.backbones.dit import DiTBackbone, wanted

    try:
        config = DIFFUSION_TRANSFORMERS[raw["model_type"]](source, raw)
        shapes, longest, heads, vocab = wanted(config), int(config["model_length"]), int(config["n_heads"]), config["vocab_size"]
    except KeyError as error:
        raise BadCheckpoint(f"model={source.name!r}: its config has no {error}.") from error
    state = {name.removeprefix("backbone."): tensor for name, tensor in _weights(source).items()}
    _check_rotary(source, state.pop("rotary_emb.inv_freq", None), config["hidden_dim"] // heads)
    _compare(source, shapes, state)
    kind = dtype or state["vocab_embed.embedding"].dtype
    state = {name: tensor.to(device, kind) for name, tensor in state.items()}
    mask_token = vocab - 1 if raw["model_type"] == "sedd" else None
    return DiTBackbone(state, heads, vocab, min(context or longest, longest), mask_token), _tokenizer_if_any(source)


def _mdlm(source: Source, raw: dict[str, Any]) -> dict[str, Any]:
    if raw.get("time_conditioning"):
        raise NotAble(f"model={source.name!r} conditions on the noise level, which is untried for MDLM: it is refused.")
    return raw


def _sedd(source: Source, raw: dict[str, Any]) -> dict[str, Any]:
    """SEDD's config in MDLM's words. The mask comes on top of its tokens."""
    if raw["graph"]["type"] != "absorb":
        raise BadCheckpoint(
            f"model={source.name!r}: its graph is {raw['graph']['type']!r}, whose noise is other tokens; only 'absorb' has a mask."
        )
    model = raw["model"]
    same = {key: model[key] for key in ("cond_dim", "n_blocks", "n_heads")}
    return dict(vocab_size=raw["tokens"] + 1, hidden_dim=model["hidden_size"], model_length=model["length"], **same)


def _bd3lm(source: Source, raw: dict[str, Any]) -> dict[str, Any]:
    if raw.get("causal") or not raw.get("adaln", True) or not raw.get("cross_attn", True):
        raise NotAble(f"model={source.name!r} is a BD3-LM that is causal, or without conditioning or blocks: it is refused.")
    if not block_size(source.name, raw):
        raise BadCheckpoint(f"model={source.name!r}: its config has no 'block_size'.")
    return _mdlm(source, raw)


DIFFUSION_TRANSFORMERS = {"mdlm": _mdlm, "sedd": _sedd, "bd3lm": _bd3lm}


def _check_rotary(source: Source, stored: Any | None, head_dim: int) -> None:
    """These checkpoints may hold the frequencies of their rotary embedding, which follow from the head size: they must be ours."""
    from forerun.backbones.dit import frequencies

    ours = frequencies(head_dim // 2)
    if stored is not None and (stored.shape != ours.shape or not torch.allclose(stored.double(), ours, rtol=1e-2)):  # bfloat16
        raise BadCheckpoint(f"model={source.name!r}: rotary_emb.inv_freq is not the series down from 1 that its config means.")


def _renamed(key: str, form: Format, source: Source) -> str:
    for pattern, name in form.keys.items():
        found = re.fullmatch(pattern, key)
        if found:
            return found.expand(name)
    raise BadCheckpoint(f"model={source.name!r}: the weight {key!r} has no place in a model of this format.")


def _check(source: Source, network: Any, state: dict[str, Any]) -> None:
    _compare(source, {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}, state)


def _compare(source: Source, wanted: dict[str, tuple[int, ...]], state: dict[str, Any]) -> None:
    missing, extra = sorted(wanted.keys() - state.keys()), sorted(state.keys() - wanted.keys())
    shapes = [name for name in wanted.keys() & state.keys() if tuple(state[name].shape) != wanted[name]]
    wrong = {"missing": missing, "unexpected": extra, "of another shape": sorted(shapes)}
    if any(wrong.values()):
        said = "; ".join(f"{len(names)} {kind} ({', '.join(names[:3])})" for kind, names in wrong.items() if names)
        raise BadCheckpoint(f"model={source.name!r}: weights do not match its config: {said}.")


def _file(source: Source, name: str) -> Path:
    if Path(source.place).is_dir():
        return Path(source.place) / name
    from transformers.utils import cached_file

    with quiet():
        return Path(str(cached_file(source.place, name)))


def _weights(source: Source) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in _weight_files(source):
        try:
            found |= _read(_file(source, name))
        except Exception as error:
            raise BadCheckpoint(f"model={source.name!r}: {name} cannot be read: {first_line(error)}") from error
    return found


def _weight_files(source: Source) -> list[str]:
    if _has(source, "model.safetensors.index.json"):
        return sorted(set(json.loads(_file(source, "model.safetensors.index.json").read_text())["weight_map"].values()))
    pickled = not _has(source, "model.safetensors") and _has(source, "pytorch_model.bin")
    return ["pytorch_model.bin" if pickled else "model.safetensors"]


def _has(source: Source, name: str) -> bool:
    try:
        return _file(source, name).is_file()
    except OSError:
        return False


def _read(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return torch.load(path, map_location="cpu", weights_only=True) if path.suffix == ".bin" else load_file(path)


def _tokenizer_if_any(source: Source) -> Any | None:
    try:
        return _tokenizer(source)
    except Exception:
        return None


def _tokenizer(source: Source) -> Any | None:
    """Its tokenizer; one that is remote code is read from its files instead."""
    from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

    try:
        return load_tokenizer(source)
    except BadCheckpoint:
        if (Path(source.place) / "tokenizer.json").is_file():
            return PreTrainedTokenizerFast(tokenizer_file=str(_file(source, "tokenizer.json")))
        return Qwen2Tokenizer(str(_file(source, "vocab.json")), str(_file(source, "merges.txt")))
