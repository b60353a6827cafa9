"""The command line: arguments in, results out. One small file per command, imported when it is called."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from forerun.cli import flags

app = typer.Typer(
    name="forerun",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Decode language models many tokens at a time, and prove that the output is the model's own.",
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@flags.with_sampling
def generate(ctx: typer.Context, **given: object) -> None:
    """Decode prompts. Options of the method are flags too: --k 8; see `forerun methods`."""
    from forerun.cli.generate import run

    run(flags.given(dict(given), ctx.args))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@flags.with_sampling
def infill(ctx: typer.Context, **given: object) -> None:
    """Fill the holes of texts: <|fill:8|> is a hole of eight tokens, <|fill:4-12|> one of four to twelve."""
    from forerun.cli.infill import run

    run(flags.given(dict(given), ctx.args))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def certify(
    ctx: typer.Context,
    method: Annotated[str, typer.Option(help="The method to certify.")],
    model: Annotated[str | None, typer.Option(help="Test on this model; without one, enumerate on table models.")] = None,
    draft: Annotated[str | None, typer.Option(help="The drafter: a smaller model, or 'lookup'.")] = None,
    temperature: Annotated[float, typer.Option(help="0 compares tokens, above 0 laws.")] = 1.0,
    alpha: Annotated[float, typer.Option(help="Most probability of refuting a right method.")] = 0.01,
    beta: Annotated[float, typer.Option(help="Most probability of missing any of the named faults.")] = 0.05,
    max_tokens: Annotated[int, typer.Option(help="Tokens per sequence.")] = 32,
    max_sequences: Annotated[int, typer.Option(help="Stop undecided after this many sequences.")] = 400,
    seed: Annotated[int, typer.Option(help="Of the sequences and of the shadow runs.")] = 0,
    device: flags.Device = None,
    dtype: flags.Dtype = None,
    json: Json = False,
) -> None:
    """Prove that a method's output has its reference's law: exactly on table models, or by a sequential test on a real one."""
    from forerun.cli.certify import run

    tested = dict(temperature=temperature, alpha=alpha, beta=beta, max_tokens=max_tokens, max_sequences=max_sequences, seed=seed)
    run(method, model, draft, tested, flags.extra(ctx.args), dict(device=device, dtype=dtype), json)


@app.command()
def compare(
    models: Annotated[
        list[str], typer.Option("--model", "-m", help="Repeat the flag to compare several; 'zoo' is all embedded ones.")
    ] = ["zoo:ar"],  # noqa: B006
    methods: Annotated[
        str | None, typer.Option(help="Names with commas between them; default: all that the models can run.")
    ] = None,
    draft: Annotated[str | None, typer.Option(help="A smaller model for the methods that draft with one.")] = None,
    prompts: Annotated[str | None, typer.Option(help="A file, as for generate; default: six pieces of code.")] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Prompts from held-out text of a folder of .py files or a .jsonl[.xz], whose true ends are known."),
    ] = None,
    count: Annotated[int, typer.Option(help="With data: how many prompts.")] = 8,
    given: Annotated[int, typer.Option(help="With data: tokens of each prompt.")] = 64,
    max_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    rounds: Annotated[int, typer.Option(help="Turns that each method takes.")] = 3,
    batch: Annotated[int, typer.Option(help="Prompts decoded together.")] = 1,
    seed: Annotated[int, typer.Option(help="Same seed, same output.")] = 0,
    csv: Annotated[str | None, typer.Option(help="Write the rows to this file.")] = None,
    html: Annotated[str | None, typer.Option(help="Write one self-contained page to this file.")] = None,
    json: Json = False,
) -> None:
    """Every method that the models can run, side by side: cost, speed, guarantee, and whether the output is right."""
    from forerun.cli.compare import run

    how = dict(max_tokens=max_tokens, temperature=temperature, rounds=rounds, batch=batch, seed=seed)
    held_out = dict(data=data, count=count, given=given)
    run(models, methods, draft, prompts, held_out, how, dict(csv=csv, html=html, json=json))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def evaluate(
    ctx: typer.Context,
    task: Annotated[str, typer.Argument(help="scattered, stories, humaneval or functions.")],
    method: Annotated[
        list[str] | None, typer.Option("--method", help="METHOD or METHOD:DRAFT; repeat the flag. Default: by the model's kind.")
    ] = None,
    model: Annotated[
        str, typer.Option("--model", "-m", help="The model: one that fills holes, but for functions.")
    ] = "zoo:any-subset",
    data: Annotated[
        str | None, typer.Option(help="The task's file; for scattered: a folder of .py files or a .jsonl[.xz].")
    ] = None,
    count: Annotated[int | None, typer.Option(help="Use this many sequences, stories or programs.")] = None,
    known: Annotated[float, typer.Option(help="scattered: share of tokens that is given.")] = 0.3,
    length: Annotated[int, typer.Option(help="scattered: tokens per sequence.")] = 256,
    judge: Annotated[str, typer.Option(help="scattered: a left-to-right model with the same tokens, or none.")] = "zoo:ar",
    missing: Annotated[int, typer.Option(help="stories: sentences that are missing, 1 or 3.")] = 1,
    trials: Annotated[int, typer.Option(help="stories, humaneval, functions: completions of each.")] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    batch: Annotated[int, typer.Option(help="Sequences decoded together.")] = 1,
    seed: Annotated[int, typer.Option(help="Same seed, same output.")] = 0,
    json: Json = False,
) -> None:
    """Quality beside cost on a task, for every way to decode, with standard errors and p-values against the first."""
    from forerun.cli.evaluate import run

    how = dict(data=data, count=count, known=known, length=length, judge=judge, missing=missing, trials=trials)
    run(task, model, method, flags.extra(ctx.args), {**how, "temperature": temperature, "batch": batch, "seed": seed}, json)


@app.command()
def train(
    objective: Annotated[str, typer.Argument(help="ar, any-subset, masked, block, distil-drafter, distil-block or consistency.")],
    config: Annotated[str, typer.Option(help="The recipe, a YAML file.")],
    out: Annotated[str, typer.Option(help="Folder for checkpoints, the curve and the model.")],
    data: Annotated[
        str | None, typer.Option(help="A folder of .py files or a .jsonl[.xz] file; default: what is installed.")
    ] = None,
    start: Annotated[str | None, typer.Option(help="Begin from this checkpoint instead of the recipe's.")] = None,
    steps: Annotated[int | None, typer.Option(help="Train for this many steps instead of the recipe's.")] = None,
) -> None:
    """Train a model by a recipe. Given again, the same command goes on where it stopped."""
    from forerun.cli.train import run

    run(objective, config, data, out, start, steps)


@app.command()
def tune(
    method: Annotated[str, typer.Argument(help="specdiff, or jacobi (multi-block decoding with recycling).")],
    model: Annotated[str, typer.Option("--model", "-m", help="The target.")] = "zoo:ar",
    draft: Annotated[str | None, typer.Option(help="specdiff: the model that drafts.")] = None,
    prompts: Annotated[str | None, typer.Option(help="A file, as for generate; default: six pieces of code.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 48,
    temperature: Annotated[float, typer.Option(help="specdiff: above 0 the drafter's own temperature is fitted too.")] = 0.0,
    rounds: Annotated[int, typer.Option(help="Turns per setting; the median counts.")] = 1,
    out: Annotated[str | None, typer.Option(help="Write what was found to this file, for --tuned.")] = None,
    plot: Annotated[str | None, typer.Option(help="Draw what was measured into this PNG file.")] = None,
    json: Json = False,
) -> None:
    """Find the fastest options on this machine: costs and acceptance are measured, the choice is checked by running it."""
    from forerun.cli.tune import run

    how = dict(max_tokens=max_tokens, temperature=temperature, rounds=rounds)
    run(method, model, draft, prompts, how, dict(file=out, plot=plot, json=json))


@app.command()
def analyse(
    analysis: Annotated[
        str,
        typer.Argument(
            help="ssd-limit: how much better drafts could make SSD; ar-ness: how nearly from left to right a block model decodes, "
            "and how sure it is; estimators: how well acceptance is foreseen; frontier: what speed costs in quality."
        ),
    ],
    model: Annotated[str | None, typer.Option("--model", "-m", help="Default: zoo:masked for ssd-limit, else zoo:block.")] = None,
    prompts: Annotated[str | None, typer.Option(help="A file, as for generate; default: six pieces of code.")] = None,
    block: Annotated[int | None, typer.Option(help="Tokens per block; default: 8 for ssd-limit, else 16.")] = None,
    cache: Annotated[str, typer.Option(help="ssd-limit: none, prefix or dual.")] = "none",
    max_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 decides on the likeliest token.")] = 0.0,
    data: Annotated[
        str | None,
        typer.Option(help="frontier: held-out text of a folder of .py files or a .jsonl[.xz]; default: what is installed."),
    ] = None,
    count: Annotated[int, typer.Option(help="frontier: completions.")] = 16,
    judge: Annotated[str, typer.Option(help="frontier: a left-to-right model with the same tokens.")] = "zoo:ar",
    plot: Annotated[str | None, typer.Option(help="Also draw it into this file (ar-ness, frontier).")] = None,
    json: Json = False,
) -> None:
    """What limits a method on a model, and how a model decodes."""
    from forerun.cli.analyse import run

    how = dict(block=block, max_tokens=max_tokens, temperature=temperature)
    run(analysis, model, prompts, how, dict(cache=cache, data=data, count=count, judge=judge, plot=plot), json)


bench = typer.Typer(help="Where time goes: of one forward, against what the machine could do; of decoding.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.command("forward")
def bench_forward(
    shape: Annotated[str, typer.Option(help="A shape with random weights: zoo, smollm2-135m, qwen2.5-7b …")] = "zoo",
    model: Annotated[str | None, typer.Option("--model", "-m", help="A model instead of a shape.")] = None,
    tokens: Annotated[str, typer.Option(help="Rows per sequence, with commas between them.")] = "1,2,4,8,16,32,64,128,256,512",
    batch: Annotated[str, typer.Option(help="Sequences, with commas between them.")] = "1,8,32",
    context: Annotated[str, typer.Option(help="Tokens in slots already, with commas between them.")] = "128,1024,8192",
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Default: float32 on a CPU, bfloat16 on cuda.")] = None,
    turns: Annotated[int, typer.Option(help="Timed runs of each forward.")] = 5,
    plot: Annotated[str | None, typer.Option(help="Also draw the curve into this file.")] = None,
    json: Json = False,
) -> None:
    """Seconds of a forward by tokens, batch and context, as multiples of the time that reading and arithmetic must take here."""
    from forerun.cli.bench import forward

    forward(shape, model, dict(tokens=tokens, batch=batch, context=context), device, dtype, turns, plot, json)


@bench.command("decode")
def bench_decode(
    model: Annotated[str, typer.Option("--model", "-m", help="A model.")] = "zoo:ar",
    methods: Annotated[
        str | None, typer.Option(help="Names with commas between them; default: all that need no draft model.")
    ] = None,
    prompts: Annotated[str | None, typer.Option(help="A file, as for generate; default: six pieces of code.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 64,
    batch: Annotated[int, typer.Option(help="Prompts decoded together.")] = 1,
    turns: Annotated[int, typer.Option(help="Turns that each method takes.")] = 3,
    json: Json = False,
) -> None:
    """Time whole methods, and split it into forward, rules, host and idle."""
    from forerun.cli.bench import decode

    decode(model, methods, prompts, dict(max_tokens=max_tokens, batch=batch, turns=turns), json)


trajectories = typer.Typer(help="Jacobi trajectories: collect them for consistency training, look at one.", no_args_is_help=True)
app.add_typer(trajectories, name="trajectories")


@trajectories.command("collect")
def trajectories_collect(
    out: Annotated[str, typer.Option(help="Folder for the files.")],
    model: Annotated[str, typer.Option("--model", "-m", help="A left-to-right model.")] = "zoo:ar",
    data: Annotated[
        str | None, typer.Option(help="Prompts from a folder of .py files or a .jsonl[.xz]; default: what is installed.")
    ] = None,
    prompts: Annotated[str | None, typer.Option(help="Prompts from a file, as for generate, instead.")] = None,
    count: Annotated[int, typer.Option(help="How many prompts.")] = 512,
    given: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 64,
    blocks: Annotated[int, typer.Option(help="Blocks that are decoded after each.")] = 12,
    block: Annotated[int, typer.Option(help="Tokens of a block.")] = 16,
    start: Annotated[str, typer.Option(help="First guesses: repeat, text or random.")] = "repeat",
    json: Json = False,
) -> None:
    """Decode prompts by Jacobi iteration and keep every iterate. Given again, the same command goes on where it stopped; with
    `torchrun` several processes share the work."""
    from forerun.cli.trajectories import collect

    collect(model, out, data, prompts, dict(count=count, given=given, blocks=blocks, block=block, start=start), json)


@trajectories.command("show")
def trajectories_show(
    folder: Annotated[str, typer.Argument(help="What `trajectories collect` wrote.")],
    index: Annotated[int, typer.Option(help="Which sequence, from 0.")] = 0,
    block: Annotated[int, typer.Option(help="Which of its blocks, from 0.")] = 0,
    model: Annotated[str, typer.Option("--model", "-m", help="Whose tokens they are.")] = "zoo:ar",
    json: Json = False,
) -> None:
    """One block on its way to the fixed point, coloured, and statistics of all."""
    from forerun.cli.trajectories import show

    show(folder, index, block, model, json)


@app.command()
def models(json: Json = False) -> None:
    """What can be loaded, and what is here already."""
    from forerun.cli.lists import models as run

    run(json)


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="Show one method with its options.")] = None, json: Json = False
) -> None:
    """The decoding methods, what each promises and which options it has."""
    from forerun.cli.lists import methods as run

    run(name, json)


@app.command()
def doctor(
    model: Annotated[str | None, typer.Option(help="Also load this model and say how many lanes fit.")] = None, json: Json = False
) -> None:
    """Versions, devices, memory, and what can run here."""
    from forerun.cli.doctor import run

    run(model, json)


@app.command()
def trace(
    file: Annotated[str, typer.Argument(help="A trace that `forerun generate --trace FILE` wrote.")],
    svg: Annotated[str | None, typer.Option(help="Also draw it into this SVG file.")] = None,
    json: Json = False,
) -> None:
    """Show a trace in the terminal, every token coloured by the reason it was committed."""
    from forerun.cli.trace import run

    run(file, svg, json)


zoo = typer.Typer(help="The embedded models: list them, read their cards, train them again.", no_args_is_help=True)
app.add_typer(zoo, name="zoo")


@zoo.command("show")
def zoo_show(name: Annotated[str | None, typer.Argument(help="Show this model's card.")] = None, json: Json = False) -> None:
    """List the embedded models, or show the card of one."""
    from forerun.cli.zoo import show

    show(name, json)


@zoo.command("train")
def zoo_train(
    name: Annotated[str, typer.Argument(help="A model that has a recipe.")],
    out: Annotated[str, typer.Option(help="Folder for the checkpoint, the curve and the weights.")],
    data: Annotated[
        str | None, typer.Option(help="A folder of .py files or a .jsonl[.xz] file; default: what is installed.")
    ] = None,
) -> None:
    """Train a model of the zoo by its recipe. Given again, the same command goes on where it stopped."""
    from forerun.cli.zoo import train

    train(name, data, out)


def main() -> None:
    """Run the command line. A caller's mistake is one line and exit code 2, never a traceback."""
    from forerun.errors import ForerunError

    try:
        app()
    except (ForerunError, OSError, UnicodeDecodeError) as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        sys.exit(2)
    except SystemExit as ending:
        if ending.code == 130:
            typer.secho("interrupted", fg="yellow", err=True)
        raise
