"""The command line: `forerun COMMAND`.

`forerun.cli.NAME` is the module of command NAME, with _ for -. It has `app`, a Typer application
with the command or its sub-commands. Its flags stand beside the code that uses them: as parameters,
or, where they are many, as the fields of a dataclass. These modules import torch inside functions
only, so that help comes at once.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand
from typer.main import get_command

from forerun.errors import ForerunError

# Each command and the first line of its help, so that `forerun --help` imports none of them.
COMMANDS = {
    "generate": "Decode prompts.",
    "infill": "Fill the holes of texts.",
    "serve": "Serve models over HTTP, in OpenAI's interface, and a page at /.",
    "show": "Open a page that shows decoding as it happens.",
    "chat": "Chat with a model in the terminal.",
    "certify": "Prove that the output of a method has the law of its reference.",
    "compare": "Run methods side by side: cost, speed, guarantee, and whether the output is right.",
    "evaluate": "Measure quality and cost of methods on standard benchmarks.",
    "lm-eval": "Run lm-evaluation-harness with Forerun's models and methods.",
    "train": "Train a model by a recipe.",
    "plan": "Say how many GPUs a load needs and what a million tokens cost, by method.",
    "tune": "Find the fastest options of a method on this machine.",
    "analyse": "Show what limits a method on a model, and how a model decodes.",
    "models": "List the models that can be loaded, and which are here already.",
    "methods": "List the decoding methods, what each promises and which options it has.",
    "doctor": "Show versions, devices, memory, and what can run here.",
    "trace": "Show a trace: every token, coloured by the reason it was committed.",
    "bench": "Measure where the time of a forward, or of decoding, goes.",
    "trajectories": "Collect Jacobi trajectories for consistency training, or look at one.",
    "samples": "Have a teacher write the text that distillation by a recipe needs.",
    "zoo": "List the embedded models, read their cards, train them again.",
}

app = typer.Typer(
    name="forerun",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from forerun import __version__

        typer.echo(f"forerun {__version__}")
        raise typer.Exit


@app.callback()
def forerun(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Decode language models many tokens at a time, and prove that the output is the model's
    own."""


def module_of(command: str) -> str:
    """Where a command is."""
    return f"forerun.cli.{command.replace('-', '_')}"


class LazyCommand(TyperCommand):
    """A name and a line of help, until its words are parsed: then its module takes over."""

    def make_context(self, *words: Any, **settings: Any) -> Any:  # typer keeps their types private
        module = import_module(module_of(str(self.name)))
        return get_command(module.app).make_context(*words, **settings)


for name, line in COMMANDS.items():
    app.command(name, cls=LazyCommand, help=line)(lambda: None)


def _fail(words: object) -> NoReturn:
    from forerun.cli.common import print_error

    print_error(words)
    sys.exit(2)


def main() -> None:
    """Run the command line. A caller's mistake is one line and exit code 2, never a traceback."""
    # a package that cannot be used, say: one line, without the line of ours that warns
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        app()
    except (ForerunError, OSError, UnicodeDecodeError) as error:
        _fail(error)
    except ModuleNotFoundError as error:
        from forerun.cli.common import how_to_install

        advice = how_to_install(error.name or "")
        if advice is None:
            raise
        _fail(advice)
    except SystemExit as ending:
        if ending.code == 130:
            typer.secho("interrupted", fg="yellow", err=True)
        raise
