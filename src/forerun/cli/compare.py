"""`forerun compare`: a table in the terminal, JSON, CSV, or one page of HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from forerun.cli.common import Prompt, load, print_json, progress_bar, prompts_or_code
from forerun.cli.compare_report import JUDGE, Report, as_html, show, write_csv
from forerun.cli.flags import (
    Batch,
    Json,
    MaxTokens,
    PromptFile,
    Quiet,
    Seed,
    Temperature,
    takes_flags,
)
from forerun.errors import BadOption, NotAble

if TYPE_CHECKING:
    from forerun.api import Model
    from forerun.evaluate.compare import Contestant
    from forerun.requests.model import Tokenizer

JUDGE_DRAFTER = "zoo:drafter"
LEAST_LANES = 8

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class CompareFlags:
    models: Annotated[
        list[str],
        typer.Option(
            "--model", "-m", help="Repeat the flag to compare several; 'zoo' is all embedded ones."
        ),
    ] = field(default_factory=lambda: ["zoo:ar"])
    methods: Annotated[
        str | None,
        typer.Option(help="Names with commas between them; default: all that the models can run."),
    ] = None
    draft: Annotated[
        str | None, typer.Option(help="A smaller model for the methods that draft with one.")
    ] = None
    prompts: PromptFile = None
    data: Annotated[
        str | None,
        typer.Option(
            help="Prompts from held-out text of a folder of .py files or a .jsonl[.xz], whose true "
            "ends are known."
        ),
    ] = None
    count: Annotated[int, typer.Option(help="With data: how many prompts.")] = 8
    given: Annotated[int, typer.Option(help="With data: tokens of each prompt.")] = 64
    max_tokens: MaxTokens = 64
    temperature: Temperature = 0.0
    rounds: Annotated[int, typer.Option(help="Turns that each method takes.")] = 3
    batch: Batch = 1
    seed: Seed = 0
    csv: Annotated[str | None, typer.Option(help="Write the rows to this file.")] = None
    html: Annotated[
        str | None, typer.Option(help="Write one self-contained page to this file.")
    ] = None
    quiet: Quiet = False
    as_json: Json = False


@app.command()
@takes_flags(CompareFlags)
def compare(flags: CompareFlags) -> None:
    """Run methods side by side: cost, speed, guarantee, and whether the output is right.

    Without --methods, every method that the models can run takes part.
    """
    report = _compared(flags)
    if flags.csv:
        write_csv(flags.csv, report.rows)
    if flags.html:
        Path(flags.html).write_text(as_html(report), encoding="utf-8")
    if flags.as_json:
        print_json(asdict(report))
    else:
        show(report, Console())


def _compared(flags: CompareFlags) -> Report:
    from forerun.evaluate.compare import ComparisonSettings
    from forerun.evaluate.compare import compare as run_in_turns
    from forerun.profile.machine import machine

    for name, value in (
        ("rounds", flags.rounds),
        ("batch", flags.batch),
        ("max_tokens", flags.max_tokens),
    ):
        if value < 1:
            raise BadOption(f"{name}={value} must be at least 1.")
    loaded = {name: load(name, lanes=max(LEAST_LANES, flags.batch)) for name in _names(flags)}
    prompts, truths = _prompts(flags, loaded)
    contestants = contestants_of(
        loaded, flags.methods.split(",") if flags.methods else None, flags.draft
    )
    settings = ComparisonSettings(
        max_tokens=flags.max_tokens,
        temperature=flags.temperature,
        rounds=flags.rounds,
        batch=flags.batch,
        seed=flags.seed,
    )
    judge = loaded.get(JUDGE) or load(JUDGE)
    with progress_bar("taking turns …") as progress:
        rows = run_in_turns(
            contestants, prompts, settings, judge=judge, truths=truths, progress=progress
        )
    return Report(machine=machine(), prompts=len(prompts), rows=rows, **asdict(settings))


def _names(flags: CompareFlags) -> list[str]:
    """The models to compare, with all embedded ones for 'zoo'."""
    names = []
    for given in flags.models:
        names += zoo_models() if given == "zoo" else [given]
    return names


def zoo_models() -> list[str]:
    """The embedded models that are targets; the drafter drafts for them."""
    from forerun import zoo

    return [f"zoo:{name}" for name in zoo.shipped() if name != "drafter"]


def contestants_of(
    loaded: Mapping[str, Model], methods: Sequence[str] | None, draft: str | None
) -> list[Contestant]:
    """Everything the models can run, or the methods named. The embedded models that fill blanks
    also draft for zoo:ar, and drafters that are shipped for the models they belong to."""
    from forerun.evaluate.compare import Contestant, contestants_for

    found: list[Contestant] = []
    for name, model in loaded.items():
        drafter = draft or (JUDGE_DRAFTER if name == JUDGE else None)
        fillers: list[str | Model] = []
        if draft is None:
            fillers = [*_own_drafter(model), *(_embedded_fillers(loaded) if name == JUDGE else [])]
        runnable = methods
        if methods is not None and fillers:
            runnable = [method for method in methods if method != "specdiff"]
        if runnable is not None and len(loaded) > 1:
            runnable = [method for method in runnable if _can_run(method, model, drafter)]
        if runnable is None or runnable:
            found += contestants_for(model, runnable, drafter)
        if methods is None or "specdiff" in methods:
            found += [Contestant(model, "specdiff", {"draft": filler}) for filler in fillers]
    for method in methods or []:
        if not any(contestant.method == method for contestant in found):
            raise NotAble(
                f"method={method!r}: none of {', '.join(loaded)} can run it, or it needs --draft."
            )
    return found


def _own_drafter(model: Model) -> list[str]:
    """As `draft=`, if a drafter that looks into such a model is shipped."""
    from forerun.checkpoints import drafters
    from forerun.drafters.features import AUTO
    from forerun.families.causal import Causal

    folders = drafters.shipped().values() if isinstance(model.family, Causal) else ()
    return [AUTO] if any(drafters.belongs(folder, model.backbone) for folder in folders) else []


def _embedded_fillers(loaded: Mapping[str, Model]) -> list[Model]:
    from forerun.families.base import BlankFiller

    return [
        model
        for model in loaded.values()
        if model.name.startswith("zoo:") and model.family.can(BlankFiller)
    ]


def _can_run(name: str, model: Model, draft: str | None) -> bool:
    """Whether a model has the capabilities that a method needs, and a drafter for it."""
    from forerun import registry

    method = registry.method_named(name)
    if not method.runs_on(model.family):
        return False
    if method.drafter is not None and method.drafter.startswith("diffusion"):
        return draft not in (None, JUDGE_DRAFTER)
    needs_draft = method.drafts and not method.drafts_itself and method.drafter is None
    return draft is not None or not needs_draft


def _prompts(
    flags: CompareFlags, loaded: Mapping[str, Model]
) -> tuple[Sequence[Prompt], list[list[int]] | None]:
    """Prompts; where they begin held-out text, also what really follows them."""
    if flags.data is None:
        return prompts_or_code(flags.prompts), None
    if flags.prompts:
        raise BadOption(
            f"prompts={flags.prompts!r} and data={flags.data!r} are both prompts: give one of them."
        )
    from forerun.train.data import held_out_windows

    tokenizer = _shared_tokenizer(loaded)
    length = flags.given + flags.max_tokens
    windows = held_out_windows(flags.data, tokenizer, flags.count, length)
    prompts: list[Prompt] = windows[:, : flags.given].tolist()
    return prompts, windows[:, flags.given :].tolist()


def _shared_tokenizer(loaded: Mapping[str, Model]) -> Tokenizer:
    tokenizers = {id(model.tokenizer): model.tokenizer for model in loaded.values()}
    first, *others = tokenizers.values()
    if first is None or any(
        other is None or other.get_vocab() != first.get_vocab() for other in others
    ):
        raise BadOption(
            "data= gives prompts in tokens, which all models must share: compare models with one "
            "tokenizer."
        )
    return first
