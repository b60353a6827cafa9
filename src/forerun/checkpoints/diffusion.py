"""Diffusion checkpoints whose own code lives on a hub: their weights under the names of the library's classes, no remote code.

LLaDA is a Llama under other names; Dream (and DiffuCoder) has Qwen2's names and speaks of the position after a row's own. MDLM and
SEDD are a network of their own (`backbones/dit.py`).
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


@dataclass(frozen=True)
class Format:
    """A published format: which native class it is, how its keys are called there, and its mask token unless it names one."""

    native: str
    config: Callable[[dict[str, Any]], dict[str, Any]]
    keys: dict[str, str]
    mask_token: int
    shifted: bool = False


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
        rope_parameters={"rope_type": "default", "rope_theta": raw.get("rope_theta", 10000.0)},
        tie_word_embeddings=raw.get("weight_tying", False),
    )


def _qwen2(raw: dict[str, Any]) -> dict[str, Any]:
    same = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    more = ("max_position_embeddings", "rms_norm_eps", "tie_word_embeddings")
    rope = {"rope_type": "default", "rope_theta": raw.get("rope_theta", 1e6)}
    return {**{key: raw[key] for key in same}, **{key: raw[key] for key in more if key in raw}, "rope_parameters": rope}


FORMATS = {
    "llada": Format("llama", _llada, LLADA, 126336),
    "dream": Format("qwen2", _qwen2, {r"(.*)": r"\1"}, 151666, shifted=True),
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
    marks = dict(family="masked", mask_token=raw.get("mask_token_id") or form.mask_token, shifted=form.shifted)
    ends = dict(eos_token_id=raw.get("eos_token_id"), bos_token_id=None, pad_token_id=None)
    config = AutoConfig.for_model(form.native, **own, **ends, forerun=marks)
    if marks["mask_token"] >= config.vocab_size:
        raise BadCheckpoint(
            f"model={source.name!r}: its mask token {marks['mask_token']} is not among its {config.vocab_size} tokens."
        )
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    state = {_renamed(key, form, source): tensor for key, tensor in _weights(source).items()}
    if config.tie_word_embeddings and "model.embed_tokens.weight" in state:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    _check(source, network, state)
    network.load_state_dict(state, assign=True)
    network.tie_weights()
    network.model.rotary_emb = type(network.model.rotary_emb)(config)
    kind = dtype or next(iter(state.values())).dtype
    return network.to(device, kind).eval(), _tokenizer(source)


def load_diffusion_transformer(
    source: Source, raw: dict[str, Any], device: torch.device, dtype: torch.dtype | None, context: int | None
) -> tuple[Any, Any]:
    """(backbone, tokenizer) of MDLM's or SEDD's. The mask is the last token; they may come without their tokenizer, GPT-2's."""
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


DIFFUSION_TRANSFORMERS = {"mdlm": _mdlm, "sedd": _sedd}


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
