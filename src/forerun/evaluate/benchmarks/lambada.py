"""LAMBADA (Paperno et al., 2016, arXiv 1606.06031), as OpenAI's file and lm-evaluation-harness's
`lambada_openai` have it: the last word of a passage. `accuracy` is whether greedy decoding writes
it; the perplexity is that of the word, not of its tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

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


def read(data: Data) -> list[Item]:
    items = []
    for number, one in enumerate(read_objects(find_file(LAMBADA, data.path), ("text",))):
        context, _, word = one["text"].rpartition(" ")
        items.append(Item(str(number), Choose(context, (" " + word,))))
    return items


def grade(item: Item, answer: Answer, examiner: Examiner) -> Scores:
    return {"accuracy": float(answer.greedy[0]), "nats": -answer.logprobs[0]}


def combine(scores: Sequence[Scores]) -> Scores:
    return {"perplexity": math.exp(sum(one["nats"] for one in scores) / len(scores))}


LAMBADA = Benchmark(
    name="lambada",
    summary="the last word of a passage: is it what greedy decoding writes?",
    source='JSON lines with "text": lambada_test.jsonl of EleutherAI/lambada_openai (MIT).',
    files=("lambada_test.jsonl", "lambada.jsonl"),
    metric="accuracy",
    read=read,
    grade=grade,
    combine=combine,
)
