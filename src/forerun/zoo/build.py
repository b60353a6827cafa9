"""How the zoo is made: its tokenizer, and each model by its recipe. `forerun zoo train NAME`, or without the command line:

python -m forerun.zoo.build NAME --data corpus.jsonl.xz --out runs/NAME
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forerun import zoo
from forerun.train.data import documents, tokenise
from forerun.train.loop import train
from forerun.train.recipe import read
from forerun.zoo.storage import write

VOCAB = 4096
SPECIAL = ["<|end|>", "<|mask|>"]


def train_tokenizer(source: str | None, file: Path, vocab: int = VOCAB) -> None:
    """Byte-level BPE on the training documents; digits one by one, and indentation as tokens of its own."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    words = Regex(r" ?[A-Za-z_]+| ?[^\sA-Za-z_\d]+|\d|\n+[ \t]*|[ \t]+|\s")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator((text for text, held_out in documents(source) if not held_out), trainer)
    core.save(str(file))


def make(name: str, source: str | None, out: Path, report: Callable[[dict[str, Any]], None] = lambda row: None) -> Path:
    """Train one model of the zoo, stage by stage, and write its weights in the form that is shipped."""
    corpus = tokenise(source, zoo.tokenizer(), out.parent / "tokens.npz")
    network, done = None, 0
    for number, file in enumerate(zoo.stages(name), 1):
        recipe, before = read(file), done
        folder = out if number == 1 else out / f"stage{number}"
        move = lambda row, before=before: report({**row, "step": before + row["step"]})  # noqa: E731
        network, done = train(recipe, corpus, folder, network=network, report=move), before + recipe.steps
    write(out / f"{name}.safetensors", network)
    return out / f"{name}.safetensors"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", help=f"'tokenizer' or one of {', '.join(zoo.names())}")
    parser.add_argument("--data", help="a folder of .py files or a .jsonl[.xz] file; default: what is installed")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints, curve and weights")
    arguments = parser.parse_args()
    if arguments.name == "tokenizer":
        train_tokenizer(arguments.data, arguments.out)
    else:
        print(make(arguments.name, arguments.data, arguments.out, report=lambda row: print(row, flush=True)))


if __name__ == "__main__":
    main()
