"""Train a drafter without the command line: PYTHONPATH=src python tools/train_drafter.py --target M
--out FOLDER.

The same as `forerun train drafter`, for machines without its packages. Given again, it goes on
where it stopped. The target is read once and kept as `target.pt` in the folder `--keep`.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import fields, replace
from pathlib import Path

import torch

from forerun.train.drafter import DrafterRecipe, train_drafter
from forerun.train.networks import load_network, load_tokenizer
from forerun.train.own_text import TextOptions

BEGAN = time.perf_counter()


def log(line: str) -> None:
    print(f"[{time.perf_counter() - BEGAN:6.1f}] {line}", flush=True)


def load_target(name: str, keep: Path | None):
    """The network, from what an earlier call kept if it did: reading a GGUF takes a while."""
    if keep is None:
        return load_network(name)
    file = keep / "target.pt"
    if not file.exists():
        network = load_network(name)
        if hasattr(network.config, "quantization_config"):
            del network.config.quantization_config  # its weights are plain now
        keep.mkdir(parents=True, exist_ok=True)
        torch.save({"config": network.config, "state": network.state_dict()}, file)
    from transformers import AutoModelForCausalLM

    stored = torch.load(file, weights_only=False)
    network = AutoModelForCausalLM.from_config(stored["config"])
    network.load_state_dict(stored["state"])
    return network


def add_fields(parser: argparse.ArgumentParser, options: type, prefix: str = "") -> None:
    for field in fields(options):
        kind = {"int": int, "float": float, "bool": lambda x: x == "1"}
        kind |= {"int | None": int, "str | None": str}
        if field.type in kind:
            flag = f"--{prefix}{field.name}".replace("_", "-")
            parser.add_argument(flag, type=kind[field.type], default=None)


def chosen(options: object, arguments: dict, prefix: str = "") -> dict:
    named = {f.name: arguments.get(f"{prefix}{f.name}") for f in fields(options)}
    return {name: value for name, value in named.items() if value is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--prompts", help="a file of prompts, a JSON object a line")
    parser.add_argument("--target-name", default="", help="what the checkpoint calls its target")
    parser.add_argument("--keep", type=Path, help="folder for the target as it was read")
    add_fields(parser, DrafterRecipe)
    add_fields(parser, TextOptions, "text_")
    arguments = vars(parser.parse_args())
    text = TextOptions(**chosen(TextOptions, arguments, "text_"))
    recipe = replace(DrafterRecipe(**chosen(DrafterRecipe, arguments) | {"text": text}))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = load_target(arguments["target"], arguments["keep"])
    tokenizer = load_tokenizer(arguments["target"])
    log(f"target on {device}: {arguments['target']}")
    folder = train_drafter(
        recipe,
        network,
        tokenizer,
        arguments["out"],
        prompts=arguments["prompts"],
        target_name=arguments["target_name"] or Path(arguments["target"]).name,
        log=log,
    )
    for file in sorted(folder.parent.rglob("*")):
        if file.is_file():
            log(f"{file}: {file.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
