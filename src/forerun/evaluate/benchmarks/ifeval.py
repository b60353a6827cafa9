"""IFEval (Zhou et al., 2023, arXiv 2311.07911): 541 prompts with instructions that a program can
check. `accuracy` is the share of prompts of which all instructions are followed (prompt-level
strict), `loose` forgives opening and closing lines and asterisks."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

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
from forerun.evaluate.benchmarks.instructions import (
    CHECKS,
    NEED_LANGUAGE,
    follows,
    follows_loosely,
)

FIELDS = ("prompt", "instruction_id_list", "kwargs")


def read(data: Data) -> list[Item]:
    items = []
    file = find_file(IFEVAL, data.path)
    for number, one in enumerate(read_objects(file, FIELDS)):
        for name in one["instruction_id_list"]:
            if name not in CHECKS:
                raise BadOption(f"{file}: entry {number + 1} has an unknown instruction {name!r}.")
        if find_spec("langdetect") is None and {*NEED_LANGUAGE} & {*one["instruction_id_list"]}:
            raise BadOption(
                f"{file}: entry {number + 1} asks for a language, and telling one needs "
                f"langdetect: pip install 'forerun[ifeval]'."
            )
        checks = list(zip(one["instruction_id_list"], one["kwargs"], strict=True))
        ask = Write(one["prompt"], user(one["prompt"]), max_tokens=1280)
        items.append(Item(str(one.get("key", number)), ask, {"checks": checks}))
    return items


def grade(item: Item, answer: Answer, examiner: Examiner) -> Scores:
    checks = [(name, arguments or {}) for name, arguments in item.facts["checks"]]
    strict = [follows(*check, answer.text) for check in checks]
    loose = [follows_loosely(*check, answer.text) for check in checks]
    return {
        "accuracy": float(all(strict)),
        "loose": float(all(loose)),
        "followed": float(sum(strict)),
        "instructions": float(len(strict)),
    }


def combine(scores: Sequence[Scores]) -> Scores:
    asked = sum(one["instructions"] for one in scores)
    return {"of instructions": sum(one["followed"] for one in scores) / asked}


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
