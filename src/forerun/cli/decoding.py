"""The flags of `generate` and `infill`: their own, every field of `Sampling`, and the method's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, fields, replace
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.common import given_or_default, load
from forerun.cli.flags import (
    CONTEXT,
    Device,
    Draft,
    Dtype,
    MethodOptions,
    keyword,
    model_option,
    parameters_of,
    read_method_options,
    with_parameters,
)
from forerun.errors import BadOption
from forerun.options import Sampling

if TYPE_CHECKING:
    from forerun.api import Model

# Fields of Sampling that are lists or mappings: one value for each time the flag is given.
REPEATED: dict[str, type] = {
    "stop": list[str],
    "stop_token_ids": list[int],
    "allowed_tokens": list[int],
    "logit_bias": list[str],
}
# What decoding takes by name and a method cannot have as an option.
NOT_OPTIONS = ("prompt", "messages", "text", "token_ids", "streams")
SINGLE: dict[str, type] = {"int": int, "float": float, "bool": bool, "int | None": int}


@dataclass(frozen=True)
class DecodeFlags:
    """Flags that are neither sampling parameters nor options of the method."""

    prompt: Annotated[
        list[str] | None, typer.Argument(help="Prompts; - reads one from standard input.")
    ] = None
    model: Annotated[
        str | None, model_option("A directory, hub id, .gguf file, zoo:ar, smollm or tiny.")
    ] = None
    method: Annotated[
        str | None, typer.Option(help="See `forerun methods`; default: the model's own kind.")
    ] = None
    draft: Draft = None
    tuned: Annotated[str | None, typer.Option(help="Use what `forerun tune --out FILE` found.")] = (
        None
    )
    prompts: Annotated[
        str | None,
        typer.Option(help="A file: one prompt a line, or JSON lines with prompt or messages."),
    ] = None
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Wrap each prompt as a user message of the chat template."),
    ] = False
    system: Annotated[str | None, typer.Option(help="With --chat: the system message.")] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per result.")] = (
        False
    )
    trace: Annotated[
        str | None, typer.Option(help="Write the trace to this file, as JSON lines.")
    ] = None
    device: Device = None
    dtype: Dtype = None
    lanes: Annotated[int | None, typer.Option(help="Sequences decoded at once.")] = None
    max_context: Annotated[
        int | None, typer.Option(help="Most tokens of prompt and output together.")
    ] = None


@dataclass(frozen=True)
class DecodeCall:
    """What a call of `generate` or `infill` asks for."""

    flags: DecodeFlags
    texts: Sequence[str]  # the words that are no flags
    sampling: dict[str, Any]  # fields of Sampling that have a value
    method_options: MethodOptions

    @property
    def options(self) -> dict[str, Any]:
        """Everything that decoding takes by name, besides method and draft."""
        return {**self.sampling, **self.method_options}

    def check_sampling(self) -> Sampling:
        """Refuse sampling parameters that mean nothing, before a model is loaded."""
        known = Sampling.names()
        return Sampling(**{name: value for name, value in self.options.items() if name in known})

    def load_model(self, default: str) -> Model:
        flags = self.flags
        return load(
            given_or_default(flags.model, default),
            device=flags.device,
            dtype=flags.dtype,
            lanes=flags.lanes,
            max_context=flags.max_context,
        )


def takes_decode_call(function: Callable[[DecodeCall], None]) -> Callable[..., None]:
    """Make a command of a function of a `DecodeCall`."""

    @wraps(function)
    def command(context: typer.Context, **values: Any) -> None:
        function(read_call(values, context.args))

    parameters = [CONTEXT, *parameters_of(DecodeFlags), *map(_parameter_of, fields(Sampling))]
    return with_parameters(command, parameters)


def _parameter_of(field: Field[Any]) -> inspect.Parameter:
    """A field of Sampling as a flag. A repeated flag has no default: it is not given at all."""
    text = field.metadata["help"].capitalize()
    if field.name not in REPEATED:
        single = SINGLE[str(field.type)]
        kind = single | None if field.default is None else single
        return keyword(field.name, Annotated[kind, typer.Option(help=f"{text}.")], field.default)
    form = "TOKEN=BIAS; repeat the flag" if field.name == "logit_bias" else "repeat the flag"
    kind = REPEATED[field.name] | None
    return keyword(field.name, Annotated[kind, typer.Option(help=f"{text} ({form}).")], None)


def read_call(values: dict[str, Any], unread: Sequence[str]) -> DecodeCall:
    """Sort a command's words. A flag of the method and its value land among the prompts, which take
    any number of words."""
    flags = DecodeFlags(**{field.name: values[field.name] for field in fields(DecodeFlags)})
    sampling = {name: values[name] for name in Sampling.names() if values[name] not in (None, [])}
    if "logit_bias" in sampling:
        sampling["logit_bias"] = _biases(sampling["logit_bias"])
    words = [*(flags.prompt or []), *unread]
    first_flag = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    method_options = read_method_options(words[first_flag:])
    for name in NOT_OPTIONS:
        if name in method_options:
            raise BadOption(
                f"--{name.replace('_', '-')} is no option of a method (see `forerun methods`); "
                "prompts come first, without a flag."
            )
    call = DecodeCall(flags, words[:first_flag], sampling, method_options)
    return with_tuned(call, flags.tuned) if flags.tuned else call


def with_tuned(call: DecodeCall, file: str) -> DecodeCall:
    """Take the method and options of a file that `forerun tune` wrote; flags that are given win."""
    from forerun.profile.tune import read

    method, options = read(file)
    flags = call.flags
    if flags.method not in (None, method):
        raise BadOption(f"tuned={file!r} is for method={method!r}, not {flags.method!r}.")
    tuned_draft = options.pop("draft", None)
    return replace(
        call,
        flags=replace(flags, method=method, draft=flags.draft or tuned_draft),
        method_options={**options, **call.method_options},
    )


def _biases(pairs: Sequence[str]) -> dict[int, float]:
    try:
        return {int(token): float(bias) for token, bias in (pair.split("=", 1) for pair in pairs)}
    except ValueError:
        raise BadOption(
            f"logit_bias={list(pairs)!r} must be TOKEN=BIAS, as in --logit-bias 42=-3.5."
        ) from None
