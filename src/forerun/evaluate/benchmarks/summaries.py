"""Summaries in the format of CNN/DailyMail (Hermann et al., 2015; See et al., 2017): ROUGE of what
a model writes beside the highlights. A base model goes on from "TL;DR:" (Radford et al., 2019), a
chat model is asked."""

from __future__ import annotations

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
from forerun.evaluate.metrics import rouge

LONGEST = 4000  # characters of an article that are shown


def read(data: Data) -> list[Item]:
    objects = read_objects(find_file(SUMMARIES, data.path), ("article", "highlights"))
    items = []
    for number, one in enumerate(objects):
        article = one["article"][:LONGEST].strip()
        ask = Write(
            prompt=f"{article}\nTL;DR:",
            chat=user(f"Summarize the following article in three sentences.\n\n{article}"),
            stop=("\n\n",),
            max_tokens=128,
        )
        items.append(Item(str(one.get("id", number)), ask, {"truth": one["highlights"]}))
    return items


def grade(item: Item, answer: Answer, examiner: Examiner) -> Scores:
    return {name: value / 100 for name, value in rouge(answer.text, item.facts["truth"]).items()}


SUMMARIES = Benchmark(
    name="summaries",
    summary="summaries of news: ROUGE beside the highlights",
    source='JSON lines with "article" and "highlights": CNN/DailyMail 3.0.0, test (Apache-2.0).',
    files=("cnn_dailymail.jsonl", "summaries.jsonl"),
    metric="rougeL",
    read=read,
    grade=grade,
)
