"""Checkpoints whose weights are quantised, as they are published: AWQ, GPTQ, FP8 and
compressed-tensors. Their codes are kept; what they do to activations is left out, so logits are
those of the dequantised weights.

O outputs, I inputs, G groups of inputs that share a scale.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forerun.backbones.lean import SHAPES
from forerun.backbones.quantised import Quantised, QuantisedLinear
from forerun.checkpoints.files import Source, first_line, has_file, path_of, quiet, read_json
from forerun.errors import BadCheckpoint, NotAble

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Tensors = Mapping[str, Tensor]
Settings = Mapping[str, Any]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the outputs in a word, lowest bits first
FLOAT8 = torch.float8_e4m3fn
# What tells of activations and of the cache, which are not quantised here.
IGNORED = ("input_scale", "input_zero_point", "k_scale", "v_scale", "weight_shape", "inv_freq")
METHODS = ("awq", "gptq", "fp8", "compressed-tensors")


def settings_of(config: PretrainedConfig) -> Settings | None:
    """What a config says of quantised weights that are read here."""
    named: Any = getattr(config, "quantization_config", None)
    if named is None or config.model_type not in SHAPES:
        return None
    settings = named if isinstance(named, dict) else named.to_dict()
    method = settings.get("quant_method")
    return settings if str(getattr(method, "value", method)) in METHODS else None


def _nibbles(words: Tensor, dim: int) -> Tensor:
    """The eight 4-bit numbers of each word, lowest bits first, along one dimension."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    numbers = (words.int().unsqueeze(-1) >> shifts) & 15
    if dim == 0:
        numbers = numbers.transpose(1, 2)
    return numbers.flatten(dim, dim + 1)


def _bytes(words: Tensor, dim: int) -> Tensor:
    shifts = torch.arange(0, 32, 8, dtype=torch.int32)
    numbers = (words.int().unsqueeze(-1) >> shifts) & 255
    if dim == 0:
        numbers = numbers.transpose(1, 2)
    return numbers.flatten(dim, dim + 1)


def _whole(codes_OI: Tensor, scales_OG: Tensor, zeros_OG: Tensor, bits: int) -> Quantised:
    """From numbers of so many bits that are not negative. Where every zero is in the middle, they
    are numbers around it."""
    middle = 1 << (bits - 1)
    even = bool((zeros_OG == middle).all())
    if bits == 8 and not even:
        raise NotAble("8-bit weights with a zero per group are not read: quantise them symmetric.")
    codes = (codes_OI - middle).to(torch.int8)
    zeros = None if even else (zeros_OG - middle).to(torch.int8)
    return Quantised(f"int{bits}", codes, scales_OG.contiguous(), zeros)


def read_awq(tensors: Tensors, settings: Settings) -> Quantised:
    if settings.get("bits", settings.get("w_bit", 4)) != 4 or settings.get("version") not in (
        "gemm",
        "GEMM",
        None,
    ):
        raise NotAble("AWQ is read with 4 bits in the version 'gemm'.")
    order = torch.tensor(AWQ_ORDER).argsort()

    def unpacked(words: Tensor) -> Tensor:
        return _nibbles(words, 1).unflatten(1, (-1, 8))[:, :, order].flatten(1)

    codes_IO = unpacked(tensors["qweight"])
    zeros_GO = unpacked(tensors["qzeros"])
    return _whole(codes_IO.t(), tensors["scales"].t(), zeros_GO.t(), 4)


def read_gptq(tensors: Tensors, settings: Settings) -> Quantised | Tensor:
    bits = settings.get("bits", 4)
    if bits not in (4, 8):
        raise NotAble(f"GPTQ is read with 4 or 8 bits, not {bits}.")
    unpacked = _nibbles if bits == 4 else _bytes
    codes_IO = unpacked(tensors["qweight"], 0)
    zeros_GO = unpacked(tensors["qzeros"], 1)
    if settings.get("checkpoint_format", "gptq") != "gptq_v2":
        zeros_GO = zeros_GO + 1  # files of the first version have one less
    scales_GO = tensors["scales"]
    group_I = tensors.get("g_idx")
    size = len(codes_IO) // len(scales_GO)
    if group_I is not None and not torch.equal(group_I.long(), torch.arange(len(codes_IO)) // size):
        # inputs of a group lie anywhere (desc_act): plain numbers
        numbers = codes_IO - zeros_GO[group_I.long()]
        return (numbers * scales_GO.float()[group_I.long()]).t()
    return _whole(codes_IO.t(), scales_GO.t(), zeros_GO.t(), bits)


def read_fp8(tensors: Tensors, settings: Settings) -> Quantised | Tensor:
    """Fine-grained: a scale for each block of outputs and inputs; or one for all."""
    codes_OI = tensors["weight"]
    scales = (
        tensors["weight_scale_inv"] if "weight_scale_inv" in tensors else tensors["weight_scale"]
    )
    block = settings.get("weight_block_size")
    return _eight_bits(codes_OI, scales, block)


def _eight_bits(codes_OI: Tensor, scales: Tensor, block: Any = None) -> Quantised | Tensor:
    """8-bit numbers with a scale for all, per output, or per block of outputs and inputs."""
    bits = "fp8" if codes_OI.dtype == FLOAT8 else "int8"
    outputs, inputs = codes_OI.shape
    if block is None:
        scales_OG = scales.float().reshape(-1, 1).expand(outputs, 1)
        return Quantised(bits, codes_OI, scales_OG.contiguous())
    high, wide = block
    scales_OG = scales.float().repeat_interleave(high, 0)[:outputs]
    if inputs % wide:  # the last block is cut: plain numbers
        return codes_OI.float() * scales_OG.repeat_interleave(wide, 1)[:, :inputs]
    return Quantised(bits, codes_OI, scales_OG)


def read_compressed(tensors: Tensors, settings: Settings) -> Quantised | Tensor:
    groups = settings.get("config_groups") or {}
    named = [group["weights"] for group in groups.values() if group.get("weights")]
    weights: Settings = named[0] if named else {}
    scales = tensors["weight_scale"]
    if "weight_packed" not in tensors:
        block = weights.get("block_structure") if weights.get("strategy") == "block" else None
        return _eight_bits(tensors["weight"], scales, block)
    bits = weights.get("num_bits", 4)
    if bits not in (4, 8):
        raise NotAble(f"compressed-tensors are read with 4 or 8 bits, not {bits}.")
    unpacked = _nibbles if bits == 4 else _bytes
    codes_OI = unpacked(tensors["weight_packed"], 1)
    if "weight_shape" in tensors:
        codes_OI = codes_OI[:, : int(tensors["weight_shape"][1])]
    zeros_OG = torch.full(scales.shape, 1 << (bits - 1))
    if "weight_zero_point" in tensors:
        zeros_OG = unpacked(tensors["weight_zero_point"], 0)[: len(scales)]
    group_I = tensors.get("weight_g_idx")
    size = codes_OI.shape[1] // scales.shape[1]
    if group_I is not None and not torch.equal(
        group_I.long(), torch.arange(codes_OI.shape[1]) // size
    ):
        numbers = codes_OI - zeros_OG[:, group_I.long()]
        return numbers * scales.float()[:, group_I.long()]
    return _whole(codes_OI, scales, zeros_OG, bits)


READERS: dict[str, Callable[[Tensors, Settings], Quantised | Tensor]] = {
    "awq": read_awq,
    "gptq": read_gptq,
    "fp8": read_fp8,
    "compressed-tensors": read_compressed,
}
# A linear layer is quantised if one of these is beside its name.
SIGNS = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv")


def load(
    source: Source, config: PretrainedConfig, device: torch.device, dtype: torch.dtype | None
) -> PreTrainedModel:
    """A network of the Llama shape, with its quantised layers as `QuantisedLinear`."""
    from transformers import AutoModelForCausalLM

    settings = settings_of(config)
    assert settings is not None
    method = settings["quant_method"]
    read = READERS[str(getattr(method, "value", method))]
    del config.quantization_config
    tensors = dict(_read_tensors(source))
    numbers = dtype or getattr(config, "dtype", None) or torch.bfloat16
    with quiet(), torch.device("meta"):
        network: Any = AutoModelForCausalLM.from_config(config, dtype=numbers)
    for name, linear in list(network.named_modules()):
        if isinstance(linear, nn.Linear):
            own = _taken(tensors, name)
            if any(sign in own for sign in SIGNS):
                _replace(network, name, _layer(source, name, read, own, settings))
            else:
                tensors |= {f"{name}.{key}": tensor for key, tensor in own.items()}
    _fill(source, network, tensors, numbers)
    network.model.rotary_emb = type(network.model.rotary_emb)(config)
    network = network.to(device).eval()
    _move_codes(network, device, numbers)
    with quiet():
        network.generation_config = _generation(source, network.generation_config)
    return network


def _generation(source: Source, own: Any) -> Any:
    from transformers import GenerationConfig

    if not has_file(source, "generation_config.json"):
        return own
    return GenerationConfig.from_dict(read_json(source, "generation_config.json"))


def _read_tensors(source: Source) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    files = ["model.safetensors"]
    if has_file(source, "model.safetensors.index.json"):
        index = json.loads(path_of(source, "model.safetensors.index.json").read_text())
        files = sorted(set(index["weight_map"].values()))
    for file in files:
        if not has_file(source, file):
            raise BadCheckpoint(f"model={source.name!r}: its file {file} is missing.")
        try:
            with safe_open(path_of(source, file), framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - no mapping
                    yield name, opened.get_tensor(name)
        except Exception as error:
            raise BadCheckpoint(
                f"model={source.name!r}: its weights cannot be read: {first_line(error)}"
            ) from error


def _taken(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """The tensors of one layer, which leave the others."""
    names = [key for key in tensors if key.rpartition(".")[0] == name]
    return {key.rpartition(".")[2]: tensors.pop(key) for key in names}


def _layer(
    source: Source, name: str, read: Callable[..., Any], own: Tensors, settings: Settings
) -> nn.Module:
    try:
        matrix = read(own, settings)
    except NotAble as error:
        raise NotAble(f"model={source.name!r}: {error}") from error
    except (KeyError, RuntimeError, ValueError) as error:
        raise BadCheckpoint(
            f"model={source.name!r}: the quantised layer {name!r} is not whole: {first_line(error)}"
        ) from error
    scales = matrix.scales_OG if isinstance(matrix, Quantised) else matrix
    if not torch.isfinite(scales.float()).all():
        raise BadCheckpoint(
            f"model={source.name!r}: the scales of {name!r} are not finite numbers: the file is "
            "damaged."
        )
    bias = own.get("bias")
    if isinstance(matrix, Quantised):
        return QuantisedLinear(matrix, bias)
    linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(matrix, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def _replace(network: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    own: Any = network.get_submodule(name)
    matrix: Any = layer.weight
    shape = matrix.codes_OI.shape if isinstance(matrix, Quantised) else matrix.shape
    if tuple(shape) != (own.out_features, own.in_features):
        raise BadCheckpoint(
            f"the quantised layer {name!r} has {tuple(shape)} weights, and its config wants "
            f"{(own.out_features, own.in_features)}."
        )
    setattr(network.get_submodule(parent), last, layer)


def _fill(source: Source, network: Any, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Give a network the tensors that are not quantised; every one must have its place."""
    rest = {
        name: tensor.to(dtype)
        for name, tensor in tensors.items()
        if name.rpartition(".")[2] not in IGNORED
    }
    for name, parameter in network.named_parameters():
        if not parameter.is_meta:  # a layer that was widened
            rest[name] = parameter.data.to(dtype)
    try:
        info = network.load_state_dict(rest, strict=False, assign=True)
    except RuntimeError as error:
        raise BadCheckpoint(
            f"model={source.name!r}: weights do not match its config: {str(error).splitlines()[-1]}"
        ) from error
    network.tie_weights()
    missing = sorted(name for name, weight in network.named_parameters() if weight.is_meta)
    wrong = []
    for kind, names in (("missing", missing), ("unexpected", sorted(info.unexpected_keys))):
        if names:
            wrong.append(f"{len(names)} {kind} ({', '.join(names[:3])})")
    if wrong:
        raise BadCheckpoint(
            f"model={source.name!r}: weights do not match its config: {'; '.join(wrong)}."
        )


def _move_codes(network: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    for layer in network.modules():
        if isinstance(layer, QuantisedLinear):
            layer.matrix = layer.matrix.by_outputs(lambda rows: rows.to(device))
            if layer.bias is not None:
                layer.bias = layer.bias.to(device, dtype)
