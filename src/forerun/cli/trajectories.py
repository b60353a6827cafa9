"""`forerun trajectories`: collect Jacobi trajectories, say what is in them, and show one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from forerun.cli.generate import aside, read_prompts
from forerun.errors import BadOption
from forerun.parameters import check_whole

ACCEPTED, STATIONARY, EMERGING, WRONG = "green", "cyan", "magenta", "bright_black"


def collect(model: str, out: str, data: str | None, prompts: str | None, shape: dict[str, Any], as_json: bool) -> None:
    import torch

    from forerun.methods.jacobi import Jacobi
    from forerun.train.base import network_of
    from forerun.train.run import tokenizer_named
    from forerun.train.trajectories import collect as work

    for name in ("count", "given", "blocks"):
        check_whole(name, shape[name])
    Jacobi(block=shape["block"], start=shape["start"])
    network, tokenizer = network_of(model).eval(), tokenizer_named(model)
    longest = getattr(network.config, "max_position_embeddings", 0) or 0
    length = shape["given"] + shape["blocks"] * shape["block"]
    if 0 < longest < length:
        raise BadOption(
            f"given={shape['given']} and {shape['blocks']} blocks of {shape['block']} exceed the {longest} positions there are."
        )
    given = torch.from_numpy(prompt_ids(tokenizer, data, prompts, shape["count"], shape["given"]))
    share = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    with Progress(console=aside, transient=True) as progress:
        bar = progress.add_task("trajectories …", total=len(given))
        move: dict[str, Any] = dict(share=share, report=lambda done, total: progress.update(bar, completed=done, total=total))
        found = work(network, given, shape["blocks"], shape["block"], shape["start"], Path(out), **move)
    if found is not None:
        tell(found.facts(), as_json)


def prompt_ids(tokenizer: Any, data: str | None, prompts: str | None, count: int, given: int) -> np.ndarray:
    """[count, given]: the last tokens of every prompt of a file, or random windows of a corpus."""
    if prompts is None:
        from forerun.train.data import Corpus, documents

        tokens: list[int] = []
        for text, kept_back in documents(data):
            tokens += [] if kept_back else tokenizer(text, add_special_tokens=False).input_ids
            if len(tokens) > 4 * count * given:  # enough to choose from
                break
        if len(tokens) < 2 * given:
            raise BadOption(f"data={data!r} has {len(tokens)} tokens, too few for prompts of {given}.")
        return Corpus(np.array(tokens), np.array(tokens)).batch(0, count, given, 0).numpy()
    ids = [tokenizer(p).input_ids if isinstance(p, str) else list(p) for p in read_prompts(prompts)]
    long_enough = [i[-given:] for i in ids if len(i) >= given]
    if not long_enough:
        raise BadOption(
            f"--prompts {prompts!r}: no prompt has {given} tokens; the longest has {max(map(len, ids))}. Use a smaller --given."
        )
    if len(long_enough) < len(ids):
        aside.print(f"{len(ids) - len(long_enough)} prompts with fewer than {given} tokens were left out.", style="dim")
    return np.array(long_enough[:count])


def tell(facts: dict[str, float], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(facts))
        return
    for name, value in facts.items():
        typer.echo(f"{name:36} {value:,.3f}".rstrip("0").rstrip("."))


def show(folder: str, index: int, number: int, model: str, as_json: bool) -> None:
    """One block on its way to the fixed point, every iterate a line."""
    from forerun.train.run import tokenizer_named
    from forerun.train.trajectories import read_folder

    found = read_folder(Path(folder))
    blocks = found.states_SJL.shape[2] // found.block
    if not 0 <= index < len(found) or not 0 <= number < blocks:
        raise BadOption(f"index={index}, block={number}: there are {len(found)} sequences of {blocks} blocks, counted from 0.")
    states = found.states_SJL[index, :, number * found.block : (number + 1) * found.block]
    if as_json:
        typer.echo(json.dumps({"states": states.tolist()}))
        return
    tokenizer, console = tokenizer_named(model), Console()
    last = next(j for j in range(len(states)) if (states[j] == states[-1]).all())
    for step, state in enumerate(states[: last + 1].tolist()):
        line = Text(f"{step:3} ", "dim")
        for token, colour in zip(state, colours(state, states[-1].tolist())):
            line.append(tokenizer.decode([token]).replace("\n", "↵").replace(" ", "·"), colour)
        console.print(line)
    legend = Text()
    names = {"accepted": ACCEPTED, "right before its turn": STATIONARY, "right elsewhere": EMERGING, "wrong": WRONG}
    for name, colour in names.items():
        legend.append(f"{name}  ", colour)
    console.print(legend)
    tell(found.facts(), False)


def colours(state: list[int], final: list[int], least: int = 3) -> list[str]:
    """Figure 2 of the paper: accepted, right before its turn, part of a run that stands elsewhere in the fixed point, wrong."""
    first = next((i for i, (a, b) in enumerate(zip(state, final)) if a != b), len(state))
    runs = {tuple(final[i : i + least]) for i in range(len(final) - least + 1)}
    emerging = {j for i in range(first, len(state) - least + 1) if tuple(state[i : i + least]) in runs for j in range(i, i + least)}
    return [
        ACCEPTED if i < first else STATIONARY if state[i] == final[i] else EMERGING if i in emerging else WRONG
        for i in range(len(state))
    ]
