"""`forerun lm-eval …`: lm-evaluation-harness, with our models in it."""

from __future__ import annotations

import sys

import typer

from forerun.cli.common import need

app = typer.Typer(add_completion=False)

# Everything but --help goes to the harness.
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(context_settings=PASSED_ON)
def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness with Forerun's models and methods.

    All words go to the harness: forerun lm-eval --tasks gsm8k --model_args
    pretrained=zoo:ar,method=lookup. `forerun lm-eval run` shows its flags. Without --model, the
    model class is `forerun`. Its arguments: pretrained, method, draft, dtype, draws, seed, chain,
    check_greedy, and the method's own options.
    """
    need("lm_eval")
    import lm_eval.models  # noqa: F401 - registers the harness's own classes first
    from lm_eval.__main__ import cli_evaluate

    import forerun.evaluate.harness  # noqa: F401 - registers ours

    before = sys.argv
    sys.argv = ["forerun lm-eval", *with_model(context.args)]
    try:
        cli_evaluate()
    finally:
        sys.argv = before


def with_model(words: list[str]) -> list[str]:
    """The words with our class as their model, where they run something and name none."""
    runs = bool(words) and (words[0] == "run" or words[0].startswith("-"))
    named = any(word.partition("=")[0] in ("--model", "-M") for word in words)
    asks_help = words == ["run"]
    return words if not runs or named or asks_help else [*words, "--model", "forerun"]
