"""`forerun infill`: fill the holes of texts."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from forerun.cli.common import (
    ResultFile,
    check_writable,
    exit_with,
    print_error,
    print_json,
    stderr_console,
    write_trace,
)
from forerun.cli.decoding import BatchFlags, DecodeCall, PromptCommand, read_file, takes_decode_call
from forerun.cli.flags import WITH_METHOD_OPTIONS
from forerun.errors import BadOption

if TYPE_CHECKING:
    from forerun.requests.infill import Infilled
    from forerun.requests.jobs import Jobs

DEFAULT_MODEL = "zoo:any-subset"
EDITOR_KEYS = ("prefix", "suffix", "max_tokens")

TextWithHoles = str | dict[str, object]  # with markers, or prefix, suffix and max_tokens

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class InfillFlags(BatchFlags):
    hole: Annotated[
        list[str] | None,
        typer.Option(
            help="What a hole must hold: regex=EXPRESSION, choices=A,B or a JSON list, "
            "schema=FILE, or any; once for each hole."
        ),
    ] = None


# A hole says how long it is, and all of it is filled; what it holds is no matter of an engine.
WITHOUT = ("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "grammar_engine")


@app.command(cls=PromptCommand, context_settings=WITH_METHOD_OPTIONS)
@takes_decode_call(InfillFlags, WITHOUT)
def infill(call: DecodeCall[InfillFlags]) -> None:
    """Fill the holes of texts.

    <|fill:8|> is a hole of eight tokens, <|fill:4-12|> one of four to twelve. --regex, --choices or
    --schema say what every hole must hold, --hole says it one by one. Options of the method are
    flags too: --k 8; see `forerun methods`.
    """
    from forerun.requests import infill as infilling

    flags = call.flags
    texts = _texts(call)
    holes = [_hole(words) for words in flags.hole] if flags.hole else None
    if len(texts) == 1:
        # a single bad text is refused before a model is loaded; one of several fails alone
        template = infilling.parse_text(texts[0])
        if holes is None and "choices" not in call.options:  # choices say how long they are
            template.lengths()
    check_writable(flags.trace)
    check_writable(flags.output)
    model = call.load_model(DEFAULT_MODEL, flags.lanes)
    jobs = model.submit_infill(
        texts,
        method=flags.method,
        draft=flags.draft,
        holes=holes,
        record=bool(flags.trace),
        **call.options,
    )
    out = ResultFile(flags.output, texts) if flags.output else None
    interrupted = _decode_all(jobs, out)
    if out is not None:
        out.write_finished(jobs, all_of_them=True)
    results = jobs.results_by_request()
    for index, best in enumerate(results):
        for result in best:
            assert isinstance(result, infilling.Infilled), "of `submit_infill`"
            _print(result, index, flags, alone=len(texts) == 1)
    flat = [result for best in results for result in best]
    if flags.trace:
        write_trace(flags.trace, flat, model)
    exit_with(interrupted, any(result.error is not None for result in flat))


def _hole(words: str) -> dict[str, object] | None:
    """What one hole must hold."""
    if words == "any":
        return None
    kind, equals, value = words.partition("=")
    if not equals or kind not in ("regex", "choices", "schema"):
        raise BadOption(
            f"--hole {words!r} must be regex=EXPRESSION, choices=A,B, schema=FILE or any."
        )
    if kind == "schema":
        return {kind: read_file("hole schema=", value)}
    if kind == "choices":
        return {kind: _choices(value)}
    return {kind: value}


def _choices(value: str) -> list[str]:
    if not value.startswith("["):
        return value.split(",")
    try:
        return list(json.loads(value))
    except ValueError:
        raise BadOption(f"--hole choices={value} is not a JSON list.") from None


def _texts(call: DecodeCall[InfillFlags]) -> list[TextWithHoles]:
    texts: list[TextWithHoles] = [sys.stdin.read() if text == "-" else text for text in call.texts]
    if call.flags.prompts:
        texts += read_texts(call.flags.prompts)
    if not texts:
        raise BadOption(
            "no text: give one with <|fill:N|> in it as an argument, - for standard input, or "
            "--prompts FILE."
        )
    return texts


def read_texts(file: str) -> list[TextWithHoles]:
    """JSON lines with "text", or with "prefix", "suffix" and "max_tokens". Any other file is one
    text."""
    path = Path(file)
    if not path.is_file():
        raise BadOption(f"--prompts {file!r} is not a file.")
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise BadOption(f"--prompts {file!r} is not UTF-8 text.") from None
    if path.suffix != ".jsonl":
        return [content]
    lines = enumerate(content.split("\n"), 1)
    return [_text_of(file, number, line) for number, line in lines if line.strip()]


def _text_of(file: str, number: int, line: str) -> TextWithHoles:
    try:
        entry = json.loads(line)
        whole: TextWithHoles | None = entry.get("text", entry.get("prompt"))
        return {key: entry[key] for key in EDITOR_KEYS} if whole is None else whole
    except (ValueError, KeyError, TypeError, AttributeError):
        wanted = '"text", or with "prefix", "suffix" and "max_tokens"'
        raise BadOption(f"{file}:{number} must be a JSON object with {wanted}.") from None


def _decode_all(jobs: Jobs, out: ResultFile | None) -> bool:
    """Decode with a progress bar. Whether it was interrupted; what there is by then is kept."""
    try:
        with Progress(console=stderr_console, transient=True) as progress:
            task = progress.add_task("filling …", total=jobs.blanks)

            def show(*_: int) -> None:
                progress.update(task, completed=jobs.tokens)
                if out is not None:
                    out.write_finished(jobs)

            jobs.run(show)
    except KeyboardInterrupt:
        return True
    return False


def _print(result: Infilled, index: int, flags: BatchFlags, alone: bool) -> None:
    if flags.as_json:
        print_json({"request": index, **result.as_dict()}, ensure_ascii=False)
        return
    if not alone:
        stderr_console.rule(f"{index + 1}", align="left")
    if result.error is not None:
        print_error(result.error if alone else f"{index + 1}: {result.error}")
        return
    if not flags.output:
        Console().print(picture(result), highlight=False, soft_wrap=True)
    stderr_console.print(_summary(result), style="dim", highlight=False)


def _summary(result: Infilled) -> str:
    stats = result.stats
    logprob = None if result.logprob is None else round(result.logprob, 2)
    return (
        f"{stats.tokens} tokens in {stats.forwards} forwards ({stats.tokens_per_forward:.2f} per "
        f"forward), {stats.tokens_per_second:.1f} tokens/s; log-probability {logprob}; "
        f"{result.promise}"
    )


def picture(result: Infilled) -> Text:
    """The whole text, with what was filled in coloured."""
    text = Text(result.given[0])
    for fill, given in zip(result.fills, result.given[1:], strict=True):
        text.append(fill, "black on green").append(given)
    return text
