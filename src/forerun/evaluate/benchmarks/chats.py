"""MT-Bench (Zheng et al., 2023, arXiv 2306.05685) and Spec-Bench (Xia et al., 2024, arXiv
2401.07851): questions of one or two turns, by category.

They measure speed, and whether methods write the same. Quality needs a judge: any
OpenAI-compatible address, asked with MT-Bench's own words for grading a single answer.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable

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

MT_BENCH_GROUPS = (
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
)
# MT-Bench's prompt `single-v1` (FastChat, Apache-2.0).
JUDGED = (
    "[Instruction]\nPlease act as an impartial judge and evaluate the quality of the response "
    "provided by an AI assistant to the user question displayed below. Your evaluation should "
    "consider factors such as the helpfulness, relevance, accuracy, depth, creativity, and level "
    "of detail of the response. Begin your evaluation by providing a short explanation. Be as "
    "objective as possible. After providing your explanation, you must rate the response on a "
    "scale of 1 to 10 by strictly following this format: "
    '"[[rating]]", for example: "Rating: [[5]]".\n\n'
    "[Question]\n{question}\n\n[The Start of Assistant's Answer]\n{answer}\n"
    "[The End of Assistant's Answer]"
)
RATING = re.compile(r"\[\[(\d+(?:\.\d+)?)\]\]")


def _reader(benchmark: Callable[[], Benchmark]) -> Callable[[Data], list[Item]]:
    def read(data: Data) -> list[Item]:
        items = []
        objects = read_objects(find_file(benchmark(), data.path), ("question_id", "turns"))
        for one in objects:
            group = str(one.get("category", ""))
            if benchmark() is SPEC_BENCH and group in MT_BENCH_GROUPS:
                group = "multi-turn conversation"  # Spec-Bench's own name for all of these
            before = None
            for number, turn in enumerate(one["turns"], 1):
                ask = Write(turn, user(turn), max_tokens=int(data.options.get("max_tokens", 512)))
                item = Item(
                    f"{one['question_id']}/{number}", ask, {"question": turn}, group, before
                )
                items.append(item)
                before = item.id
        return items

    return read


def grade(item: Item, answer: Answer, examiner: Examiner) -> Scores:
    """How much was written, and a judge's rating, 1 to 10, if there is a judge."""
    scores = {"words": float(len(answer.text.split()))}
    rating = examiner.rate(answer.before + item.facts["question"], answer.text)
    return scores if rating is None else {"rating": rating, **scores}


def ask_judge(
    address: str, model: str, question: str, answer: str, timeout: float = 120.0
) -> float:
    """A judge's rating, 1 to 10, from an OpenAI-compatible server at `address` (…/v1)."""
    words = JUDGED.format(question=question, answer=answer)
    body = {
        "model": model,
        "temperature": 0,
        "max_tokens": 2048,
        "messages": [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": words},
        ],
    }
    request = urllib.request.Request(
        address.rstrip("/") + "/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            said = json.load(response)["choices"][0]["message"]["content"]
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise BadOption(
            f"judge={address!r} gave no answer ({error}): give the address of an OpenAI-compatible "
            f"server, such as http://localhost:8000/v1."
        ) from error
    found = RATING.findall(said or "")
    if not found:
        raise BadOption(f"judge={address!r} gave no [[rating]], but {str(said)[:80]!r}.")
    return float(found[-1])


MT_BENCH: Benchmark = Benchmark(
    name="mt-bench",
    summary="80 conversations of two turns: speed, and the rating of a judge if one is given",
    source="question.jsonl of github lm-sys/FastChat, fastchat/llm_judge/data/mt_bench "
    "(Apache-2.0).",
    files=("question.jsonl", "mt_bench/question.jsonl"),
    metric="words",
    percent=False,
    read=_reader(lambda: MT_BENCH),
    grade=grade,
)
SPEC_BENCH: Benchmark = Benchmark(
    name="spec-bench",
    summary="480 questions of six kinds, made to measure speculative decoding: speed by kind",
    source="question.jsonl of github hemingkx/Spec-Bench, data/spec_bench (Apache-2.0).",
    files=("question.jsonl", "spec_bench/question.jsonl"),
    metric="words",
    percent=False,
    read=_reader(lambda: SPEC_BENCH),
    grade=grade,
)
