"""Low-rank adapters on disk, in peft's layout: `adapter_config.json` and
`adapter_model.safetensors`.

Plain ones are added to a network's weights here, also where their matrices are stored in 8 bits, as
those that are shipped are; peft reads all other kinds. A file `forerun.json` beside them says which
family they make of the model.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.checkpoints.files import first_line
from forerun.errors import BadCheckpoint, BadOption
from forerun.zoo import HOME as ZOO
from forerun.zoo.storage import SCALE, dequantise, quantise

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HOME = ZOO / "adapters"
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
FAMILY = "forerun.json"  # what the config of a whole model would say under `forerun`
PREFIX = "base_model.model."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
# Settings that make more of adapters than a product of two matrices.
OTHER_KINDS = ("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern")


def shipped() -> dict[str, Path]:
    """The adapters inside the package, by the names of what they make: 'smollm:any-subset'."""
    files = HOME.glob(f"*/*/{CONFIG}")
    return {f"{file.parent.parent.name}:{file.parent.name}": file.parent for file in files}


def split(name: str) -> tuple[str, str | None]:
    """'MODEL+FOLDER', or the name of shipped adapters, as a model and a folder of adapters."""
    found = shipped().get(name)
    if found is not None:
        return name.partition(":")[0], str(found)
    base, plus, folder = name.rpartition("+")
    if not plus or Path(name).expanduser().exists():
        return name, None
    if not (Path(folder).expanduser() / CONFIG).is_file():
        raise BadCheckpoint(
            f"model={name!r}: {folder!r} is no folder of adapters, it has no {CONFIG}."
        )
    return base, folder


def add(network: PreTrainedModel, folder: str) -> PreTrainedModel:
    """A network with adapters added to its weights, of the family that they make of it."""
    path = Path(folder).expanduser()
    try:
        config = json.loads((path / CONFIG).read_text())
        if _is_plain(path, config):
            _add_products(network, config, dequantise(load_file(path / WEIGHTS)))
        else:
            network = _add_by_peft(network, path)
    except BadOption:
        raise
    except Exception as error:
        raise BadCheckpoint(
            f"the adapters in {folder!r} do not fit this model: {first_line(error)}"
        ) from error
    if (path / FAMILY).is_file():
        settings: Any = json.loads((path / FAMILY).read_text())
        if settings:
            network.config.forerun = settings
    return network


def _is_plain(path: Path, config: dict[str, Any]) -> bool:
    """Is every adapter one product of two matrices?"""
    plain = config.get("peft_type") == "LORA" and config.get("bias", "none") == "none"
    return (
        plain and not any(config.get(kind) for kind in OTHER_KINDS) and (path / WEIGHTS).is_file()
    )


def _add_by_peft(network: PreTrainedModel, path: Path) -> PreTrainedModel:
    if find_spec("peft") is None:
        raise BadOption(f"the adapters in {str(path)!r} need peft: pip install 'forerun[lora]'.")
    from peft import PeftModel

    return PeftModel.from_pretrained(network, str(path)).merge_and_unload()


@torch.no_grad()
def _add_products(
    network: PreTrainedModel, config: dict[str, Any], weights: dict[str, Tensor]
) -> None:
    scale = config["lora_alpha"] / config["r"]
    for name in weights:
        if not name.startswith(PREFIX) or not name.endswith((DOWN, UP)):
            raise BadCheckpoint(f"{name} has no place")
    for name, down in weights.items():
        if name.endswith(DOWN):
            module = name.removeprefix(PREFIX).removesuffix(DOWN)
            up = weights[name.removesuffix(DOWN) + UP]
            weight = network.get_submodule(module).get_parameter("weight")
            product = scale * (up.float() @ down.float())
            weight.data += product.to(device=weight.device, dtype=weight.dtype)


def write_small(folder: Path, out: Path) -> None:
    """Plain adapters again, their matrices in 8 bits."""
    config = json.loads((folder / CONFIG).read_text())
    if not _is_plain(folder, config):
        raise BadOption(f"{str(folder)!r} has adapters that are not plain: they stay as they are.")
    out.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, weight in load_file(folder / WEIGHTS).items():
        # A row of the second matrix is a few numbers: its columns have scales instead.
        up = name.endswith(UP)
        parts = quantise(weight.float().t() if up else weight.float())
        tensors[name], tensors[name + SCALE] = ((x.t() if up else x).contiguous() for x in parts)
    save_file(tensors, out / WEIGHTS)
    config["base_model_name_or_path"] = None  # where it lay on the machine that trained it
    (out / CONFIG).write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    if (folder / FAMILY).is_file():
        (out / FAMILY).write_text((folder / FAMILY).read_text())
