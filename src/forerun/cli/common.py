"""What several commands do: load a model, read prompts, show progress, print JSON."""

from __future__ import annotations

import json
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import Progress
from rich.status import Status
from rich.table import Table

from forerun.errors import BadOption

if TYPE_CHECKING:
    from forerun.api import Model
    from forerun.requests.jobs import Jobs
    from forerun.requests.model import Tokenizer
    from forerun.requests.result import Result

Message = dict[str, object]
Prompt = str | list[int]  # text or token ids

# The extra that brings each package which not everybody has.
EXTRAS = {
    "accelerate": "train",
    "gguf": "gguf",
    "fastapi": "serve",
    "lm_eval": "lm-eval",
    "matplotlib": "train",
    "peft": "lora",
    "prometheus_client": "serve",
    "ray": "ray",
    "scipy": "evaluate",
    "uvicorn": "serve",
    "yaml": "train",
}
LINE_BREAK = "\n"
TURNS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # they change the order of writing
SECONDS_BETWEEN_LINES = 10  # of progress, where no bar can be drawn
WIDEST = 10_000  # columns of a table that is only measured

stderr_console = Console(stderr=True)


@dataclass(frozen=True)
class Chat:
    """A prompt that is a chat."""

    messages: list[Message]


def load(
    name: str,
    *,
    device: str | None = None,
    dtype: str | None = None,
    lanes: int | None = None,
    max_context: int | None = None,
    quantize: str | None = None,
) -> Model:
    """Load a model, with a line on standard error meanwhile."""
    with Status(f"loading {name} …", console=stderr_console):
        import forerun

        return forerun.load(
            name,
            device=device,
            dtype=dtype,
            lanes=lanes,
            max_context=max_context,
            quantize=quantize,
        )


def given_or_default(model: str | None, default: str) -> str:
    """The model that was named, or a default, which is said."""
    if model is not None:
        return model
    what = ", a small model of Python code" if default.startswith("zoo:") else ""
    stderr_console.print(f"[dim]no --model given: using {default}{what}[/]")
    return default


def tokenizer_of(model: Model) -> Tokenizer:
    """The tokenizer of a model, for text that is cut into windows."""
    if model.tokenizer is None:
        raise BadOption(f"'{model.name}' has no tokenizer, which held-out text needs.")
    return model.tokenizer


@contextmanager
def progress_bar(task: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, to be called with what is done and what there is in all; where that
    is no terminal, a line now and then."""
    if not stderr_console.is_terminal:
        yield ProgressLines(task)
        return
    with Progress(console=stderr_console, transient=True) as progress:
        bar = progress.add_task(task, total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)


class ProgressLines:
    """Says how far a task is, at most every ten seconds."""

    def __init__(self, task: str):
        self._task = task
        self._last = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._last >= SECONDS_BETWEEN_LINES:
            self._last = now
            stderr_console.print(f"{self._task} {done} of {total}", highlight=False)


def print_json(value: object, *, ensure_ascii: bool = True) -> None:
    typer.echo(json.dumps(value, ensure_ascii=ensure_ascii))


def print_error(error: object) -> None:
    """Errors quote files and names, which may hold anything."""
    typer.secho(f"error: {printable(str(error), keep=LINE_BREAK)}", fg="red", err=True)


def print_table(table: Table, console: Console | None = None) -> None:
    """As wide as the terminal, but never so narrow that a word is cut or broken."""
    console = console or Console()
    unbounded = console.options.update(width=WIDEST)
    for column in table.columns:
        cells = [column.header, *column.cells]
        column.min_width = max(console.measure(cell, options=unbounded).minimum for cell in cells)
    least = console.measure(table, options=unbounded).minimum
    width = console.width
    console.width = max(width, least)
    console.print(table, crop=False)
    console.width = width


def printable(text: str, keep: str = "") -> str:
    """Text that cannot drive a terminal: characters that control it become escapes."""
    return "".join(
        each.encode("unicode_escape").decode() if each not in keep and _controls(each) else each
        for each in text
    )


def _controls(character: str) -> bool:
    return character in TURNS or unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")


def how_to_install(package: str) -> str | None:
    """What to say of a package of an extra that is not installed; None if it is of none."""
    extra = EXTRAS.get(package)
    return extra and f"this needs {package}: pip install 'forerun[{extra}]'."


def need(package: str) -> None:
    """Refuse to begin without a package of an extra."""
    if find_spec(package) is None:
        raise BadOption(how_to_install(package))


def check_picture(file: str | None) -> None:
    """Refuse a picture that cannot be drawn, before the work."""
    if file is None:
        return
    need("matplotlib")
    if Path(file).suffix.lower() not in (".png", ".svg", ".pdf", ".jpg"):
        raise BadOption(f"plot={file!r} must end in .png, .svg, .pdf or .jpg.")
    if not Path(file).resolve().parent.is_dir():
        raise BadOption(f"plot={file!r}: there is no folder {str(Path(file).parent)!r}.")


def check_writable(file: str | None) -> None:
    """Refuse a file that cannot be written, before the work."""
    if file:
        Path(file).open("a").close()


def prompts_or_code(file: str | None) -> list[Prompt]:
    """The prompts of a file, or our own pieces of code."""
    if file:
        return read_plain_prompts(file)
    from forerun.evaluate.prompts import CODE

    return [*CODE]


def read_plain_prompts(file: str) -> list[Prompt]:
    """The prompts of a file that has no chats in it."""
    plain: list[Prompt] = []
    for prompt in read_prompts(file):
        if isinstance(prompt, Chat):
            raise BadOption(
                f'--prompts {file!r} has "messages" in it: only `forerun generate` takes chats. '
                'Use "prompt".'
            )
        plain.append(prompt)
    return plain


def read_prompts(file: str) -> list[Prompt | Chat]:
    """One prompt a line; in a .jsonl file an object a line, with "prompt" (text or token ids) or
    "messages"."""
    path = Path(file)
    if not path.exists() or path.is_dir():
        raise BadOption(f"--prompts {file!r} is not a file.")
    lines = [
        (number, line)
        for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1)
        if line.strip()
    ]
    if not lines:
        raise BadOption(f"--prompts {file!r} is empty.")
    if path.suffix == ".jsonl":
        return [_prompt_of(file, number, line) for number, line in lines]
    return [line.removesuffix("\r") for _, line in lines]


def _prompt_of(file: str, number: int, line: str) -> Prompt | Chat:
    try:
        entry = json.loads(line)
        if "messages" not in entry:
            prompt: Prompt = entry["prompt"]
            return prompt
        messages = entry["messages"]
        are_objects = isinstance(messages, list) and all(isinstance(m, dict) for m in messages)
        if not messages or not are_objects:
            raise ValueError
        return Chat(messages)
    except (ValueError, KeyError, TypeError):
        raise BadOption(
            f'{file}:{number} must be a JSON object with "prompt", or with "messages", a list of '
            "objects."
        ) from None


class ResultFile:
    """Results as JSON lines, each written when its request is finished: with its index, and the
    prompt as it was given."""

    def __init__(self, file: str, given: Sequence[object]):
        self.file = Path(file)
        self.file.write_text("")
        self.given = given
        self._waiting = list(range(len(given)))

    def write_finished(self, jobs: Jobs, all_of_them: bool = False) -> None:
        """Write those that are over. `all_of_them` ends the others."""
        if all_of_them:
            jobs.cancel()
            jobs.wait()
        for index in list(self._waiting):
            request = jobs.requests[index]
            if all_of_them or all(job.over for job in request.jobs):
                self._waiting.remove(index)
                self._write(index, request.results())

    def _write(self, index: int, results: Sequence[Result]) -> None:
        given = self.given[index]
        asked = {"messages": given.messages} if isinstance(given, Chat) else {"prompt": given}
        with self.file.open("a", encoding="utf-8") as out:
            for sample, result in enumerate(results):
                numbers = {"index": index}
                if len(results) > 1:
                    numbers["sample"] = sample
                line = json.dumps({**numbers, **asked, **result.as_dict()}, ensure_ascii=False)
                out.write(line + "\n")


def exit_with(interrupted: bool, failed: bool) -> None:
    """End with exit code 130 if interrupted, with 1 if a request failed."""
    if interrupted:
        raise typer.Exit(130)
    if failed:
        raise typer.Exit(1)


def write_trace(file: str, results: list[Result], model: Model) -> None:
    """What was recorded of each result, one JSON object a line."""
    from forerun.requests.traces import trace_lines

    decode = partial(model.decode, special=True)
    with open(file, "w", encoding="utf-8") as out:
        for index, result in enumerate(results):
            for line in trace_lines(result, index, decode):
                out.write(json.dumps(line, ensure_ascii=False) + "\n")
