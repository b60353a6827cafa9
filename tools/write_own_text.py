"""Own text of a model that continues code, written by the engine: on a CPU several times as fast as
by `tools/train_drafter.py`, which takes it from its folder:

    python tools/write_own_text.py --model zoo:ar --prompts FILE --out FOLDER/text.npz --seconds 600

Lines of the file are {"text": beginning}. Most texts are greedy, the others drawn at temperature 1.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

import forerun
from forerun.train.own_text import ANSWER, BEGINS, CODE, GREEDY, OwnText

AT_ONCE = 64  # texts that are asked for together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--greedy", type=float, default=0.85, help="share of texts")
    parser.add_argument("--tokens", type=int, default=128, help="most of an answer")
    parser.add_argument("--lanes", type=int, default=32)
    flags = parser.parse_args()
    prompts = [json.loads(line)["text"] for line in flags.prompts.open()]
    random.Random(0).shuffle(prompts)
    began = time.perf_counter()
    tokens: list[int] = []
    marks: list[int] = []
    with forerun.load(flags.model, lanes=flags.lanes, max_context=512) as model:
        for number in range(0, len(prompts), AT_ONCE):
            some = [model.encode(prompt) for prompt in prompts[number : number + AT_ONCE]]
            for given, answer, kind in written(model, some, number, flags):
                tokens += [*given, *answer]
                marks += [BEGINS, *[0] * (len(given) - 1), *[ANSWER | kind] * len(answer)]
            seconds = time.perf_counter() - began
            if number // AT_ONCE % 20 == 0:
                print(f"{seconds:.0f} s: {len(tokens):,} tokens", flush=True)
            if seconds > flags.seconds:
                break
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    OwnText(np.array(tokens, np.int32), np.array(marks, np.uint8)).save(flags.out)
    print(f"{flags.out}: {len(tokens):,} tokens, {sum(m & ANSWER for m in marks):,} of answers")


def written(
    model: forerun.Model, prompts: Sequence[list[int]], seed: int, flags: argparse.Namespace
) -> Iterator[tuple[list[int], list[int], int]]:
    """(prompt, answer, marks) of each; the first ones are greedy."""
    count = round(flags.greedy * len(prompts))
    for some, temperature, kind in ((prompts[:count], 0.0, GREEDY), (prompts[count:], 1.0, 0)):
        results = model.generate(
            some, method="ar", max_tokens=flags.tokens, temperature=temperature, seed=seed
        )
        for given, result in zip(some, results):
            if len(result.token_ids) > 2:
                yield given, result.token_ids, kind | CODE


if __name__ == "__main__":
    main()
