"""`forerun infill`: fill the holes of texts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from forerun import infilling
from forerun.cli.flags import Given
from forerun.cli.generate import aside, load, write_trace
from forerun.errors import BadOption

DEFAULT_MODEL = "zoo:any-subset"


def run(given: Given) -> None:
    own = given.own
    texts = _texts(own)
    if own["chat"] or own["system"]:
        raise BadOption("--chat and --system have no meaning for infilling: a text with holes is taken as it is.")
    if len(texts) == 1:
        infilling.read(texts[0]).lengths()  # what is wrong with it shows before a model is loaded; of several it fails alone
    if own["trace"]:
        open(own["trace"], "a").close()  # a place that cannot be written shows now, not after the work
    if own["model"] is None:
        aside.print(f"[dim]no --model given: using {DEFAULT_MODEL}, a small model of Python code[/]")
    model = load(own["model"] or DEFAULT_MODEL, **{k: own[k] for k in ("device", "dtype", "lanes", "max_context")})
    requests, _ = model.submit_infill(texts, method=own["method"], draft=own["draft"], **given.options())
    interrupted = _serve(model, requests)
    found = [(i, r) for i, one in enumerate(requests) for r in (one.results() if hasattr(one, "jobs") else [one])]
    for index, result in found:
        _print(result, index, own["json"], alone=len(requests) == 1)
    if own["trace"]:
        write_trace(own["trace"], [result for _, result in found], model)
    if interrupted or any(result.error is not None for _, result in found):
        raise typer.Exit(130 if interrupted else 1)


def _texts(own: dict[str, Any]) -> list[Any]:
    texts: list[Any] = [sys.stdin.read() if text == "-" else _unescaped(text) for text in own["prompt"] or []]
    if own["prompts"]:
        texts += read_texts(own["prompts"])
    if not texts:
        raise BadOption("no text: give one with <|fill:N|> in it as an argument, - for standard input, or --prompts FILE.")
    return texts


def _unescaped(text: str) -> str:
    """A shell leaves \\n as it is; in an argument that has no line break of its own it means one."""
    return text if "\n" in text else text.replace("\\n", "\n").replace("\\t", "\t")


def read_texts(file: str) -> list[Any]:
    """JSON lines with "text", or with "prefix", "suffix" and "max_tokens"; of any other file, the whole of it is one text."""
    path = Path(file)
    if not path.is_file():
        raise BadOption(f"--prompts {file!r} is not a file.")
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise BadOption(f"--prompts {file!r} is not UTF-8 text.") from None
    if path.suffix != ".jsonl":
        return [content]
    found = []
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            try:
                entry = json.loads(line)
                whole = entry.get("text", entry.get("prompt"))
                found.append(whole if whole is not None else {k: entry[k] for k in ("prefix", "suffix", "max_tokens")})
            except (ValueError, KeyError, TypeError, AttributeError):
                wanted = '"text", or with "prefix", "suffix" and "max_tokens"'
                raise BadOption(f"{file}:{number} must be a JSON object with {wanted}.") from None
    return found


def _serve(model: Any, requests: list[Any]) -> bool:
    """Decode with a progress bar. Interrupted, it keeps what there is."""
    jobs = [job for request in requests for job in getattr(request, "jobs", ())]
    try:
        with Progress(console=aside, transient=True) as progress:
            task = progress.add_task("filling …", total=sum(len(job.seq.blanks) for job in jobs))
            while model.engine.busy:
                model.engine.step()
                progress.update(task, completed=sum(job.seq.history.generated for job in jobs))
    except KeyboardInterrupt:
        for job in jobs:
            model.engine.cancel(job.ticket)
        return True
    return False


def _print(result: Any, index: int, as_json: bool, alone: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"request": index, **result.as_dict()}, ensure_ascii=False))
        return
    if not alone:
        aside.rule(f"{index + 1}", align="left")
    if result.error is not None:
        aside.print(f"[red]error:[/] {result.error}", highlight=False)
        return
    Console().print(picture(result), highlight=False, soft_wrap=True)
    s = result.stats
    aside.print(
        f"{s.tokens} tokens in {s.forwards} forwards ({s.tokens_per_forward:.2f} per forward), {s.tokens_per_second:.1f} tokens/s; "
        f"log-probability {result.logprob if result.logprob is None else round(result.logprob, 2)}; "
        f"{result.guarantee}, reference: {result.reference}",
        style="dim",
        highlight=False,
    )


def picture(result: Any) -> Text:
    """The whole text, what was filled in coloured."""
    text = Text(result.given[0])
    for fill, given in zip(result.fills, result.given[1:], strict=True):
        text.append(fill, "black on green").append(given)
    return text
