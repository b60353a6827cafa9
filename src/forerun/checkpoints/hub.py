"""Checkpoints that `transformers` reads: a directory, a hub id or a GGUF file. Their config,
weights and adapters, and the backbone that runs them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch

from forerun.backbones.blocks import Blocks
from forerun.backbones.quantised import QuantisedLinear
from forerun.checkpoints.files import Source, first_line, quiet
from forerun.engine.backbone import SlottedBackbone
from forerun.errors import BadCheckpoint, BadOption, ForerunError, NotAble

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# types of layers that rows express, some of them only as far as they are full attention
ROW_ATTENTION = {
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "indexed_attention",
    "mlp",  # layers without attention
    "moe",
}

RECURRENT = "a recurrent state per lane, kept at every place that a draft may be taken back to"


def reads_gguf() -> bool:
    """Are the packages installed that `transformers` needs to read a GGUF file?"""
    return all(find_spec(package) is not None for package in ("gguf", "accelerate"))


def read_config(source: Source) -> PretrainedConfig:
    from transformers import AutoConfig

    try:
        with quiet():
            return AutoConfig.from_pretrained(**source.arguments)
    except Exception as error:
        _refuse_code(source, error)
        refuse_revision(source, error)
        hint = ""
        if not Path(source.place).exists():
            hint = " There is no such directory, so it was taken for a hub id."
        raise BadCheckpoint(
            f"model={source.name!r}: its config cannot be read: {first_line(error)}{hint}"
        ) from error


def _refuse_code(source: Source, error: Exception) -> None:
    """Say so where reading failed because a checkpoint wants its own code to run."""
    if "trust_remote_code" in str(error):
        raise BadCheckpoint(
            f"model={source.name!r} brings Python code of its own for a class that transformers "
            "does not have. Forerun never runs code of a checkpoint: use one whose model_type "
            "transformers knows."
        ) from error


def refuse_pickled_code(source: Source, error: BaseException) -> None:
    """Say so where a .bin file holds more than tensors."""
    if isinstance(error, UnpicklingError) or "weights_only" in str(error):
        raise BadCheckpoint(
            f"model={source.name!r}: its weights are a pickle with Python objects besides tensors, "
            "which could run code when read. Nothing of it was run: convert it to safetensors."
        ) from error


def refuse_revision(source: Source, error: BaseException) -> None:
    """Say so where reading failed because a repository has no such revision."""
    words = ("RevisionNotFoundError", "valid git identifier", "Revision Not Found")
    if source.revision is not None and any(word in repr(error) for word in words):
        raise BadCheckpoint(
            f"model={source.name!r}: the hub's {source.place!r} has no revision "
            f"{source.revision!r} (a branch, a tag or a commit)."
        ) from error


def check_causal(config: PretrainedConfig) -> None:
    """Refuse what is no left-to-right language model to the library."""
    from transformers import AutoModelForCausalLM

    paired = getattr(config, "is_encoder_decoder", False)
    if type(config) in AutoModelForCausalLM._model_mapping and not paired:
        return
    what = "no language model to transformers"
    if paired:
        what = (
            "an encoder with a decoder, which writes one text from another: it would need slots "
            "for what the encoder says, and prompts of two parts"
        )
    elif getattr(config, "vision_config", None) is not None or hasattr(config, "image_size"):
        what = "a model of images"
    raise NotAble(
        f"'{config.model_type}' is {what}. Forerun decodes models that write from left to right "
        "(and those that fill blanks, see `forerun models`)."
    )


def check_attention(config: PretrainedConfig, max_context: int | None) -> None:
    """Refuse, by name, attention that rows cannot express."""
    config = config.get_text_config()
    kind = config.model_type
    layer_types = set(getattr(config, "layer_types", None) or ())
    if getattr(config, "is_decoder", None) is False and _is_encoder(config):
        raise NotAble(
            f"'{kind}' is an encoder (is_decoder=False): each token sees the whole text, so there "
            "is no law of the next token."
        )
    unknown_types = layer_types - ROW_ATTENTION
    if unknown_types or not hasattr(config, "num_attention_heads"):
        words = [name.replace("_", " ") for name in sorted(unknown_types)]
        words = [word if "attention" in word else f"{word} layers" for word in words]
        needed = "compressed keys in slots" if "compressed" in " ".join(words) else RECURRENT
        raise NotAble(
            f"'{kind}' uses {' and '.join(words) or 'no softmax attention'}. Rows attend to a key "
            f"and a value per token; this would need {needed}."
        )
    for limited, within in _full_within(config, layer_types).items():
        if max_context is None or max_context > within:
            raise NotAble(
                f"'{kind}' uses {limited}, which this engine does not express. Within "
                f"max_context={within} it is full attention: load it with that."
            )
    settings = getattr(config, "forerun", None) or {}
    if settings.get("family", "causal") != "causal":
        _check_blank_filler(config, layer_types, max_context)


def _is_encoder(config: PretrainedConfig) -> bool:
    """Does the library know this model as one that fills masks, too?"""
    from transformers import AutoModelForMaskedLM

    return type(config) in AutoModelForMaskedLM._model_mapping


def _full_within(config: Any, layer_types: set[str]) -> dict[str, int]:
    """Attention that is limited in ways of its own, and up to how many tokens it is full."""
    found = {}
    if "chunked_attention" in layer_types:
        found["attention in chunks"] = config.attention_chunk_size
    if getattr(config, "index_topk", None):
        found["an index of the tokens to attend to"] = config.index_topk
    if getattr(config, "index_topk_blocks", None):
        within = config.index_topk_blocks * config.index_block_size
        found["an index of the blocks to attend to"] = within
    return found


def _check_blank_filler(config: Any, layer_types: set[str], max_context: int | None) -> None:
    """A model that sees a whole canvas has windows to both sides and rotations by its length."""
    window = None
    if getattr(config, "use_sliding_window", True) and (
        not layer_types or "sliding_attention" in layer_types
    ):
        window = getattr(config, "sliding_window", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        window = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    if window is not None and (max_context is None or max_context > window):
        raise NotAble(
            f"'{config.model_type}' fills blanks, and its attention or rotations change past "
            f"{window} tokens, which is untried: load it with max_context={window}."
        )


def load_weights(
    source: Source,
    device: torch.device,
    dtype: torch.dtype | None,
    shared: bool = False,
    config: PretrainedConfig | None = None,
) -> PreTrainedModel:
    """The library's model, with every weight accounted for. `shared` splits it over the processes
    that `torchrun` started. A config that was read already need not be read again."""
    from transformers import AutoModelForCausalLM

    parallel: Any = parallel_arguments(source) if shared else {}
    if config is not None:
        parallel["config"] = config
    try:
        with quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                **source.arguments,
                **parallel,
                dtype=dtype or "auto",
                output_loading_info=True,
            )
    except Exception as error:
        _refuse_code(source, error)
        refuse_pickled_code(source, error)
        raise BadCheckpoint(
            f"model={source.name!r}: its weights cannot be read: {first_line(error)}"
        ) from error
    model, info = loaded
    wrong = _wrong_weights(info)
    if wrong:
        raise BadCheckpoint(f"model={source.name!r}: weights do not match its config: {wrong}.")
    check_finite(source, model.named_parameters())
    return model if shared else model.to(device)


@torch.inference_mode()
def check_finite(source: Source, weights: Iterable[tuple[str, torch.Tensor | Blocks]]) -> None:
    """Refuse weights that are no numbers: whatever they touch is none either."""
    for name, weight in weights:
        if not _is_finite(weight):
            raise BadCheckpoint(
                f"model={source.name!r}: the weight {name!r} has values that are not finite "
                "numbers (NaN or infinity): the file is damaged, or its training diverged."
            )


def _is_finite(weight: Any) -> bool:
    if isinstance(weight, Blocks):
        return weight.is_finite()
    tensor = weight.to_local() if hasattr(weight, "to_local") else weight  # this process's share
    if not tensor.is_floating_point() or tensor.itemsize < 2:
        return True
    total = tensor.sum(dtype=torch.float32)  # an infinite sum may be one of finite numbers
    return bool(torch.isfinite(total) or torch.isfinite(tensor).all())


def _wrong_weights(info: Mapping[str, Iterable[object] | None]) -> str:
    """What the library found wrong while loading; nothing, if all weights have their place."""
    found = []
    for kind in ("missing", "unexpected", "mismatched"):
        keys = sorted(map(str, info.get(f"{kind}_keys") or ()))
        if keys:
            more = " …" if len(keys) > 3 else ""
            found.append(f"{len(keys)} {kind} ({', '.join(keys[:3])}{more})")
    return "; ".join(found)


def parallel_arguments(source: Source) -> dict[str, object]:
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


def backbone_of(
    network: Any, vocab: int, context: int, quantize: str | None = None
) -> SlottedBackbone:
    """The lean decoder where it fits, XLNet's own, else the library's model driven by rows, which
    must prove itself."""
    from forerun.backbones import lean

    if quantize is not None:
        check_quantize(network, context, quantize)
        return lean.LeanBackbone(network, vocab, context, quantize)
    if network.config.model_type == "xlnet":
        from forerun.backbones import xlnet

        return xlnet.XLNetBackbone(network, vocab, context)
    if lean.fits(network, context):
        return lean.LeanBackbone(network, vocab, context)
    return _proven(network, vocab, context)


def check_quantize(network: Any, context: int, quantize: str) -> None:
    """Refuse to quantise what cannot be."""
    from forerun.backbones import lean

    kind = network.config.model_type
    if any(isinstance(part, QuantisedLinear) for part in network.modules()):
        raise NotAble(
            f"quantize={quantize!r}: this checkpoint is quantised already. Load it without."
        )
    if not lean.fits(network, context):
        raise NotAble(
            f"quantize={quantize!r}: '{kind}' is not of the Llama shape ({', '.join(lean.SHAPES)} "
            "with plain weights), whose layers are known well enough for it. Load it without."
        )
    if lean.packs_on(network.device):
        if find_spec("triton") is None:
            raise NotAble(
                f"quantize={quantize!r} on {network.device} needs Triton, whose kernels widen the "
                "matrices: pip install triton, or load it without."
            )
        return
    if quantize == "fp8":
        raise NotAble(
            "quantize='fp8' is for a GPU: no product of 8-bit floats runs on a cpu. Use 'int8'."
        )
    if network.dtype != torch.float32:
        raise NotAble(
            f"quantize={quantize!r} on a cpu needs dtype='float32', in which rows are kept; this "
            f"model is in {str(network.dtype).removeprefix('torch.')}."
        )


def _proven(network: PreTrainedModel, vocab: int, context: int) -> SlottedBackbone:
    """The library's model, driven through its attention interface or by a stand-in, if its rows
    give the logits of its own forward."""
    from forerun.backbones import proof
    from forerun.backbones.library import LibraryBackbone
    from forerun.backbones.stand_in import StandInBackbone

    kind = network.config.model_type
    driver = getattr(network, "row_driver", None)
    drive = LibraryBackbone if speaks_interface(network) else StandInBackbone
    if driver is not None and driver.proven:  # by another backbone
        return drive(network, vocab, context)
    if driver is not None:
        raise NotAble(f"'{kind}': this network was refused before. Load it anew to try again.")
    try:
        own = proof.own_logits(network, vocab)
        backbone = drive(network, vocab, context)
        error = proof.proof_error(backbone, own)
    except ForerunError:
        raise
    except Exception as failure:  # whatever it is, it is the model's and not the caller's
        raise NotAble(
            f"'{kind}' cannot be driven by rows: running it failed with {first_line(failure)}"
        ) from failure
    if not error < proof.largest_error(backbone):
        if _counts_from_padding(network):
            raise NotAble(
                f"'{kind}' is refused: its own forward counts positions from its padding token on, "
                "and the library's generate counts them from 0, so its texts are not its own law. "
                "It would need a generate that agrees with it."
            )
        raise NotAble(
            f"'{kind}' is refused: run by rows, its logits came out {error:.1%} off its own "
            "forward. It depends on more than each row's position and the rows that it attends "
            "to (a state of its own), or counts positions in a way of its own: it would need a "
            "backbone that knows of it."
        )
    backbone.driver.proven = True
    return backbone


def _counts_from_padding(network: PreTrainedModel) -> bool:
    """RoBERTa and its kin keep the rows of positions up to their padding token free."""
    tables = (getattr(module, "position_embeddings", None) for module in network.modules())
    return any(
        isinstance(table, torch.nn.Embedding) and table.padding_idx is not None for table in tables
    )


def speaks_interface(network: PreTrainedModel) -> bool:
    """Does a network compute attention through the library's interface (or ours, for GPT-Neo)?"""
    sources = {inspect.getmodule(type(module)) for module in network.modules()}
    return network.config.model_type == "gpt_neo" or any(
        hasattr(source, "ALL_ATTENTION_FUNCTIONS") for source in sources
    )
