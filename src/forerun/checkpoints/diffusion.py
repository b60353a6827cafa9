"""Diffusion checkpoints whose own code lives on a hub: their weights under the names of the
library's classes, no remote code. `formats.py` says which class is whose."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forerun.backbones.dit import (
    DiTBackbone,
    DiTNetwork,
    DiTShape,
    frequencies,
    tensor_shapes,
)
from forerun.checkpoints.files import Source, first_line, has_file, path_of, quiet, read_json
from forerun.checkpoints.formats import FORMATS, Format, RawConfig, block_size, family_settings
from forerun.checkpoints.hub import check_finite, parallel_arguments, refuse_pickled_code
from forerun.checkpoints.tokenizers import check_files_fit, load_tokenizer
from forerun.errors import BadCheckpoint, NotAble

if TYPE_CHECKING:
    from transformers import (
        GenerationConfig,
        PretrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )

Weights = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]

# All but the first two mean something only where tokens are drawn.
GENERATION_KEYS = (
    "eos_token_id",
    "repetition_penalty",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
)


def load(
    source: Source,
    raw: RawConfig,
    device: torch.device,
    dtype: torch.dtype | None,
    shared: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """(network, tokenizer): the native class with this checkpoint's weights, every one of them
    accounted for. `shared` splits it over the processes that `torchrun` started."""
    form = FORMATS[raw["model_type"]]
    config = _native_config(source, raw, form)
    tokenizer = load_tokenizer(source)
    check_files_fit(source, tokenizer, config.vocab_size)
    network = _empty_network(config, form, dtype)
    named = {_native_key(key, form, source): t for key, t in _read_weights(source).items()}
    named.pop("", None)
    weights = native_layout(named, config)
    if config.tie_word_embeddings and form.embedding in weights:
        weights["lm_head.weight"] = weights[form.embedding]
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    _check_weights(source, shapes, weights)
    dtype = dtype or weights[form.embedding].dtype
    if shared:
        network = _split(source, network, weights, dtype)
    else:
        network.load_state_dict(weights, assign=True)
        network.tie_weights()
        _place(network, weights, device, dtype)
    network.generation_config = generation_config(source)
    return network.eval(), tokenizer


def _split(
    source: Source, network: PreTrainedModel, weights: Weights, dtype: torch.dtype
) -> PreTrainedModel:
    """The same network, each layer split by the plan of its native class."""
    parallel: Any = parallel_arguments(source)
    with quiet():
        return type(network).from_pretrained(
            None, config=network.config, state_dict=weights, dtype=dtype, **parallel
        )


def generation_config(source: Source) -> GenerationConfig:
    """What a checkpoint recommends of how to sample and where to stop. What else is in that file
    belongs to a sampler of its own."""
    from transformers import GenerationConfig

    written = read_json(source, "generation_config.json")
    keys = GENERATION_KEYS if written.get("do_sample") else GENERATION_KEYS[:2]
    known = {key: written[key] for key in keys if written.get(key) is not None}
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
    base: Any = network.base_model
    # Rounded frequencies of rotations are far off a thousand tokens on.
    rotary = type(base.rotary_emb)(network.config) if hasattr(base, "rotary_emb") else None
    if rotary is not None:
        base.rotary_emb = torch.nn.Identity()
    torch.nn.Module.to(network, device, dtype)
    if rotary is not None:
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
    shape = _dit_shape(source, raw)
    tokenizer = load_tokenizer(source)
    check_files_fit(source, tokenizer, shape.vocab)
    weights = _dit_weights(source, shape)
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


def trainable_diffusion_transformer(source: Source, raw: RawConfig) -> DiTNetwork:
    """The same network in float32, for training. It saves itself in the layout it came in."""
    shape = _dit_shape(source, raw)
    config = SimpleNamespace(
        model_type=raw["model_type"],
        raw=raw,
        heads=shape.heads,
        vocab_size=shape.vocab,
        max_position_embeddings=shape.context,
        noise_token=shape.vocab - 1 if raw["model_type"] == "sedd" else None,
        forerun=family_settings(source.name, raw),
    )
    weights = {name: tensor.float() for name, tensor in _dit_weights(source, shape).items()}
    return DiTNetwork(weights, config, _save_dit)


def _save_dit(folder: Path, config: Any, weights: Weights) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    raw = dict(config.raw)
    prefix = "" if raw["model_type"] == "sedd" else "backbone."
    if raw["model_type"] == "sedd":
        del raw["model_type"]  # its config names none
    if config.forerun.get("family") == "block":
        raw["block_size"] = config.forerun["block"]
    (folder / "config.json").write_text(json.dumps(raw))
    named = {f"{prefix}{name}": tensor.contiguous() for name, tensor in weights.items()}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})


def _dit_shape(source: Source, raw: RawConfig) -> DiTShape:
    try:
        return DIFFUSION_TRANSFORMERS[raw["model_type"]](source, raw)
    except KeyError as error:
        raise BadCheckpoint(f"model={source.name!r}: its config has no {error}.") from error


def _dit_weights(source: Source, shape: DiTShape) -> Weights:
    weights = {name.removeprefix("backbone."): t for name, t in _read_weights(source).items()}
    _check_rotary(source, weights.pop("rotary_emb.inv_freq", None), shape.hidden // shape.heads)
    _check_weights(source, tensor_shapes(shape), weights)
    return weights


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
            return found.expand(name) if name else ""
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
