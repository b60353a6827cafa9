"""`forerun generate`: stream one prompt, or decode many with a progress bar."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from forerun.cli.common import (
    Chat,
    Message,
    Prompt,
    ResultFile,
    check_writable,
    exit_with,
    given_or_default,
    print_error,
    print_json,
    read_prompts,
    stderr_console,
    write_trace,
)
from forerun.cli.decoding import BatchFlags, DecodeCall, PromptCommand, takes_decode_call
from forerun.cli.flags import WITH_METHOD_OPTIONS
from forerun.cli.scaled import (
    Gpus,
    RayAddress,
    Threads,
    Workers,
    is_scaled,
    make_pool,
    parts_bar,
)
from forerun.errors import BadOption

if TYPE_CHECKING:
    from forerun.api import Model
    from forerun.requests.jobs import Jobs
    from forerun.requests.result import Result

DEFAULT_MODEL = "zoo:ar"

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class GenerateFlags(BatchFlags):
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Wrap each prompt as a user message of the chat template."),
    ] = False
    system: Annotated[str | None, typer.Option(help="With --chat: the system message.")] = None
    ray: RayAddress = None
    workers: Workers = None
    threads: Threads = 1
    gpus: Gpus = None
    batch: Annotated[
        int, typer.Option(help="With --workers or --ray: prompts that a worker takes at once.")
    ] = 64
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="With --workers or --ray: go on from what an earlier run answered."
        ),
    ] = False


Call = DecodeCall[GenerateFlags]


@app.command(cls=PromptCommand, context_settings=WITH_METHOD_OPTIONS)
@takes_decode_call(GenerateFlags)
def generate(call: Call) -> None:
    """Decode prompts.

    Options of the method are flags too: --k 8; see `forerun methods`.
    """
    from forerun.requests.request import parse_request

    flags = call.flags
    sampling = call.check_sampling()
    if flags.method not in (None, "auto") or flags.model is None:
        parse_request(flags.method or "auto", flags.draft, call.options)
    if is_scaled(flags):
        _generate_scaled(call)
        return
    prompts = _prompts(call)
    check_writable(flags.trace)
    check_writable(flags.output)
    model = call.load_model(DEFAULT_MODEL, flags.lanes)
    live = len(prompts) == 1 and sampling.n == 1 and not flags.as_json and not flags.output
    jobs = _submit(call, model, prompts, live)
    out = ResultFile(flags.output, prompts) if flags.output else None
    interrupted = False
    try:
        if live:
            _stream(jobs)
        else:
            _decode_all(jobs, out)
    except KeyboardInterrupt:
        interrupted = True
    if out is not None:
        out.write_finished(jobs, all_of_them=True)
    results = jobs.results()
    unbegun = 0
    for index, result in enumerate(results):
        if _has_not_begun(result) and not (live or flags.as_json):
            unbegun += 1
        else:
            _print(result, index, flags, live)
    if unbegun:
        print_error(f"interrupted: {unbegun} of {len(results)} requests had not begun.")
    if flags.trace:
        write_trace(flags.trace, results, model)
    exit_with(interrupted, any(result.error for result in results))


def _generate_scaled(call: Call) -> None:
    """A file of prompts, shared by several workers."""
    from forerun.scale.generating import GenerateJob, GeneratePlan, generate, read_entries
    from forerun.scale.journal import check_target
    from forerun.scale.loading import LoadPlan

    flags = call.flags
    if call.texts or not flags.prompts or not flags.output:
        raise BadOption("--workers and --ray take --prompts FILE and --output FILE, no other.")
    for name in ("trace", "as_json", "chat"):
        if getattr(flags, name):
            raise BadOption(f"--{name.removeprefix('as_')} does not go with --workers or --ray.")
    model = given_or_default(flags.model, DEFAULT_MODEL)
    load = LoadPlan(
        model, flags.device, flags.dtype, flags.lanes, flags.max_context, flags.quantize
    )
    plan = GeneratePlan(load, flags.method, flags.draft, call.options)
    read_entries(flags.prompts)  # a broken line shows before a cluster is joined
    check_target(flags.output, resume=flags.resume)
    pool = make_pool(flags)
    job = GenerateJob(plan, flags.prompts, flags.output, flags.batch, flags.threads)
    began = time.perf_counter()
    with parts_bar("generating") as progress:
        totals = generate(job, pool, resume=flags.resume, progress=progress)
    seconds = time.perf_counter() - began
    stderr_console.print(
        f"{totals.prompts} prompts, {totals.tokens} tokens in {seconds:.1f} s by {pool.workers} "
        f"workers ({totals.resumed} parts were there), {totals.errors} errors",
        style="dim",
        highlight=False,
    )
    exit_with(False, totals.errors > 0)


def _submit(call: Call, model: Model, prompts: Sequence[Prompt | Chat], live: bool) -> Jobs:
    """Queue the prompts, which are all plain or all chats. If `live`, there is one, and its text is
    made as tokens come."""
    flags = call.flags
    plain = [prompt for prompt in prompts if not isinstance(prompt, Chat)]
    chats = [prompt.messages for prompt in prompts if isinstance(prompt, Chat)]
    submit = partial(
        model.submit,
        method=flags.method,
        draft=flags.draft,
        streams=live,
        record=bool(flags.trace),
        **call.options,
    )
    if chats:
        return submit(messages=chats[0] if live else chats)
    return submit(prompt=plain[0] if live else plain)


def _prompts(call: Call) -> list[Prompt | Chat]:
    """The prompts of arguments, standard input and files."""
    flags = call.flags
    prompts: list[Prompt | Chat] = [
        sys.stdin.read() if text == "-" else text for text in call.texts
    ]
    if flags.prompts:
        prompts += read_prompts(flags.prompts)
    if not prompts:
        raise BadOption(
            "no prompt: give one as an argument, - for standard input, or --prompts FILE."
        )
    if flags.system and not flags.chat:
        raise BadOption("--system needs --chat.")
    if flags.chat:
        return [_as_chat(prompt, flags.system) for prompt in prompts]
    if len({isinstance(prompt, Chat) for prompt in prompts}) > 1:
        raise BadOption(
            "prompts mix plain text and chat messages: use --chat to make all of them chats."
        )
    return prompts


def _as_chat(prompt: Prompt | Chat, system: str | None) -> Chat:
    if isinstance(prompt, Chat):
        return prompt
    messages: list[Message] = [{"role": "user", "content": prompt}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return Chat(messages)


def _stream(jobs: Jobs) -> None:
    """Print the text of the only request as it is decided."""
    for _, piece in jobs:
        typer.echo(piece, nl=False)
    typer.echo()


def _decode_all(jobs: Jobs, out: ResultFile | None) -> None:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.completed}/{task.total} requests, {task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=stderr_console, transient=True) as progress:
        task = progress.add_task("", total=len(jobs), tokens=0)

        def show(finished: int, _: int) -> None:
            progress.update(task, completed=finished, tokens=jobs.tokens)
            if out is not None:
                out.write_finished(jobs)

        jobs.run(show)


def _has_not_begun(result: Result) -> bool:
    return result.finish_reason == "cancelled" and not result.token_ids


def _print(result: Result, index: int, flags: GenerateFlags, live: bool) -> None:
    """Print a result; if `live`, its text is printed already."""
    if flags.as_json:
        print_json(result.as_dict(), ensure_ascii=False)
        return
    if not live and not flags.output:
        stderr_console.rule(f"{index + 1}", align="left")
        typer.echo(result.text)
    elif live and result.finish_reason == "cancelled":
        typer.echo()
    if result.error is not None:
        print_error(f"{index + 1}: {result.error}" if not live else result.error)
    else:
        stderr_console.print(_summary(result), style="dim", highlight=False)


def _summary(result: Result) -> str:
    stats = result.stats
    drafts = f" + {stats.draft_forwards} draft" if stats.draft_forwards else ""
    return (
        f"{stats.tokens} tokens in {stats.forwards}{drafts} forwards "
        f"({stats.tokens_per_forward:.2f} per forward), "
        f"{stats.tokens_per_second:.1f} tokens/s, {result.finish_reason}; {result.promise}"
    )
