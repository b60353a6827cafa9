"""Flags that several commands share, and how a dataclass becomes the flags of a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from functools import wraps
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from typer.models import OptionInfo

from forerun.errors import BadOption


def _set_quiet(context: typer.Context, quiet: bool) -> bool:
    from forerun.cli.common import stderr_console

    stderr_console.quiet = quiet
    context.call_on_close(lambda: setattr(stderr_console, "quiet", False))
    return quiet


def _method_names() -> list[str]:
    from forerun import registry

    return registry.names("methods")


Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Print results and errors only.", callback=_set_quiet),
]
MethodName = Annotated[
    str | None,
    typer.Option(
        help="See `forerun methods`; default: the model's own kind.", autocompletion=_method_names
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda.")]
Dtype = Annotated[
    str | None, typer.Option(help="float32, float64, bfloat16, float16, or auto: as stored.")
]
Quantize = Annotated[
    str | None, typer.Option(help="int8, int4 or fp8 (GPU): keep the matrices in so many bits.")
]
Draft = Annotated[str | None, typer.Option(help="The drafter: a smaller model, or 'lookup'.")]
PromptFile = Annotated[
    str | None, typer.Option(help="A file, as for generate; default: six pieces of code.")
]
Corpus = Annotated[
    str | None,
    typer.Option(help="A folder of .py files or a .jsonl[.xz] file; default: what is installed."),
]
MaxTokens = Annotated[int, typer.Option(help="Tokens per prompt.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
Batch = Annotated[int, typer.Option(help="Prompts decoded together.")]
Seed = Annotated[int, typer.Option(help="Same seed, same output.")]


def model_option(text: str) -> OptionInfo:
    """--model or -m, with what it means to this command."""
    found: OptionInfo = typer.Option("--model", "-m", help=text)
    return found


# Options of a method by name. The method knows them, and refuses those that it does not have.
MethodOptions = dict[str, Any]

# For commands that leave flags they do not know to the method.
WITH_METHOD_OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True}

Flags = TypeVar("Flags")


def takes_flags(kind: type[Flags]) -> Callable[[Callable[[Flags], None]], Callable[..., None]]:
    """Make a command of a function: each field of the dataclass that it takes is a flag."""

    def command_of(function: Callable[[Flags], None]) -> Callable[..., None]:
        @wraps(function)
        def command(**values: object) -> None:
            function(kind(**values))

        return with_parameters(command, parameters_of(kind))

    return command_of


def takes_flags_and_options(
    kind: type[Flags],
) -> Callable[[Callable[[Flags, MethodOptions], None]], Callable[..., None]]:
    """Like `takes_flags`; the function also gets the method's options, as its second argument."""

    def command_of(function: Callable[[Flags, MethodOptions], None]) -> Callable[..., None]:
        @wraps(function)
        def command(context: typer.Context, **values: object) -> None:
            function(kind(**values), read_method_options(context.args))

        return with_parameters(command, [CONTEXT, *parameters_of(kind)])

    return command_of


CONTEXT = inspect.Parameter(
    "context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
)


def parameters_of(kind: type) -> list[inspect.Parameter]:
    """A keyword parameter for each field of a dataclass."""
    hints = get_type_hints(kind, include_extras=True)
    found = []
    for field in fields(kind):
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        found.append(keyword(field.name, hints[field.name], default))
    return found


def keyword(name: str, annotation: object, default: object) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default
    )


def with_parameters(
    command: Callable[..., None], parameters: Sequence[inspect.Parameter]
) -> Callable[..., None]:
    """Typer reads the flags of a command from its signature and its annotations."""
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def read_method_options(words: Sequence[str]) -> MethodOptions:
    """Flags that the command does not know: --k 8 or --k=8. Numbers are read as numbers."""
    found: MethodOptions = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise BadOption(
                f"{word!r} is not expected here: prompts come first, then options of the method, "
                "as in --k 8."
            )
        flag, equals, value = word[2:].partition("=")
        name = flag.replace("-", "_")
        if not equals and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        elif not equals:
            _check_needs_no_value(flag, name)
            value = "true"
        found[name] = _value(value)
    return found


def _check_needs_no_value(flag: str, name: str) -> None:
    """Refuse a flag without a value if it is an option of ours that needs one."""
    from forerun import registry

    defaults = []
    for kind in ("methods", "drafters"):
        for each in registry.BUILT_IN[kind]:
            found = registry.get(kind, each)
            options = found.options if kind == "methods" else found
            defaults += [field.default for field in fields(options) if field.name == name]
    if defaults and not any(isinstance(default, bool) for default in defaults):
        raise BadOption(f"--{flag} needs a value, as in --{flag} {_example(defaults)}.")


def _example(defaults: Sequence[object]) -> object:
    given = [default for default in defaults if default not in (None, MISSING)]
    return given[0] if given else "VALUE"


def _value(text: str) -> bool | int | float | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
