"""`forerun generate`: stream one prompt, or decode many with a progress bar."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.status import Status

from forerun.cli.flags import Given
from forerun.errors import BadOption
from forerun.parameters import Sampling

aside = Console(stderr=True)


def run(given: Given) -> None:
    from forerun.arguments import read_wish

    own, options = given.own, given.options()
    Sampling(**{key: value for key, value in options.items() if key in Sampling.names()})  # before the model is loaded
    if own["method"] or own["model"] is None:
        read_wish(own["method"] or "ar", own["draft"], options)
    prompts = _prompts(own)
    if own["trace"]:
        Path(own["trace"]).open("a").close()  # a place that cannot be written shows now, not after the work
    model = load(own["model"], device=own["device"], dtype=own["dtype"], lanes=own["lanes"], max_context=own["max_context"])
    live = len(prompts) == 1 and options.get("n", 1) == 1 and not own["json"]
    spoken = "messages" if own["chat"] or _is_chat(prompts[0]) else "prompt"
    asked: Any = {spoken: prompts[0] if live else prompts}
    jobs = model.submit(**asked, method=own["method"], draft=own["draft"], text=live, **options)
    interrupted = False
    try:
        _serve(jobs, live)
    except KeyboardInterrupt:
        interrupted = True
    results = jobs.results()
    _print(results, own["json"], live)
    if own["trace"]:
        write_trace(own["trace"], results, model)
    if interrupted or any(result.error for result in results):
        raise typer.Exit(130 if interrupted else 1)


def check_picture(file: str | None) -> None:
    """Whether a picture can be drawn into a file shows before the work."""
    if file is None:
        return
    if find_spec("matplotlib") is None:
        raise BadOption("--plot needs matplotlib: pip install matplotlib.")
    if Path(file).suffix.lower() not in (".png", ".svg", ".pdf", ".jpg"):
        raise BadOption(f"plot={file!r} must end in .png, .svg, .pdf or .jpg.")
    if not Path(file).resolve().parent.is_dir():
        raise BadOption(f"plot={file!r}: there is no folder {str(Path(file).parent)!r}.")


def load(name: str | None, **how: Any) -> Any:
    """Load a model with something to look at meanwhile. Without a name, the zoo's left-to-right model."""
    if name is None:
        name = "zoo:ar"
        aside.print("[dim]no --model given: using zoo:ar, a small model of Python code[/]")
    with Status(f"loading {name} …", console=aside):
        import forerun

        return forerun.load(name, **how)


def _prompts(own: dict[str, Any]) -> list[Any]:
    """The prompts of arguments, standard input and files; in a chat, lists of messages."""
    texts: list[Any] = [sys.stdin.read() if text == "-" else text for text in own["prompt"] or []]
    if own["prompts"]:
        texts += read_prompts(own["prompts"])
    if not texts:
        raise BadOption("no prompt: give one as an argument, - for standard input, or --prompts FILE.")
    if own["system"] and not own["chat"]:
        raise BadOption("--system needs --chat.")
    if own["chat"]:
        system = [{"role": "system", "content": own["system"]}] if own["system"] else []
        return [text if _is_chat(text) else [*system, {"role": "user", "content": text}] for text in texts]
    if len({_is_chat(text) for text in texts}) > 1:
        raise BadOption("prompts mix plain text and chat messages: use --chat to make all of them chats.")
    return texts


def read_prompts(file: str) -> list[Any]:
    """One prompt a line; in a .jsonl file an object a line, with "prompt" (text or token ids) or "messages"."""
    path = Path(file)
    if not path.exists() or path.is_dir():
        raise BadOption(f"--prompts {file!r} is not a file.")
    lines = [(number, line) for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1) if line.strip()]
    if not lines:
        raise BadOption(f"--prompts {file!r} is empty.")
    return [_entry(file, number, line) if path.suffix == ".jsonl" else line.removesuffix("\r") for number, line in lines]


def _entry(file: str, number: int, line: str) -> Any:
    try:
        entry = json.loads(line)
        found = entry["messages"] if "messages" in entry else entry["prompt"]
        if "messages" in entry and not (isinstance(found, list) and found and all(isinstance(m, dict) for m in found)):
            raise ValueError
        return found
    except (ValueError, KeyError, TypeError):
        raise BadOption(f'{file}:{number} must be a JSON object with "prompt", or with "messages", a list of objects.') from None


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)


def _serve(jobs: Any, live: bool) -> None:
    if live:
        for _, piece in jobs:
            typer.echo(piece, nl=False)
        typer.echo()
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.completed}/{task.total} requests, {task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=aside, transient=True) as progress:
        task = progress.add_task("", total=len(jobs.jobs), tokens=0)
        while jobs.finished < len(jobs.jobs):
            jobs.engine.step()
            progress.update(task, completed=jobs.finished, tokens=jobs.tokens)


def _print(results: list[Any], as_json: bool, live: bool) -> None:
    for index, result in enumerate(results):
        if as_json:
            typer.echo(json.dumps(result.as_dict(), ensure_ascii=False))
            continue
        if not live:
            aside.rule(f"{index + 1}", align="left")
            typer.echo(result.text)
        elif result.finish_reason == "cancelled":
            typer.echo()
        if result.error is not None:
            aside.print(f"[red]error:[/] {result.error}", highlight=False)
        else:
            aside.print(_summary(result), style="dim", highlight=False)


def _summary(result: Any) -> str:
    s = result.stats
    drafts = f" + {s.draft_forwards} draft" if s.draft_forwards else ""
    return (
        f"{s.tokens} tokens in {s.forwards}{drafts} forwards ({s.tokens_per_forward:.2f} per forward), "
        f"{s.tokens_per_second:.1f} tokens/s, {result.finish_reason}; {result.guarantee}, reference: {result.reference}"
    )


def write_trace(file: str, results: list[Any], model: Any) -> None:
    from forerun.jobs import trace_lines

    with open(file, "w", encoding="utf-8") as out:
        for index, result in enumerate(results):
            for line in trace_lines(result, index, model.decode):
                out.write(json.dumps(line, ensure_ascii=False) + "\n")
