"""A network that is spread over processes (FSDP2), and checkpoints that any number of processes
read.

Every process holds a share of each layer's weights, gradients and optimiser state, and gathers a
layer when it runs. A checkpoint is a folder to which each process writes its share; names say what
is where, so another number of processes, or one, can go on from it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from forerun.errors import NotAble
from forerun.train.base import SHARDS
from forerun.train.recipe import Recipe
from forerun.train.resume import Progress, check_recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LATEST = "latest.json"


def spread(network: PreTrainedModel, device: torch.device, bfloat16: bool) -> None:
    """Share out a network, in place: each decoder layer is a unit, and what is left another."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    settings: dict[str, Any] = {"mesh": mesh}
    if bfloat16:
        settings["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    for layer in layers_of(network):
        fully_shard(layer, **settings)
    fully_shard(network, **settings)


def layers_of(network: nn.Module) -> nn.ModuleList:
    """The decoder layers: the longest list of modules."""
    lists = [module for module in network.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise NotAble(f"shard: {type(network).__name__} has no list of layers to share out.")
    return max(lists, key=len)


def recompute(network: PreTrainedModel) -> None:
    """Keep a layer's input only, and run it again on the way back (gradient checkpointing)."""
    if not getattr(network, "supports_gradient_checkpointing", False):
        raise NotAble(f"recompute: {type(network).__name__} cannot run its layers again.")
    network.gradient_checkpointing_enable({"use_reentrant": False})


def whole_network(network: nn.Module, kind: type[nn.Module], main: bool) -> nn.Module | None:
    """A network that was spread, in one piece, on the main process. Every process takes part."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(network, options=options)
    if not main:
        return None
    made = kind(network.config)
    made.load_state_dict(weights)
    return made


def save_shards(
    out: Path, recipe: Recipe, network: nn.Module, optimiser: Optimizer, progress: Progress
) -> None:
    """Every process writes its share; then the main one says that this is the latest. An
    interruption leaves the one before it."""
    import torch.distributed.checkpoint as shards

    folder = out / SHARDS
    name = f"step{progress.step}"
    main = not _several() or torch.distributed.get_rank() == 0
    if main:
        folder.mkdir(parents=True, exist_ok=True)
    _wait()
    shards.save(_state(network, optimiser), checkpoint_id=folder / name)
    _wait()
    if not main:
        return
    latest = {
        "recipe": recipe.as_dict(),
        "step": progress.step,
        "seconds": progress.seconds,
        "folder": name,
    }
    unfinished = folder / "latest.tmp"
    unfinished.write_text(json.dumps(latest))
    unfinished.replace(folder / LATEST)
    for older in folder.glob("step*"):
        if older.name != name:
            shutil.rmtree(older)


def restore_shards(out: Path, recipe: Recipe, network: nn.Module, optimiser: Optimizer) -> Progress:
    """Load what any number of processes saved, if there is something."""
    import torch.distributed.checkpoint as shards
    from torch.distributed.checkpoint.state_dict import set_state_dict

    file = out / SHARDS / LATEST
    if not file.exists():
        return Progress()
    latest = json.loads(file.read_text())
    check_recipe(file, latest["recipe"], json.loads(json.dumps(recipe.as_dict())))
    state = _state(network, optimiser)
    shards.load(state, checkpoint_id=out / SHARDS / latest["folder"])
    set_state_dict(
        network,
        optimiser,
        model_state_dict=state["network"],
        optim_state_dict=state["optimiser"],
    )
    return Progress(latest["step"], latest["seconds"])


def _state(network: nn.Module, optimiser: Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(network, optimiser)
    return {"network": weights, "optimiser": moments}


def _several() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _wait() -> None:
    if _several():
        torch.distributed.barrier()
