"""Teach a real checkpoint another way to decode, in so many seconds:

    PYTHONPATH=src python tools/train_real.py jacobi --model M --out FOLDER --prompts FILE
    PYTHONPATH=src python tools/train_real.py block --model M --out FOLDER --text FILE
    PYTHONPATH=src python tools/train_real.py any-subset --model M --out FOLDER --text FILE

The text is the model's own: `--text` is a file that an earlier run wrote (`text.npz`), else the
model writes it first, after the prompts. Given again, the same command goes on where it stopped.
The model goes to FOLDER/model, adapters (`--lora R`) to FOLDER/adapters, the curve to
FOLDER/curve.csv. Needs torch, transformers and NumPy (`--lora` peft too).
"""

from __future__ import annotations

import argparse
import time
from dataclasses import fields
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from forerun.train.any_subset import AnySubsetObjective
from forerun.train.block import BlockObjective
from forerun.train.data import Corpus, documents
from forerun.train.drafter import own_text, unused_token
from forerun.train.frozen import FrozenTarget
from forerun.train.lessons import AnswerSource, AnySubsetLesson, BlockLesson, JacobiLesson
from forerun.train.networks import load_network, load_tokenizer, move
from forerun.train.own_text import OwnText, TextOptions
from forerun.train.timed import TimedRecipe, TimedRun

BEGAN = time.perf_counter()
# What learns fastest, as far as tried: learning rate by kind, of all weights and of adapters.
RATES = {"jacobi": (5e-5, 5e-4), "block": (1e-4, 1e-3), "any-subset": (3e-4, 1e-3)}


def log(line: str) -> None:
    print(f"[{time.perf_counter() - BEGAN:6.1f}] {line}", flush=True)


def main() -> None:
    flags = parse()
    tokenizer = load_tokenizer(flags.model)
    text = read_text(flags, tokenizer)
    if flags.only_text:
        return
    network = load_network(flags.model)
    lesson = make_lesson(flags, text, tokenizer, network.config.vocab_size)
    rate = flags.learning_rate or RATES[flags.kind][flags.lora > 0]
    recipe = TimedRecipe(
        flags.seconds,
        batch=flags.batch,
        learning_rate=rate,
        lora=flags.lora,
        measure_every=flags.measure_every,
        save_every=flags.save_every,
        seed=flags.seed,
    )
    run = TimedRun(recipe, network, lesson, flags.out, log)
    trained = sum(weight.numel() for weight in run.weights)
    log(f"{flags.kind}: {trained / 1e6:.1f} M weights are trained, on {run.decoder.device}")
    run.train()
    run.write(tokenizer)
    log(f"written: {flags.out / 'model'}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kind", choices=RATES)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--text", type=Path, help="own text; without it OUT/text.npz")
    parser.add_argument("--only-text", action="store_true", help="write OUT/text.npz and stop")
    parser.add_argument("--prompts", help="a file of prompts, a JSON object a line")
    parser.add_argument("--data", help="any-subset: text beside its own, as forerun train reads it")
    parser.add_argument("--data-characters", type=float, default=2e7)
    parser.add_argument("--seconds", type=float, default=400.0, help="of training")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=384)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--lora", type=int, default=0)
    parser.add_argument("--measure-every", type=float, default=30.0)
    parser.add_argument("--save-every", type=float, default=120.0)
    parser.add_argument("--held-out", type=int, default=64, help="texts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--n", type=int, default=16, help="jacobi: tokens of a block")
    parser.add_argument("--own-weight", type=float, default=1.0, help="jacobi")
    parser.add_argument("--ages", type=int, default=6, help="jacobi: states taught of a text")
    parser.add_argument("--sizes", type=int, nargs="*", default=[8, 16, 32], help="block")
    parser.add_argument("--causal", type=float, default=0.5, help="block: share read so")
    for field in fields(TextOptions):
        kind = float if field.type == "float" else int
        flag = f"--text-{field.name}".replace("_", "-")
        parser.add_argument(flag, type=kind, default=None)
    return parser.parse_args()


def read_text(flags: argparse.Namespace, tokenizer) -> OwnText:
    """The model's own text: greedy answers to the prompts, unless the options say otherwise."""
    file = flags.text or flags.out / "text.npz"
    if file.exists():
        return OwnText.load(file)
    given = {f.name: getattr(flags, f"text_{f.name}") for f in fields(TextOptions)}
    wanted = dict(code=0.15, given=0.7 if flags.prompts else 0.0, greedy=1.0, texts=1024)
    options = TextOptions(**wanted | {k: v for k, v in given.items() if v is not None})
    network = load_network(flags.model)
    if torch.cuda.is_available():
        move(network, torch.device("cuda"), torch.bfloat16)
    file.parent.mkdir(parents=True, exist_ok=True)
    target = FrozenTarget(network, options.longest)
    return own_text(options, target, tokenizer, file, prompts=flags.prompts, log=log)


def make_lesson(flags: argparse.Namespace, text: OwnText, tokenizer, vocab: int):
    if flags.kind == "any-subset":
        objective = AnySubsetObjective(
            unused_token(tokenizer, vocab), masked=(0.05, 1.0), spans=0.5, ahead=0.3
        )
        corpus = read_corpus(flags, tokenizer)
        return AnySubsetLesson(
            text, corpus, objective, batch=flags.batch, length=flags.length, seed=flags.seed
        )
    source = AnswerSource(text, flags.length, flags.held_out, flags.seed)
    log(f"{len(source.spans):,} answers to learn from, {len(source.held)} held out")
    if flags.kind == "jacobi":
        blocks = max(1, (flags.length - 160) // flags.n)
        return JacobiLesson(
            source,
            flags.batch,
            n=flags.n,
            blocks=blocks,
            ages=flags.ages,
            own_weight=flags.own_weight,
        )
    objective = BlockObjective(
        unused_token(tokenizer, vocab),
        tuple(flags.sizes),
        rates=(0.1, 1.0),
        whole=0.2,
        ar=0.0,
        causal=flags.causal,
        shifted=True,
        complementary=True,
    )
    return BlockLesson(source, objective, flags.batch)


def read_corpus(flags: argparse.Namespace, tokenizer) -> Corpus | None:
    """Some of the documents of `--data`, kept as tokens in OUT/corpus.npz."""
    if flags.data is None:
        return None
    file = flags.out / "corpus.npz"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        kept: dict[bool, list] = {True: [], False: []}
        characters = 0
        for one, held_out in islice(documents(flags.data), 100_000):
            ids = tokenizer(one, add_special_tokens=False).input_ids
            kept[held_out].append(np.array([*ids, tokenizer.eos_token_id], np.int32))
            characters += len(one)
            if characters > flags.data_characters and kept[True]:
                break
        np.savez(file, train=np.concatenate(kept[False]), valid=np.concatenate(kept[True]))
        log(f"corpus: {characters:,} characters")
    arrays = np.load(file)
    return Corpus(arrays["train"], arrays["valid"])


if __name__ == "__main__":
    main()
