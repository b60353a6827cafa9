"""Weights in 8 bits: every matrix row as int8 with one float32 scale, vectors as they are. The
config is in the file's metadata.

R rows, C columns of a matrix.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from forerun.backbones.plain import PlainConfig, PlainNetwork

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SCALE = ".scale"


def quantise(weight_RC: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in [-127, 127], and the scales to multiply them by."""
    scale_R1 = weight_RC.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    return (weight_RC / scale_R1).round().to(torch.int8), scale_R1


def write_weights(file: Path, network: PreTrainedModel) -> None:
    """Quantise a network's matrices and write all its weights."""
    tensors: dict[str, Tensor] = {}
    tied = network.config.tie_word_embeddings
    for name, tensor in network.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        tensor = tensor.detach().float().cpu()
        if tensor.dim() == 2:
            tensors[name], tensors[name + SCALE] = quantise(tensor)
        else:
            tensors[name] = tensor.contiguous()
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, file, metadata={"config": json.dumps(network.config.to_diff_dict())})


def read_weights(
    file: Path, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """The network, with its weights multiplied out again."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings, state = _read(file)
    config = AutoConfig.for_model(**settings)
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    network.load_state_dict(state, assign=True)
    network.tie_weights()
    network = network.to(dtype)
    # The file has no buffers. They are made again after the cast to `dtype`, because the rotary
    # frequencies must not be rounded.
    network.model.rotary_emb = type(network.model.rotary_emb)(config)
    return network.eval().to(device)


def read_plain(file: Path, dtype: torch.dtype, device: torch.device | str) -> PlainNetwork:
    """The same, for who only decodes."""
    settings, state = _read(file)
    weights = {name: tensor.to(device, dtype) for name, tensor in state.items()}
    return PlainNetwork(PlainConfig(**settings), weights)


def _read(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config, and the weights multiplied out again."""
    with safe_open(file, "pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        return json.loads(stored.metadata()["config"]), dequantise(tensors)


def dequantise(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rows times their scales; tensors without scales as they are."""
    state = {}
    for name, tensor in tensors.items():
        if name + SCALE in tensors:
            state[name] = tensor.float() * tensors[name + SCALE]
        elif not name.endswith(SCALE):
            state[name] = tensor
    return state
