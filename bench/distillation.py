"""Progressive consistency distillation, like for like: the paper's recipe, CLLM with the same data
and weights, and ours, over three seeds.

    python bench/distillation.py pack DATA --tokens tokens.npz          # here; at most 40 MB
    python bench/distillation.py run --tokens tokens.npz --out FOLDER --minutes 6   # on a GPU
    python bench/distillation.py report FOLDER ...                      # here: table and figure

`run` needs torch, transformers and numpy alone. It does the runs in the order in which they matter,
writes FOLDER/results.json after each, and begins none that would not end within `--minutes`; run
again, it goes on. A copy of docs/distillation.json there saves what was run before. With
`--only-seed S` three processes can share a GPU and the folder. `report` adds to the docs' rows. All
recipes start from zoo:ar, and learn from the same trajectories with the same batches, steps and
learning rate.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from study import (
    Results,
    Row,
    add_run_flags,
    error_of,
    machines,
    merged,
    over_seeds,
    packed_corpus,
    rate_share,
    run_in_time,
    seeds_of,
)

import forerun
from forerun import zoo
from forerun.evaluate.judge import surprises
from forerun.requests.result import Result
from forerun.train.consistency import ConsistencyObjective, TrajectorySource, next_token_loss
from forerun.train.data import Corpus, documents
from forerun.train.networks import load_network
from forerun.train.trajectories import TrajectoryPlan, collect

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TEACHER = "zoo:ar"
MOST_TOKENS = 8_000_000  # that a packed file holds: 16 MB
BLOCK = 16
BLOCKS = 12
CONTEXT = 256
GIVEN = 64
PUBLISHED = 10.0 * BLOCKS  # weight of the AR loss beside the consistency loss: 10 T to 1

PAPER: dict[str, Any] = dict(
    schedule="progressive", context="noisy", own_weight=PUBLISHED, real_weight=0.0
)
OURS: dict[str, Any] = dict(
    schedule="progressive", context="clean", own_weight=1.0, real_weight=2.0
)
CLLM: dict[str, Any] = dict(schedule="random", context="clean")
# The paper's loss and CLLM's differ in schedule and context only; so do the pairs after them.
RECIPES: dict[str, dict[str, Any]] = {
    "paper": PAPER,
    "CLLM": PAPER | CLLM,
    "ours": OURS,
    "paper, own x 1": PAPER | {"own_weight": 1.0},
    "paper, clean context": PAPER | {"context": "clean"},
    "ours, noisy context": OURS | {"context": "noisy"},
    "ours, reverse schedule": OURS | {"schedule": "reverse"},
    "ours, random schedule": OURS | {"schedule": "random"},
    "CLLM, own x 1": PAPER | CLLM | {"own_weight": 1.0},
    "ours, own x 3": OURS | {"own_weight": 3.0},
    "ours, own x 10": OURS | {"own_weight": 10.0},
    # Table 5 proper, with a weight under which the paper's recipe learns
    "paper, own x 1, window context": PAPER | {"own_weight": 1.0, "context": "window"},
}
SECOND = "ours, second round"  # of a model that was distilled once

# K = 1 and K = 2 have the same number of recycled runs beside the draft.
WAYS: dict[str, dict[str, Any]] = {
    "n = 16": dict(method="jacobi", block=16),
    "n = 64": dict(method="jacobi", block=64),
    "K = 1": dict(method="multiblock", block=16, blocks=1, candidates=3),
    "K = 2": dict(method="multiblock", block=16, blocks=2, candidates=3),
    "lookup": dict(method="lookup"),
    "n = 128": dict(method="jacobi", block=128),
    "n = 256": dict(method="jacobi", block=256),
}


@dataclass
class Study:
    """What all runs share."""

    corpus: Corpus
    out: Path
    arguments: argparse.Namespace

    def __post_init__(self) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.judge = forerun.load(TEACHER, device=self.device.type, lanes=1)


def pack(data: str, file: Path) -> None:
    """The first documents of a corpus as token numbers, 16 bits each, until there are enough."""
    tokenizer = zoo.tokenizer()
    parts: dict[bool, list[np.ndarray]] = {False: [], True: []}
    room = {False: MOST_TOKENS, True: MOST_TOKENS // 20}
    for text, held_out in documents(data):
        if room[held_out] > 0:
            ids = tokenizer(text, add_special_tokens=False).input_ids
            parts[held_out].append(np.array([*ids, tokenizer.eos_token_id], np.uint16))
            room[held_out] -= len(ids) + 1
        if max(room.values()) <= 0:
            break
    train, valid = (np.concatenate(parts[kind]) for kind in (False, True))
    np.savez(file, train=train, valid=valid)
    print(f"{len(train)} tokens to train on, {len(valid)} held out, {file.stat().st_size} bytes")


def trajectories(study: Study, network: PreTrainedModel, folder: Path) -> TrajectorySource:
    """What a model writes after the corpus's prompts, with all states of its blocks."""
    given = CONTEXT - BLOCK * BLOCKS
    prompts_SP = study.corpus.batch(0, study.arguments.sequences, given, 0)
    found = collect(network, prompts_SP, TrajectoryPlan(BLOCKS, BLOCK, "random"), folder)
    assert found is not None, "one process collects them all"
    return TrajectorySource(study.corpus, found)


def distil(
    study: Study, source: TrajectorySource, options: dict[str, Any], seed: int, start: Path | str
) -> PreTrainedModel:
    """Train by one recipe. Batches are the same for all recipes of a seed."""
    arguments = study.arguments
    torch.manual_seed(seed)
    network = load(start).to(study.device).train()
    objective = ConsistencyObjective(block=BLOCK, blocks=BLOCKS, start="random", **options)
    optimiser = torch.optim.AdamW(network.parameters(), lr=arguments.rate, betas=(0.9, 0.95))
    for step in range(arguments.steps):
        for group in optimiser.param_groups:
            group["lr"] = arguments.rate * rate_share(step, arguments.steps)
        batch = source.batch(step, arguments.batch, CONTEXT, seed)
        parts = objective.prepare(batch, np.random.default_rng([seed, step]), step)
        with torch.autocast(study.device.type, torch.bfloat16, enabled=study.device.type == "cuda"):
            loss = objective.loss(network, *(part.to(study.device) for part in parts))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
    return network.eval()


def load(start: Path | str) -> PreTrainedModel:
    if isinstance(start, str):
        return load_network(start)
    network = load_network(TEACHER)
    network.load_state_dict(torch.load(start, map_location="cpu"))
    return network


@torch.no_grad()
def held_out_loss(network: PreTrainedModel, study: Study) -> float:
    windows_BL = study.corpus.held_out(64, CONTEXT).to(study.device)
    logits_BLV = network(windows_BL, use_cache=False).logits
    return float(next_token_loss(logits_BLV, windows_BL))


def measure(network: PreTrainedModel, study: Study) -> Row:
    """How fast each way decodes, and how good the text is that all of them write: by the teacher's
    loss, and by the held-out truth, which needs no judge."""
    found: Row = {"loss": held_out_loss(network, study)}
    count = study.arguments.prompts
    written = study.arguments.written
    windows = study.corpus.held_out(count, GIVEN + written).tolist()
    prompts = [window[:GIVEN] for window in windows]
    truths = [window[GIVEN:] for window in windows]
    model = forerun.from_network(
        network, zoo.tokenizer(), name="distilled", lanes=count, max_context=512
    )
    plain, found["seconds ar"] = decode(model, prompts, max_tokens=written, method="ar")
    for way, options in WAYS.items():
        results, found[f"seconds {way}"] = decode(model, prompts, max_tokens=written, **options)
        rates = [result.stats.tokens_per_forward for result in results]
        found[way] = float(np.mean(rates))
        found[f"{way} error"] = error_of(rates)
        found[f"{way} same"] = same_share(results, plain)
    nats = surprises(study.judge, [(p, r.token_ids) for p, r in zip(prompts, plain)])
    found["nats"] = float(np.mean(nats))
    found["nats error"] = error_of(nats)
    right = [
        np.mean([a == b for a, b in zip(r.token_ids[:8], truth)]) for r, truth in zip(plain, truths)
    ]
    found["true tokens of 8"] = float(np.mean(right))
    found["true tokens of 8 error"] = error_of(right)
    return found


def decode(
    model: forerun.Model, prompts: Sequence[list[int]], **options: Any
) -> tuple[list[Result], float]:
    began = time.perf_counter()
    results = model.generate_all(prompts, ignore_eos=True, **options)
    return results, time.perf_counter() - began


def same_share(results: Sequence[Result], plain: Sequence[Result]) -> float:
    return float(np.mean([a.token_ids == b.token_ids for a, b in zip(results, plain)]))


def run(arguments: argparse.Namespace) -> None:
    deadline = time.perf_counter() + 60 * arguments.minutes
    results = Results(arguments.out, arguments.only_seed)
    study = Study(packed_corpus(arguments.tokens), arguments.out, arguments)
    seeds = seeds_of(arguments)
    teacher = load_network(TEACHER).to(study.device).eval()
    if 0 in seeds and not results.done(TEACHER, 0):
        results.add({"recipe": TEACHER, "seed": 0, **measure(teacher, study)})
    # Processes that share the folder collect them each: the same, since nothing is drawn anew.
    name = "trajectories" if arguments.only_seed is None else f"trajectories.{seeds[0]}"
    source = trajectories(study, teacher, arguments.out / name)

    def run_one(recipe: str, seed: int) -> Row:
        if recipe == SECOND:
            return second_round(study, source, seed)
        return first_round(study, source, recipe, seed)

    run_in_time(results, order(seeds), deadline, run_one)


def order(seeds: Sequence[int]) -> list[tuple[str, int]]:
    """What matters most first: the three recipes over all seeds, then the rest."""
    first = [(recipe, seed) for seed in seeds for recipe in list(RECIPES)[:3]]
    rest = [(recipe, seed) for recipe in [*list(RECIPES)[3:], SECOND] for seed in seeds]
    return first + rest


def first_round(study: Study, source: TrajectorySource, recipe: str, seed: int) -> Row:
    began = time.perf_counter()
    network = distil(study, source, RECIPES[recipe], seed, TEACHER)
    if recipe == "ours":
        torch.save(network.state_dict(), once_file(study, seed))
    return row_of(study, recipe, seed, network, time.perf_counter() - began)


def second_round(study: Study, source: TrajectorySource, seed: int) -> Row:
    """From our model and its trajectories. It is trained again where an earlier run did not leave
    it here."""
    once = once_file(study, seed)
    if not once.exists():
        torch.save(distil(study, source, OURS, seed, TEACHER).state_dict(), once)
    began = time.perf_counter()
    student = load(once).to(study.device).eval()
    own = trajectories(study, student, study.out / f"trajectories.second.{seed}")
    network = distil(study, own, OURS, seed, once)
    return row_of(study, SECOND, seed, network, time.perf_counter() - began)


def once_file(study: Study, seed: int) -> Path:
    return study.out / f"ours.{seed}.pt"


def row_of(study: Study, recipe: str, seed: int, network: PreTrainedModel, seconds: float) -> Row:
    row: Row = {"recipe": recipe, "seed": seed, "steps": study.arguments.steps}
    row |= {**RECIPES.get(recipe, OURS), "seconds of training": seconds}
    return row | measure(network, study)


def report(folders: Sequence[Path]) -> None:
    """A table, and the figure: tokens per forward against loss. What the docs have stays, unless
    it was run again."""
    from page import DOCS, write_part

    rows = merged([DOCS / "distillation.json", *folders], [TEACHER, *RECIPES, SECOND])
    recipes = list(dict.fromkeys(row["recipe"] for row in rows))
    columns = ["loss", "nats", "true tokens of 8", *WAYS]
    lines = [f"| recipe | seeds | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    for recipe in recipes:
        seeds = [row for row in rows if row["recipe"] == recipe]
        cells = ["{:.2f} ± {:.2f}".format(*over_seeds(seeds, key)) for key in columns]
        lines.append(f"| {recipe} | {len(seeds)} | {' | '.join(cells)} |")
    page = DOCS / "consistency.md"
    lines += ["", f"`python bench/distillation.py run`: {machines(rows)}."]
    write_part(page, "\n".join(lines), "<!-- study -->", "<!-- end of study -->")
    (DOCS / "distillation.json").write_text(json.dumps(rows, indent=1))
    draw(rows, recipes, DOCS / "distillation.png")


def draw(rows: Sequence[Row], recipes: Sequence[str], file: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 5), layout="constrained", sharey=True)
    for axes, key, label in zip(panels, ("loss", "nats"), ("held-out loss", "loss under zoo:ar")):
        for recipe in recipes:
            seeds = [row for row in rows if row["recipe"] == recipe]
            x, x_error = over_seeds(seeds, key)
            y, y_error = over_seeds(seeds, "n = 16")
            axes.errorbar(x, y, y_error, x_error, "o", label=recipe)
        axes.set(xlabel=f"{label}, nats per token", ylabel="tokens per forward, n = 16")
    panels[1].legend(fontsize=7)
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("data")
    packing.add_argument("--tokens", type=Path, required=True)
    running = commands.add_parser("run")
    add_run_flags(running)
    running.add_argument("--steps", type=int, default=400)
    running.add_argument("--batch", type=int, default=64)
    running.add_argument("--rate", type=float, default=1e-3)
    running.add_argument("--sequences", type=int, default=4096)
    running.add_argument("--prompts", type=int, default=64)
    running.add_argument("--written", type=int, default=96, help="tokens after each prompt")
    reporting = commands.add_parser("report")
    reporting.add_argument("folders", type=Path, nargs="+")
    arguments = parser.parse_args()
    if arguments.command == "pack":
        pack(arguments.data, arguments.tokens)
    elif arguments.command == "run":
        run(arguments)
    else:
        report(arguments.folders)


if __name__ == "__main__":
    main()
