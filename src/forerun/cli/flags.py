"""Command-line flags from the dataclasses that define the options, so that the two cannot disagree."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer

from forerun.errors import BadOption
from forerun.parameters import Sampling

Device = Annotated[str | None, typer.Option(help="cpu or cuda.")]
Dtype = Annotated[str | None, typer.Option(help="float32, float64, bfloat16 or float16.")]

OWN: dict[str, Any] = {
    "prompt": (Annotated[list[str] | None, typer.Argument(help="Prompts; - reads one from standard input.")], None),
    "model": (
        Annotated[str | None, typer.Option("--model", "-m", help="A directory, hub id, .gguf file, zoo:ar, smollm or tiny.")],
        None,
    ),
    "method": (Annotated[str | None, typer.Option(help="See `forerun methods`; default: the model's own kind.")], None),
    "draft": (Annotated[str | None, typer.Option(help="The drafter: a smaller model, or 'lookup'.")], None),
    "tuned": (Annotated[str | None, typer.Option(help="Use what `forerun tune --out FILE` found.")], None),
    "prompts": (
        Annotated[str | None, typer.Option(help="A file: one prompt a line, or JSON lines with prompt or messages.")],
        None,
    ),
    "chat": (Annotated[bool, typer.Option("--chat", help="Wrap each prompt as a user message of the chat template.")], False),
    "system": (Annotated[str | None, typer.Option(help="With --chat: the system message.")], None),
    "json": (Annotated[bool, typer.Option("--json", help="Print one JSON object per result.")], False),
    "trace": (Annotated[str | None, typer.Option(help="Write the trace to this file, as JSON lines.")], None),
    "device": (Device, None),
    "dtype": (Dtype, None),
    "lanes": (Annotated[int | None, typer.Option(help="Sequences decoded at once.")], None),
    "max_context": (Annotated[int | None, typer.Option(help="Most tokens of prompt and output together.")], None),
}
# Fields of Sampling that a flag cannot hold as they are.
AS_TEXT: dict[str, type] = {"stop": list[str], "stop_token_ids": list[int], "allowed_tokens": list[int], "logit_bias": list[str]}
PLAIN: dict[str, type] = {"int": int, "float": float, "bool": bool, "int | None": int}


@dataclass(frozen=True)
class Given:
    """What was given on the command line: flags of the command, and flags of the method."""

    own: dict[str, Any]
    extra: dict[str, Any]

    def options(self) -> dict[str, Any]:
        """Everything that decoding takes: sampling parameters that differ from their defaults, and the method's own options."""
        chosen = {name: self.own[name] for name in Sampling.names() if self.own[name] is not None and self.own[name] != []}
        if "logit_bias" in chosen:
            chosen["logit_bias"] = _biases(chosen["logit_bias"])
        return {**chosen, **self.extra}


def with_sampling(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command our own flags and one for every field of `Sampling`."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    first = next(iter(inspect.signature(command).parameters.values()))
    parameters = [first.replace(annotation=typer.Context)]
    parameters += [inspect.Parameter(name, keyword, default=default, annotation=kind) for name, (kind, default) in OWN.items()]
    for f in fields(Sampling):
        kind = AS_TEXT.get(f.name) or PLAIN[str(f.type)]
        empty = None if f.name in AS_TEXT or f.default is None else f.default
        annotation = Annotated[kind | None if empty is None else kind, typer.Option(help=_help(f))]  # type: ignore[valid-type]
        parameters.append(inspect.Parameter(f.name, keyword, default=empty, annotation=annotation))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _help(f: Any) -> str:
    shape = " (TOKEN=BIAS; repeat the flag)" if f.name == "logit_bias" else " (repeat the flag)" if f.name in AS_TEXT else ""
    return f.metadata["help"].capitalize() + shape + "."


def _biases(pairs: Sequence[str]) -> dict[int, float]:
    try:
        return {int(token): float(bias) for token, bias in (pair.split("=", 1) for pair in pairs)}
    except ValueError:
        raise BadOption(f"logit_bias={list(pairs)!r} must be TOKEN=BIAS, as in --logit-bias 42=-3.5.") from None


def given(own: dict[str, Any], unread: Sequence[str]) -> Given:
    """Sort a command's words. An unknown flag and its value land among the prompts, which take any number of words."""
    words = [*(own["prompt"] or []), *unread]
    start = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    own, more = {**own, "prompt": words[:start]}, extra(words[start:])
    return with_tuned(own, more) if own.get("tuned") else Given(own, more)


def with_tuned(own: dict[str, Any], more: dict[str, Any]) -> Given:
    """The method and options of a file that `forerun tune` wrote; flags that are given too win."""
    from forerun.evaluate.tune import read

    method, options = read(own["tuned"])
    if own["method"] not in (None, method):
        raise BadOption(f"tuned={own['tuned']!r} is for method={method!r}, not {own['method']!r}.")
    draft = own["draft"] or options.pop("draft", None)
    options.pop("draft", None)
    return Given({**own, "method": method, "draft": draft}, {**options, **more})


def extra(words: Sequence[str]) -> dict[str, Any]:
    """Flags that the command does not know, for the method to judge: --k 8 or --k=8, numbers read as numbers."""
    found: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise BadOption(f"{word!r} is not expected here: prompts come first, then options of the method, as in --k 8.")
        name, given, value = word[2:].partition("=")
        if not given:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        found[name.replace("-", "_")] = _value(value)
    return found


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
