"""`forerun trajectories`: collect Jacobi trajectories, say what is in them, and show one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.text import Text

from forerun.cli.common import (
    Chat,
    print_json,
    progress_bar,
    read_plain_prompts,
    read_prompts,
    stderr_console,
)
from forerun.cli.flags import Json, Quiet, model_option, takes_flags
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
from forerun.options import check_whole

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from forerun.train.trajectories import TrajectoryPlan

ACCEPTED = "green"
STATIONARY = "cyan"
EMERGING = "magenta"
WRONG = "bright_black"
LEGEND = {
    "accepted": ACCEPTED,
    "right before its turn": STATIONARY,
    "right elsewhere": EMERGING,
    "wrong": WRONG,
}
SHORTEST_RUN = 3  # tokens of a run that stands elsewhere in the fixed point

app = typer.Typer(
    help="Collect Jacobi trajectories for consistency training, or look at one.",
    no_args_is_help=True,
    add_completion=False,
)


@dataclass(frozen=True)
class CollectFlags:
    out: Annotated[str, typer.Option(help="Folder for the files.")]
    model: Annotated[str, model_option("A left-to-right model.")] = "zoo:ar"
    data: Annotated[
        str | None,
        typer.Option(
            help="Prompts from a folder of .py files or a .jsonl[.xz]; default: what is installed."
        ),
    ] = None
    prompts: Annotated[
        str | None, typer.Option(help="Prompts from a file, as for generate, instead.")
    ] = None
    count: Annotated[int, typer.Option(help="How many prompts.")] = 512
    given: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 64
    blocks: Annotated[int, typer.Option(help="Blocks that are decoded after each.")] = 12
    block: Annotated[int, typer.Option(help="Tokens of a block.")] = 16
    start: Annotated[str, typer.Option(help="First guesses: repeat, text or random.")] = "repeat"
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Whole prompts of --prompts, of at most --given tokens, as user messages of the "
            "chat template; texts end with the model's end tokens.",
        ),
    ] = False
    ray: RayAddress = None
    workers: Workers = None
    threads: Threads = 1
    gpus: Gpus = None
    quiet: Quiet = False
    as_json: Json = False


@app.command("collect")
@takes_flags(CollectFlags)
def collect(flags: CollectFlags) -> None:
    """Decode prompts by Jacobi iteration and keep every iterate.

    Given again, the same command goes on where it stopped; with `torchrun` several processes share
    the work.
    """
    from forerun.methods.jacobi import JacobiOptions
    from forerun.train import trajectories
    from forerun.train.networks import load_network

    check_whole("count", flags.count)
    check_whole("given", flags.given)
    check_whole("blocks", flags.blocks)
    JacobiOptions(block=flags.block, start=flags.start)  # refuses what decoding would refuse
    prompts = _prompts(flags)
    plan = trajectories.TrajectoryPlan(flags.blocks, flags.block, flags.start, prompts.end_tokens)
    if is_scaled(flags):
        _collect_scaled(flags, prompts, plan)
        return
    network = load_network(flags.model).eval()
    _check_length(flags, network)
    share = (int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
    with progress_bar("trajectories …") as progress:
        found = trajectories.collect(
            network,
            prompts.tokens_SP,
            plan,
            Path(flags.out),
            pads_S=prompts.pads_S,
            share=share,
            report=progress,
        )
    if found is not None:
        print_facts(found.facts(), flags.as_json)


class Prompts(NamedTuple):
    """Prompts in rows of one length."""

    tokens_SP: Tensor
    pads_S: Tensor | None = None  # tokens before a shorter one that are nothing
    end_tokens: tuple[int, ...] = ()


def _prompts(flags: CollectFlags) -> Prompts:
    import torch

    from forerun.train.networks import load_tokenizer

    tokenizer = load_tokenizer(flags.model)
    if flags.chat:
        return chat_prompts(tokenizer, flags)
    return Prompts(torch.from_numpy(prompt_ids(tokenizer, flags)))


def chat_prompts(tokenizer: Any, flags: CollectFlags) -> Prompts:
    """Whole chats, as long as they are, at the end of rows that are as long as the longest."""
    import torch

    from forerun.train.instruct import as_rows, chat_ids, end_tokens

    if not flags.prompts:
        raise BadOption("--chat needs --prompts, a file of chats or of questions.")
    chats = [
        given.messages if isinstance(given, Chat) else [{"role": "user", "content": given}]
        for given in read_prompts(flags.prompts)
    ]
    ids = [chat_ids(tokenizer, messages) for messages in chats]
    short_enough = [tokens for tokens in ids if len(tokens) <= flags.given][: flags.count]
    if not short_enough:
        raise BadOption(
            f"--prompts {flags.prompts!r}: no chat has {flags.given} tokens or fewer; the shortest "
            f"has {min(map(len, ids))}. Use a larger --given."
        )
    if len(short_enough) < min(len(ids), flags.count):
        stderr_console.print(
            f"chats with more than {flags.given} tokens were left out.", style="dim"
        )
    tokens_SP, pads_S = as_rows(short_enough)
    ends = end_tokens(flags.model, tokenizer)
    return Prompts(torch.from_numpy(tokens_SP), torch.from_numpy(pads_S), ends)


def _collect_scaled(flags: CollectFlags, prompts: Prompts, plan: TrajectoryPlan) -> None:
    from forerun.scale.collecting import TrajectoryWorkers, collect_trajectories
    from forerun.train.trajectories import read_folder

    pool = make_pool(flags)
    with parts_bar("trajectories") as bar:
        collect_trajectories(
            TrajectoryWorkers(flags.model, plan),
            prompts.tokens_SP,
            Path(flags.out),
            pool,
            pads_S=prompts.pads_S,
            progress=bar,
        )
    print_facts(read_folder(Path(flags.out)).facts(), flags.as_json)


def _check_length(flags: CollectFlags, network: Any) -> None:
    longest = getattr(network.config, "max_position_embeddings", 0) or 0
    length = flags.given + flags.blocks * flags.block
    if 0 < longest < length:
        raise BadOption(
            f"given={flags.given} and {flags.blocks} blocks of {flags.block} exceed the {longest} "
            "positions there are."
        )


def prompt_ids(tokenizer: Any, flags: CollectFlags) -> np.ndarray:
    """[count, given]: the last tokens of every prompt of a file, or random windows of a corpus."""
    if flags.prompts is None:
        return _corpus_windows(tokenizer, flags)
    import numpy as np

    ids = [
        tokenizer(prompt).input_ids if isinstance(prompt, str) else list(prompt)
        for prompt in read_plain_prompts(flags.prompts)
    ]
    long_enough = [tokens[-flags.given :] for tokens in ids if len(tokens) >= flags.given]
    if not long_enough:
        raise BadOption(
            f"--prompts {flags.prompts!r}: no prompt has {flags.given} tokens; the longest has "
            f"{max(map(len, ids))}. Use a smaller --given."
        )
    left_out = len(ids) - len(long_enough)
    if left_out:
        stderr_console.print(
            f"{left_out} prompts with fewer than {flags.given} tokens were left out.", style="dim"
        )
    return np.array(long_enough[: flags.count])


def _corpus_windows(tokenizer: Any, flags: CollectFlags) -> np.ndarray:
    import numpy as np

    from forerun.train.data import Corpus, documents

    enough = 4 * flags.count * flags.given  # to choose from
    tokens: list[int] = []
    for text, held_out in documents(flags.data):
        if not held_out:
            tokens += tokenizer(text, add_special_tokens=False).input_ids
        if len(tokens) > enough:
            break
    if len(tokens) < 2 * flags.given:
        raise BadOption(
            f"data={flags.data!r} has {len(tokens)} tokens, too few for prompts of {flags.given}."
        )
    corpus = Corpus(np.array(tokens), np.array(tokens))
    return corpus.batch(0, flags.count, flags.given, 0).numpy()


def print_facts(facts: Mapping[str, float], as_json: bool) -> None:
    if as_json:
        print_json(facts)
        return
    for name, value in facts.items():
        typer.echo(f"{name:36} {value:,.3f}".rstrip("0").rstrip("."))


@app.command()
def show(
    folder: Annotated[str, typer.Argument(help="What `trajectories collect` wrote.")],
    index: Annotated[int, typer.Option(help="Which sequence, from 0.")] = 0,
    block: Annotated[int, typer.Option(help="Which of its blocks, from 0.")] = 0,
    model: Annotated[str, model_option("Whose tokens they are.")] = "zoo:ar",
    as_json: Json = False,
) -> None:
    """Show one block on its way to the fixed point, coloured, and statistics of all."""
    from forerun.train.networks import load_tokenizer
    from forerun.train.trajectories import read_folder

    found = read_folder(Path(folder))
    blocks = found.states_SJL.shape[2] // found.block
    if not 0 <= index < len(found) or not 0 <= block < blocks:
        raise BadOption(
            f"index={index}, block={block}: there are {len(found)} sequences of {blocks} blocks, "
            "counted from 0."
        )
    states = found.states_SJL[index, :, block * found.block : (block + 1) * found.block].tolist()
    if as_json:
        print_json({"states": states})
        return
    _print_states(states, load_tokenizer(model))
    print_facts(found.facts(), as_json=False)


def _print_states(states: Sequence[list[int]], tokenizer: Any) -> None:
    """Every iterate a line, up to the fixed point."""
    console = Console()
    final = states[-1]
    for step, state in enumerate(states[: states.index(final) + 1]):
        line = Text(f"{step:3} ", "dim")
        for token, colour in zip(state, colours(state, final), strict=True):
            line.append(str(tokenizer.decode([token])).replace("\n", "↵").replace(" ", "·"), colour)
        console.print(line)
    legend = Text()
    for name, colour in LEGEND.items():
        legend.append(f"{name}  ", colour)
    console.print(legend)


def colours(state: Sequence[int], final: Sequence[int]) -> list[str]:
    """Figure 2 of the paper: accepted, right before its turn, part of a run that stands elsewhere
    in the fixed point, wrong."""
    size = len(state)
    accepted = next((i for i in range(size) if state[i] != final[i]), size)
    starts = range(size - SHORTEST_RUN + 1)
    runs = {tuple(final[i : i + SHORTEST_RUN]) for i in starts}
    found = [WRONG] * size
    for i in starts[accepted:]:
        if tuple(state[i : i + SHORTEST_RUN]) in runs:
            found[i : i + SHORTEST_RUN] = [EMERGING] * SHORTEST_RUN
    for i in range(accepted, size):
        if state[i] == final[i]:
            found[i] = STATIONARY
    return [ACCEPTED] * accepted + found[accepted:]
