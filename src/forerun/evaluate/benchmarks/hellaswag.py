"""HellaSwag (Zellers et al., 2019, arXiv 1905.07830): which of four endings is likeliest?

Texts are cleaned and joined as in lm-evaluation-harness's `hellaswag`. `accuracy` compares
log-probabilities divided by the endings' lengths in characters (its `acc_norm`, the number that is
usually reported), `plain` those of whole endings (its `acc`).
"""

from __future__ import annotations

import re
from typing import Any

from forerun.evaluate.benchmarks.base import (
    Answer,
    Benchmark,
    Choose,
    Data,
    Examiner,
    Item,
    Scores,
    find_file,
    read_objects,
)

FIELDS = ("ctx_a", "ctx_b", "activity_label", "endings", "label")


def cleaned(text: str) -> str:
    """Without what WikiHow left in."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def read(data: Data) -> list[Item]:
    objects = read_objects(find_file(HELLASWAG, data.path), FIELDS)
    return [_item(number, one) for number, one in enumerate(objects)]


def _item(number: int, one: dict[str, Any]) -> Item:
    context = one["ctx_a"] + " " + one["ctx_b"].capitalize()
    query = cleaned(one["activity_label"] + ": " + context)
    endings = [cleaned(ending) for ending in one["endings"]]
    facts = {"label": int(one["label"]), "lengths": [len(ending) for ending in endings]}
    name = str(one.get("ind", number))
    return Item(name, Choose(query, tuple(" " + ending for ending in endings)), facts)


def grade(item: Item, answer: Answer, examiner: Examiner) -> Scores:
    label = item.facts["label"]
    lengths = item.facts["lengths"]
    normed = [logprob / length for logprob, length in zip(answer.logprobs, lengths)]
    return {
        "accuracy": float(normed.index(max(normed)) == label),
        "plain": float(answer.logprobs.index(max(answer.logprobs)) == label),
    }


HELLASWAG = Benchmark(
    name="hellaswag",
    summary="which of four endings is likeliest?",
    source="hellaswag_val.jsonl of github rowanz/hellaswag, folder data (MIT).",
    files=("hellaswag_val.jsonl", "hellaswag.jsonl"),
    metric="accuracy",
    read=read,
    grade=grade,
)
