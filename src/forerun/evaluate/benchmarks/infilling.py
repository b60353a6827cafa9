"""HumanEval-Infilling (Bavarian et al., 2022, arXiv 2207.14255): a line, several lines or a random
span of a function are missing; does the whole pass its tests?

All four published sets have one format. Models that fill blanks get a hole of as many tokens as
stood there. Left-to-right models see the suffix if their tokenizer has tokens for filling in the
middle, else only what comes before: the left-context baseline. What they write is cut after as many
lines as are missing.
"""

from __future__ import annotations

from forerun.evaluate.benchmarks.base import (
    Answer,
    Benchmark,
    Data,
    Examiner,
    Fill,
    Item,
    Scores,
    find_file,
    read_objects,
)

FIELDS = ("prompt", "suffix", "canonical_solution", "test", "entry_point")


def read(data: Data) -> list[Item]:
    items = []
    for number, one in enumerate(read_objects(find_file(INFILLING, data.path), FIELDS)):
        truth = one["canonical_solution"]
        lines = truth.count("\n") + (not truth.endswith("\n"))
        name = str(one.get("task_id", number))
        # The line break at the end of a missing line is given.
        missing = truth.removesuffix("\n")
        suffix = truth[len(missing) :] + one["suffix"]
        facts = {
            "prefix": one["prompt"],
            "suffix": suffix,
            "truth": missing,
            "test": one["test"],
            "entry_point": one["entry_point"],
            "given": one["prompt"] + truth + one["suffix"],
        }
        ask = Fill(one["prompt"], missing, suffix, ("lines", max(lines, 1)), max_tokens=128)
        items.append(Item(name, ask, facts, name.partition("/")[0]))
    return items


def grade(item: Item, answer: Answer, examiner: Examiner) -> Scores:
    facts = item.facts
    program = answer.whole or facts["prefix"] + answer.text + facts["suffix"]
    passed = examiner.passes(program, facts["test"], facts["entry_point"], facts["given"])
    same = answer.text.strip() == facts["truth"].strip()
    return {"pass@1": float(passed), "exact match": float(same)}


INFILLING = Benchmark(
    name="humaneval-infilling",
    summary="a line, lines or a span of a function are missing: does the whole pass its tests?",
    source="HumanEval-SingleLineInfilling.jsonl, -MultiLine…, -RandomSpan… or -RandomSpan…Light of "
    "github openai/human-eval-infilling (MIT).",
    files=(
        "HumanEval-SingleLineInfilling.jsonl",
        "humaneval_infilling/HumanEval-SingleLineInfilling.jsonl",
    ),
    metric="pass@1",
    read=read,
    grade=grade,
    runs_code=True,
)
