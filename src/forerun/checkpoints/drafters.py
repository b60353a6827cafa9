"""Drafters with features on disk: the layout of `speculators` (DFlash, DSpark), which other engines
read, and the DFlash authors' own.

A checkpoint is a folder with `config.json` and `model.safetensors`. It has no embedding and no
head: they are its target's. In 8 bits every matrix row is int8 with a scale of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.backbones.dflash import DrafterShape, FeatureDrafter
from forerun.drafters.features import KINDS, SUFFIX, is_checkpoint
from forerun.errors import BadCheckpoint, unknown
from forerun.families.features import Features
from forerun.probability.markov import Markov
from forerun.zoo import HOME as ZOO
from forerun.zoo.storage import SCALE, dequantise, quantise

HOME = ZOO / "drafters"
WEIGHTS = "model.safetensors"
SHARED = ("embed_tokens.", "lm_head.", "verifier_", "t2d")  # the target's, or told by the rest


def write_drafter(
    folder: Path, drafter: FeatureDrafter, target: Any, target_name: str = "", *, bits: int = 16
) -> None:
    """A drafter in the layout of `speculators`; `target` is the config of its target."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    tokens = drafter.drafted_tokens
    if tokens is not None and drafter.d2t is not None:
        tensors["d2t"] = drafter.d2t.cpu()
        tensors["t2d"] = torch.zeros(drafter.shape.vocab, dtype=torch.bool)
        tensors["t2d"][tokens.cpu()] = True
    for name, parameter in drafter.named_parameters():
        weight = parameter.detach().float().cpu()
        if bits == 8 and weight.dim() == 2:
            tensors[name], tensors[name + SCALE] = quantise(weight)
        else:
            tensors[name] = weight.to(torch.bfloat16).contiguous()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = speculators_config(drafter.shape, target, target_name)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def speculators_config(shape: DrafterShape, target: Any, target_name: str) -> dict[str, Any]:
    """`config.json` of `speculators` 0.9. It counts hidden states, the embedding as number 0."""
    kind = "dspark" if shape.markov_rank else "dflash"
    config = {
        "architectures": ["DSparkDraftModel" if shape.markov_rank else "DFlashDraftModel"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "block_size": shape.block,
        "draft_vocab_size": shape.draft_vocab or shape.vocab,
        "mask_token_id": shape.mask_token,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in shape.target_layers],
        "num_target_layers": getattr(target, "num_hidden_layers", None),
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "transformer_layer_config": _layer_config(shape, target),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": shape.drafted,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": target_name,
                "architectures": list(getattr(target, "architectures", None) or []),
            },
        },
        "torch_dtype": "bfloat16",
    }
    if shape.markov_rank:
        config |= {
            "markov_rank": shape.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": False,
            "confidence_head_with_markov": False,
        }
    if shape.autoregressive or shape.feature_norms:  # options of ours, which no other engine knows
        own = {"autoregressive": shape.autoregressive, "feature_norms": shape.feature_norms}
        config["forerun"] = own
    return config


def _layer_config(shape: DrafterShape, target: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "layer_types": ["full_attention"] * shape.layers,
        "max_position_embeddings": getattr(target, "max_position_embeddings", 32768),
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.key_heads,
        "rms_norm_eps": shape.eps,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "rope_theta": shape.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": shape.vocab,
    }


def shipped() -> dict[str, Path]:
    """The drafters inside the package, by name."""
    return {f"{file.parent.name}{SUFFIX}": file.parent for file in HOME.glob("*/config.json")}


def find_drafter(draft: str, target: str, backbone: Any) -> Path:
    """The folder that `draft=` names: itself, one that is shipped, or the one for this target."""
    named = shipped()
    if draft in named:
        return named[draft]
    folder = Path(draft).expanduser()
    if is_checkpoint(folder):
        return folder
    if draft.endswith(SUFFIX):
        raise unknown("drafter", draft, named, BadCheckpoint)
    for folder in named.values():
        if belongs(folder, backbone):
            return folder
    raise BadCheckpoint(
        f"draft={draft!r}: no drafter belongs to '{target}'. Shipped: "
        f"{', '.join(named) or 'none'}. Train one with `forerun train drafter --target {target}` "
        "and give its folder."
    )


def belongs(folder: Path, backbone: Any) -> bool:
    """Was a drafter trained for a target of this shape: its width, its layers and its tokens?"""
    shape = read_shape(folder)
    config = json.loads((folder / "config.json").read_text())
    wanted = (shape.hidden, config.get("num_target_layers"), shape.vocab)
    embedding = getattr(backbone, "embed", None)
    if embedding is None:
        return False
    return wanted == (embedding.shape[1], backbone.layers, embedding.shape[0])


def read_drafter(
    folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> FeatureDrafter:
    """A drafter in either layout, ours or another's."""
    shape = read_shape(folder)
    state = {
        name: weight
        for name, weight in dequantise(load_file(folder / WEIGHTS)).items()
        if not name.startswith(SHARED) and (name != "d2t" or shape.draft_vocab)
    }
    drafter = FeatureDrafter(shape)
    wrong = drafter.load_state_dict(state, strict=False)
    if wrong.missing_keys or wrong.unexpected_keys:
        raise BadCheckpoint(
            f"draft={str(folder)!r}: {len(wrong.missing_keys)} weights are missing and "
            f"{len(wrong.unexpected_keys)} have no place "
            f"({', '.join([*wrong.missing_keys, *wrong.unexpected_keys][:3])})."
        )
    tokens = drafter.drafted_tokens
    if tokens is not None and not 0 <= int(tokens.min()) <= int(tokens.max()) < shape.vocab:
        raise BadCheckpoint(
            f"draft={str(folder)!r}: d2t names tokens that its target does not have."
        )
    return drafter.to(device=device, dtype=dtype).eval()


def read_shape(folder: Path) -> DrafterShape:
    """What `config.json` says of a drafter."""
    file = folder / "config.json"
    if not file.is_file():
        raise BadCheckpoint(f"draft={str(folder)!r} has no config.json.")
    config = json.loads(file.read_text())
    try:
        if "dflash_config" in config:
            return _authors_shape(config)
        if config.get("speculators_model_type") in KINDS:
            return _speculators_shape(config, folder)
    except KeyError as error:
        raise BadCheckpoint(f"draft={str(folder)!r}: config.json lacks {error}.") from error
    raise BadCheckpoint(
        f"draft={str(folder)!r} is no drafter with features: its config.json names neither "
        f"dflash_config nor speculators_model_type {' or '.join(KINDS)}."
    )


def _authors_shape(config: dict[str, Any]) -> DrafterShape:
    """The DFlash authors' layout: the draft's own Qwen3 config, and `dflash_config`."""
    own = config["dflash_config"]
    return _shape(
        config,
        target_layers=tuple(own["target_layer_ids"]),
        block=config.get("block_size") or own["block_size"],
        mask_token=own["mask_token_id"],
    )


def _speculators_shape(config: dict[str, Any], folder: Path) -> DrafterShape:
    layer = config["transformer_layer_config"]
    unknown = {
        "sample_from_anchor": config.get("sample_from_anchor", False),
        "confidence head": config.get("enable_confidence_head", False),
        "projector_type": config.get("projector_type", "dflash") != "dflash",
        "markov_head_type": config.get("markov_head_type", "vanilla") != "vanilla",
        "sliding windows": "sliding_attention" in (layer.get("layer_types") or ()),
    }
    found = [name for name, here in unknown.items() if here]
    if found:
        raise BadCheckpoint(f"draft={str(folder)!r} uses what is not read yet: {', '.join(found)}.")
    own = config.get("forerun") or {}
    drafted = config["draft_vocab_size"]
    return _shape(
        layer,
        draft_vocab=0 if drafted == layer["vocab_size"] else drafted,
        target_layers=tuple(layer - 1 for layer in config["aux_hidden_state_layer_ids"]),
        block=config["block_size"],
        mask_token=config["mask_token_id"],
        markov_rank=config.get("markov_rank", 0)
        if config["speculators_model_type"] == "dspark"
        else 0,
        autoregressive=own.get("autoregressive", False),
        feature_norms=own.get("feature_norms", False),
    )


def _shape(layer: dict[str, Any], **given: Any) -> DrafterShape:
    rope = layer.get("rope_parameters") or {}
    heads = layer["num_attention_heads"]
    return DrafterShape(
        vocab=layer["vocab_size"],
        hidden=layer["hidden_size"],
        inner=layer["intermediate_size"],
        layers=layer["num_hidden_layers"],
        heads=heads,
        key_heads=layer["num_key_value_heads"],
        head_dim=layer.get("head_dim") or layer["hidden_size"] // heads,
        eps=layer["rms_norm_eps"],
        rope_theta=float(rope.get("rope_theta") or layer.get("rope_theta") or 10000.0),
        **given,
    )


def _of_all_tokens(drafter: FeatureDrafter, rows_NR: Tensor) -> Tensor:
    """A row for every token of the target, from those of the tokens that are drafted."""
    tokens = drafter.drafted_tokens
    if tokens is None:
        return rows_NR
    rows_VR = rows_NR.new_zeros(drafter.shape.vocab, rows_NR.shape[1])
    return rows_VR.index_copy_(0, tokens, rows_NR)


def family_of(
    drafter: FeatureDrafter,
    vocab: int,
    embedded: int,
    product: Callable[[Tensor], Tensor] | None = None,
) -> Features:
    """How a drafter's blocks are laid out, for a target with so many tokens, and embeddings of so
    many. `product` multiplies the rows of the tokens before, if a backbone has its own."""
    shape = drafter.shape
    markov = None
    if drafter.markov_head is not None:
        head = drafter.markov_head
        before = head.markov_w1.weight.detach()[:vocab]
        after = _of_all_tokens(drafter, head.markov_w2.weight.detach())[:vocab]
        tokens = drafter.drafted_tokens
        few = None if tokens is None else tokens[tokens < vocab]
        markov = Markov(before, after, few, product)
    return Features(
        embedded, shape.mask_token, shape.block, markov=markov, autoregressive=shape.autoregressive
    )
