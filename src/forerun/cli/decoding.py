"""The flags of commands that decode: their own, the fields of `Sampling`, and the method's."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import Field, dataclass, fields, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

import typer
from typer.core import TyperCommand

from forerun.cli.common import given_or_default, load
from forerun.cli.flags import (
    CONTEXT,
    Device,
    Draft,
    Dtype,
    MethodName,
    MethodOptions,
    Quantize,
    Quiet,
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
    "choices": list[str],
}
# Fields of Sampling whose flag names a file with the value.
FILES = ("schema", "grammar")
# What decoding takes by name and a method cannot have as an option.
NOT_OPTIONS = ("prompt", "messages", "text", "token_ids", "streams")
HELP_FLAGS = ("-h", "--help")
SINGLE: dict[str, type] = {
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "int | None": int,
    "str | None": str,
}


@dataclass(frozen=True)
class DecodeFlags:
    """Flags of every command that decodes, besides sampling parameters and the method's options."""

    prompt: Annotated[
        list[str] | None,
        typer.Argument(
            help="Prompts; - reads one from standard input; behind -- one may begin with a dash."
        ),
    ] = None
    model: Annotated[
        str | None, model_option("A directory, hub id, .gguf file, zoo:ar, smollm or tiny.")
    ] = None
    method: MethodName = None
    draft: Draft = None
    tuned: Annotated[str | None, typer.Option(help="Use what `forerun tune --out FILE` found.")] = (
        None
    )
    quiet: Quiet = False
    device: Device = None
    dtype: Dtype = None
    quantize: Quantize = None
    max_context: Annotated[
        int | None, typer.Option(help="Most tokens of prompt and output together.")
    ] = None


@dataclass(frozen=True)
class BatchFlags(DecodeFlags):
    """Flags of `generate` and `infill`, which take many texts at once."""

    prompts: Annotated[
        str | None,
        typer.Option(help="A file: one prompt a line, or JSON lines with prompt or messages."),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per result.")] = (
        False
    )
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            help="Write results to this file instead, as JSON lines, each when it is finished.",
        ),
    ] = None
    trace: Annotated[
        str | None, typer.Option(help="Write the trace to this file, as JSON lines.")
    ] = None
    lanes: Annotated[int | None, typer.Option(help="Sequences decoded at once.")] = None


F = TypeVar("F", bound=DecodeFlags)


@dataclass(frozen=True)
class DecodeCall(Generic[F]):
    """What a command that decodes is asked for."""

    flags: F
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

    def load_model(self, default: str, lanes: int | None) -> Model:
        flags = self.flags
        return load(
            given_or_default(flags.model, default),
            device=flags.device,
            dtype=flags.dtype,
            lanes=lanes,
            max_context=flags.max_context,
            quantize=flags.quantize,
        )


class PromptCommand(TyperCommand):
    """A command that takes prompts. Those behind -- are kept apart, so that they may begin with a
    dash; any other word that does, and is no flag, is refused with a way out."""

    def parse_args(self, context: Any, words: list[str]) -> list[str]:  # typer keeps its type
        options = {name: each for each in self.params for name in getattr(each, "opts", ())}
        before, behind = split_at_dashes(words, options, str(self.name))
        context.meta[BEHIND_DASHES] = behind
        return super().parse_args(context, before)


BEHIND_DASHES = "forerun.behind_dashes"


def split_at_dashes(
    words: Sequence[str], options: Mapping[str, Any], command: str
) -> tuple[list[str], list[str]]:
    """The words before and behind --, where no flag takes it for its value."""
    takes_next = False  # does the flag before take this word, whatever it is?
    may_take = False  # a flag of the method: it takes a word that is no flag
    for i, word in enumerate(words):
        if takes_next or (may_take and not word.startswith("--")):
            takes_next = may_take = False
            continue
        may_take = False
        if word == "--":
            return [*words[:i]], [*words[i + 1 :]]
        name, equals, _ = word.partition("=")
        known = options.get(name) or options.get(word)
        if known is not None:
            takes_next = not equals and not known.is_flag
        elif word.startswith("--"):
            may_take = not equals
        elif len(word) > 1 and word.startswith("-") and word not in HELP_FLAGS:
            raise BadOption(
                f"{word!r} begins with a dash and is no flag. If it is a text, put it behind --, "
                f"after all flags: forerun {command} -- {shlex.quote(word)}"
            )
    return [*words], []


def takes_decode_call(
    kind: type[F], without: Collection[str] = ()
) -> Callable[[Callable[[DecodeCall[F]], None]], Callable[..., None]]:
    """Make a command of a function of a `DecodeCall`. Its flags are the fields of `kind` and those
    of Sampling, but for those it does `without`."""
    sampling = [field for field in fields(Sampling) if field.name not in without]

    def command_of(function: Callable[[DecodeCall[F]], None]) -> Callable[..., None]:
        @wraps(function)
        def command(context: typer.Context, **values: Any) -> None:
            call = read_call(kind, values, context.args)
            behind = context.meta.get(BEHIND_DASHES, [])
            function(replace(call, texts=[*call.texts, *behind]))

        parameters = [CONTEXT, *parameters_of(kind), *map(_parameter_of, sampling)]
        return with_parameters(command, parameters)

    return command_of


def _parameter_of(field: Field[Any]) -> inspect.Parameter:
    """A field of Sampling as a flag. A repeated flag has no default: it is not given at all."""
    text = field.metadata["help"]
    text = text[0].upper() + text[1:]
    if field.name in FILES:
        option = typer.Option(help=f"{text}: a file.", metavar="FILE")
        return keyword(field.name, Annotated[str | None, option], None)
    if field.name not in REPEATED:
        single = SINGLE[str(field.type)]
        kind = single | None if field.default is None else single
        return keyword(field.name, Annotated[kind, typer.Option(help=f"{text}.")], field.default)
    form = "TOKEN=BIAS; repeat the flag" if field.name == "logit_bias" else "repeat the flag"
    kind = REPEATED[field.name] | None
    return keyword(field.name, Annotated[kind, typer.Option(help=f"{text} ({form}).")], None)


def read_call(kind: type[F], values: dict[str, Any], unread: Sequence[str]) -> DecodeCall[F]:
    """Sort a command's words. A flag of the method and its value land among the prompts, which take
    any number of words."""
    flags = kind(**{field.name: values[field.name] for field in fields(kind)})
    given = {name: values.get(name) for name in Sampling.names()}
    sampling = {name: value for name, value in given.items() if value not in (None, [])}
    if "logit_bias" in sampling:
        sampling["logit_bias"] = _biases(sampling["logit_bias"])
    for name in FILES:
        if name in sampling:
            sampling[name] = read_file(name, sampling[name])
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


def with_tuned(call: DecodeCall[F], file: str) -> DecodeCall[F]:
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


def read_file(name: str, file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadOption(f"--{name} {file}: cannot be read as text: {error}.") from None


def _biases(pairs: Sequence[str]) -> dict[int, float]:
    try:
        return {int(token): float(bias) for token, bias in (pair.split("=", 1) for pair in pairs)}
    except ValueError:
        raise BadOption(
            f"logit_bias={list(pairs)!r} must be TOKEN=BIAS, as in --logit-bias 42=-3.5."
        ) from None
