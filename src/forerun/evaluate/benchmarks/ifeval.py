"""IFEval (Zhou et al., 2023, arXiv 2311.07911): 541 prompts with instructions that a program can
check. `accuracy` is the share of prompts of which all instructions are followed (prompt-level
strict), `loose` forgives opening and closing lines and asterisks."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.errors import BadOption
from forerun.evaluate.benchmarks.base import (
    Answer,
    Benchmark,
    Data,
    Examiner,
    Item,
    Scores,
    Write,
    find_file,
    read_objects,
    user,
)
from forerun.evaluate.benchmarks.instructions import CHECKS, Unchecked, follows, follows_loosely

FIELDS = ("prompt", "instruction_id_list", "kwargs")


def read(data: Data) -> list[Item]:
    items = []
    file = find_file(IFEVAL, data.path)
    for number, one in enumerate(read_objects(file, FIELDS)):
        for name in one["instruction_id_list"]:
            if name not in CHECKS:
                raise BadOption(f"{file}: entry {number + 1} has an unknown instruction {name!r}.")
        checks = list(zip(one["instruction_id_list"], one["kwargs"], strict=True))
        ask = Write(one["prompt"], user(one["prompt"]), max_tokens=1280)
        items.append(Item(str(one.get("key", number)), ask, {"checks": checks}))
    return items


def grade(item: Item, answer: Answer, examiner: Examiner) -> Scores:
    strict = []
    loose = []
    for name, arguments in item.facts["checks"]:
        try:
            strict.append(follows(name, arguments or {}, answer.text))
            loose.append(follows_loosely(name, arguments or {}, answer.text))
        except Unchecked:
            continue
    return {
        "accuracy": float(all(strict)),
        "loose": float(all(loose)),
        "followed": float(sum(strict)),
        "checked": float(len(strict)),
        "unchecked": float(len(item.facts["checks"]) - len(strict)),
    }


def combine(scores: Sequence[Scores]) -> Scores:
    checked = sum(one["checked"] for one in scores)
    followed = sum(one["followed"] for one in scores)
    return {"of instructions": 100 * followed / checked if checked else 0.0}


IFEVAL = Benchmark(
    name="ifeval",
    summary="541 prompts with instructions that a program can check: are all followed?",
    source="input_data.jsonl of github google-research/google-research, "
    "instruction_following_eval/data (Apache-2.0).",
    files=("input_data.jsonl", "ifeval.jsonl"),
    metric="accuracy",
    read=read,
    grade=grade,
    combine=combine,
)
