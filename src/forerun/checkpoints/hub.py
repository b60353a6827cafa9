"""Checkpoints that `transformers` reads: a directory, a hub id or a GGUF file. Their config,
weights, tokenizer and adapters, and the backbone that runs them."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forerun.checkpoints import tiny
from forerun.engine.backbone import SlottedBackbone
from forerun.errors import BadCheckpoint, BadOption, NotAble

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# rotations that change as the text grows, so that no key could be kept
CHANGING_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class Source:
    """Where a checkpoint is: a directory or hub id, and a file in it if it is a GGUF."""

    name: str
    place: str
    gguf: str | None = None
    only_cached: bool = False  # the hub cannot be reached

    @property
    def arguments(self) -> dict[str, Any]:
        """What the library's `from_pretrained` takes."""
        arguments: dict[str, Any] = {"pretrained_model_name_or_path": self.place}
        if self.gguf:
            arguments["gguf_file"] = self.gguf
        if self.only_cached:
            arguments["local_files_only"] = True
        return arguments


def with_adapters(network: PreTrainedModel, folder: str) -> PreTrainedModel:
    """A network with low-rank adapters added to its weights."""
    from peft import PeftModel

    path = str(Path(folder).expanduser())
    try:
        return PeftModel.from_pretrained(network, path).merge_and_unload()
    except Exception as error:
        raise BadCheckpoint(
            f"the adapters in {folder!r} do not fit this model: {first_line(error)}"
        ) from error


def reads_gguf() -> bool:
    """Are the packages installed that `transformers` needs to read a GGUF file?"""
    return all(find_spec(package) is not None for package in ("gguf", "accelerate"))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the library's own progress bars and advice."""
    from transformers.utils import logging as library_logging

    before = library_logging.get_verbosity()
    library_logging.set_verbosity_error()
    logging.getLogger("gguf").setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        library_logging.set_verbosity(before)


def read_config(source: Source) -> PretrainedConfig:
    from transformers import AutoConfig

    try:
        with quiet():
            return AutoConfig.from_pretrained(**source.arguments)
    except Exception as error:
        hint = ""
        if not Path(source.place).exists():
            hint = " There is no such directory, so it was taken for a hub id."
        raise BadCheckpoint(
            f"model={source.name!r}: its config cannot be read: {first_line(error)}{hint}"
        ) from error


def check_attention(config: PretrainedConfig, max_context: int | None) -> None:
    """Refuse, by name, attention that rows cannot express."""
    config = config.get_text_config()
    kind = config.model_type
    layer_types = set(getattr(config, "layer_types", None) or ())
    unknown_types = layer_types - {"full_attention", "sliding_attention"}
    if unknown_types or not hasattr(config, "num_attention_heads"):
        raise NotAble(
            f"'{kind}' uses {' and '.join(sorted(unknown_types)) or 'no softmax attention'}: "
            "linear-attention and recurrent layers keep no slot per token, so this engine refuses "
            "them."
        )
    window = _sliding_window(config)
    slides = window is not None or "sliding_attention" in layer_types
    within = window is not None and max_context is not None and max_context <= window
    if slides and not within:
        raise NotAble(
            f"'{kind}' uses sliding-window attention (window {window}), which this engine refuses. "
            f"Within max_context={window or 'the window'} it is full attention: load it with that."
        )
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type") in CHANGING_ROPE:
        raise NotAble(
            f"'{kind}' uses {rope['rope_type']!r} rotary embeddings, which change as the text "
            "grows, so that no key could be kept: this engine refuses them."
        )


def _sliding_window(config: PretrainedConfig) -> int | None:
    """How far back the sliding layers look; None where there are none."""
    if not getattr(config, "use_sliding_window", True):
        return None
    return getattr(config, "sliding_window", None) or None


def load_weights(
    source: Source, device: torch.device, dtype: torch.dtype | None, shared: bool = False
) -> PreTrainedModel:
    """The library's model, with every weight accounted for. `shared` splits it over the processes
    that `torchrun` started."""
    from transformers import AutoModelForCausalLM

    parallel: Any = _parallel_arguments(source) if shared else {}
    try:
        with quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                **source.arguments,
                **parallel,
                dtype=dtype or "auto",
                output_loading_info=True,
                trust_remote_code=False,
            )
    except Exception as error:
        raise BadCheckpoint(
            f"model={source.name!r}: its weights cannot be read: {first_line(error)}"
        ) from error
    model, info = loaded
    wrong = _wrong_weights(info)
    if wrong:
        raise BadCheckpoint(f"model={source.name!r}: weights do not match its config: {wrong}.")
    return model if shared else model.to(device)


def _wrong_weights(info: Mapping[str, Iterable[object] | None]) -> str:
    """What the library found wrong while loading; nothing, if all weights have their place."""
    found = []
    for kind in ("missing", "unexpected", "mismatched"):
        keys = sorted(map(str, info.get(f"{kind}_keys") or ()))
        if keys:
            more = " …" if len(keys) > 3 else ""
            found.append(f"{len(keys)} {kind} ({', '.join(keys[:3])}{more})")
    return "; ".join(found)


def _parallel_arguments(source: Source) -> dict[str, object]:
    """What tells the library to split every layer by heads and columns, by the plan of its
    architecture."""
    import torch.distributed as dist

    if "WORLD_SIZE" not in os.environ and not dist.is_initialized():
        raise BadOption(
            "tensor_parallel=True needs several processes: torchrun --nproc-per-node N "
            "your_script.py"
        )
    if source.gguf:
        raise NotAble(
            f"model={source.name!r} is a GGUF file, which the library does not split: "
            "tensor_parallel needs a directory or hub id."
        )
    try:
        from transformers.distributed import DistributedConfig

        return {"distributed_config": DistributedConfig(tp_plan="auto")}
    except (ImportError, TypeError):  # the library before 5.18
        return {"tp_plan": "auto"}


def load_tokenizer(source: Source) -> PreTrainedTokenizerBase | None:
    """The tokenizer; None if the directory has none."""
    from transformers import AutoTokenizer

    directory = Path(source.place)
    if directory.is_dir() and not source.gguf:
        files = [*directory.glob("*token*"), *directory.glob("vocab*")]
        if not files:
            return None
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(**source.arguments)
    except Exception as error:
        raise BadCheckpoint(
            f"model={source.name!r}: its tokenizer cannot be read: {first_line(error)}"
        ) from error


def backbone_of(network: PreTrainedModel, vocab: int, context: int) -> SlottedBackbone:
    """The lean decoder where it fits, XLNet's own, else the library's model driven by rows."""
    from forerun.backbones import lean, library, xlnet

    kind = network.config.model_type
    split = library.processes(network) > 1
    if kind == "xlnet":
        return xlnet.XLNetBackbone(network, vocab, context)
    silu = getattr(network.config, "hidden_act", None) == "silu"
    if kind in lean.SHAPES and silu and not split:
        return lean.LeanBackbone(network, vocab, context)
    backbone = library.LibraryBackbone(network, vocab, context)
    if kind not in tiny.ARCHITECTURES or split:
        library.prove(backbone)
    return backbone


def eos_ids(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """The tokens that end a text, by the generation config, else the config, else the tokenizer."""
    for owner in (getattr(network, "generation_config", None), network.config, tokenizer):
        found = getattr(owner, "eos_token_id", None)
        if found is not None:
            return list(found) if isinstance(found, list | tuple) else [int(found)]
    return []


def first_line(error: BaseException) -> str:
    """An error in one line, for ours."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
