"""GSM8K (Cobbe et al., 2021, arXiv 2110.14168): word problems of primary school.

The prompt and both extractions are those of lm-evaluation-harness's `gsm8k`: worked examples of the
training file as "Question: … Answer: …", five of them, then the question. `accuracy` takes the last
number of the answer (its `flexible-extract`), `strict` only one after "####".
"""

from __future__ import annotations

import re
from pathlib import Path

from forerun.evaluate.benchmarks.base import (
    Answer,
    Benchmark,
    Data,
    Examiner,
    Item,
    Scores,
    Write,
    examples,
    find_file,
    read_objects,
    user,
)

SHOTS = 5
STOP = ("Question:", "</s>", "<|im_end|>")
NUMBER = re.compile(r"-?\$?[0-9][0-9,]*(?:\.[0-9]+)?|-?\$?\.[0-9]+")
STRICT = re.compile(r"####\s*(-?\$?[0-9.,]+)")
ANNOTATION = re.compile(r"<<.*?>>")  # of the calculator, which models do not have


def read(data: Data) -> list[Item]:
    file = find_file(GSM8K, data.path)
    shots = data.shots_or(SHOTS)
    shown = ""
    if shots:
        training = read_objects(str(Path(file).with_name("train.jsonl")), ("question", "answer"))
        shown = "".join(
            f"Question: {one['question']}\nAnswer: {_plain(one['answer'])}\n\n"
            for one in examples(training, shots, data.seed)
        )
    items = []
    for number, one in enumerate(read_objects(file, ("question", "answer"))):
        prompt = f"{shown}Question: {one['question']}\nAnswer:"
        ask = Write(prompt, user(prompt), stop=STOP, chat_stop=STOP, max_tokens=256)
        items.append(Item(str(number), ask, {"answer": number_of(one["answer"], STRICT)}))
    return items


def _plain(answer: str) -> str:
    return ANNOTATION.sub("", answer)


def number_of(text: str, pattern: re.Pattern[str]) -> str | None:
    """The last number of a text, without signs of money and thousands."""
    found = pattern.findall(text)
    if not found:
        return None
    return _number(found[-1])


def _number(text: str) -> str:
    digits = text.replace(",", "").replace("$", "").rstrip(".")
    whole, point, rest = digits.partition(".")
    return whole if point and not rest.strip("0") else digits


def grade(item: Item, answer: Answer, examiner: Examiner) -> Scores:
    truth = item.facts["answer"]
    return {
        "accuracy": float(number_of(answer.text, NUMBER) == truth),
        "strict": float(number_of(answer.text, STRICT) == truth),
    }


GSM8K = Benchmark(
    name="gsm8k",
    summary="word problems of primary school: is the last number right?",
    source="test.jsonl with train.jsonl beside it, of github openai/grade-school-math (MIT).",
    files=("test.jsonl", "gsm8k.jsonl"),
    metric="accuracy",
    read=read,
    grade=grade,
)
