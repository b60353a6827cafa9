"""How the zoo is made: its tokenizer, and each model by its recipe.

`forerun zoo train NAME` does it with a progress bar. Without the command line:

python -m forerun.train.zoo NAME --data corpus.jsonl.xz --out runs/NAME
python -m forerun.train.zoo tokenizer --data corpus.jsonl.xz --out tokenizer.json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from forerun import zoo
from forerun.train.curve import ProgressRow, Report
from forerun.train.data import documents, tokenise
from forerun.train.loop import train
from forerun.train.recipe import read
from forerun.zoo.storage import write_weights

VOCAB = 4096
SPECIAL = ["<|end|>", "<|mask|>"]


def train_tokenizer(source: str | None, file: Path, vocab: int = VOCAB) -> None:
    """Byte-level BPE on the training documents. Every digit is a token, and so is indentation."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    words = Regex(r" ?[A-Za-z_]+| ?[^\sA-Za-z_\d]+|\d|\n+[ \t]*|[ \t]+|\s")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    training_texts = (text for text, held_out in documents(source) if not held_out)
    core.train_from_iterator(training_texts, trainer)
    core.save(str(file))


def make(name: str, source: str | None, out: Path, report: Report = lambda row: None) -> Path:
    """Train one model of the zoo, stage by stage, and write its weights as they are shipped."""
    corpus = tokenise(source, zoo.tokenizer(), out.parent / "tokens.npz")
    network = None
    steps_before = 0
    for number, file in enumerate(zoo.stages(name), 1):
        recipe = read(file)
        folder = out if number == 1 else out / f"stage{number}"
        stage_report = _counting_from(steps_before, report)
        network = train(recipe, corpus, folder, network=network, report=stage_report)
        steps_before += recipe.steps
    assert network is not None, "every model has a recipe"
    weights = out / f"{name}.safetensors"
    write_weights(weights, network)
    return weights


def _counting_from(steps_before: int, report: Report) -> Report:
    """A report of one stage that counts the steps of the stages before it."""

    def shifted(row: ProgressRow) -> None:
        report({**row, "step": steps_before + row["step"]})

    return shifted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", help=f"'tokenizer' or one of {', '.join(zoo.names())}")
    parser.add_argument(
        "--data", help="a folder of .py files or a .jsonl[.xz] file; default: what is installed"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for checkpoints, curve and weights"
    )
    arguments = parser.parse_args()
    if arguments.name == "tokenizer":
        train_tokenizer(arguments.data, arguments.out)
        return
    file = make(arguments.name, arguments.data, arguments.out, _write_line)
    _write_line(file)


def _write_line(what: object) -> None:
    """To standard output, where a machine without a terminal's libraries is watched."""
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
