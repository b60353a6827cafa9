"""MBPP (Austin et al., 2021, arXiv 2108.07732): short Python programs from a sentence and three
tests.

The prompt is the paper's: three solved tasks of the same file (task_id 2, 3 and 4), each between
[BEGIN] and [DONE], and the tests are shown. What is graded are the tasks 11 to 510, the paper's
test set; a file that numbers its tasks otherwise is graded whole, without examples.
"""

from __future__ import annotations

import ast
from typing import Any

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

SHOTS = 3
PROMPTS = range(1, 11)  # the tasks that examples are taken from
TESTS = range(11, 511)
ASKED = "You are an expert Python programmer, and here is your task: {text} "
ASKED += "Your code should pass these tests:\n\n{tests}\n[BEGIN]\n"


def read(data: Data) -> list[Item]:
    objects = read_objects(find_file(MBPP, data.path), ("task_id", "test_list", "code"))
    prompts = [one for one in objects if one["task_id"] in PROMPTS]
    graded = [one for one in objects if one["task_id"] in TESTS] or objects
    prompts.sort(key=lambda one: (one["task_id"] not in (2, 3, 4), one["task_id"]))
    shots = data.shots_or(min(SHOTS, len(prompts)))
    shown = "".join(
        f"{_asked(one)}{one['code'].strip()}\n[DONE]\n\n"
        for one in examples(prompts, shots, data.seed)
    )
    items = []
    for one in graded:
        prompt = shown + _asked(one)
        ask = Write(prompt, user(prompt), stop=("[DONE]",), chat_stop=("[DONE]",), max_tokens=512)
        setup = one.get("test_setup_code") or "\n".join(one.get("test_imports", ()))
        facts = {
            "test": check_of(one["test_list"], setup),
            "entry_point": tested_function(one["test_list"][0]),
            "given": setup,
        }
        items.append(Item(str(one["task_id"]), ask, facts))
    return items


def _asked(one: dict[str, Any]) -> str:
    text = str(one.get("text") or one.get("prompt"))
    return ASKED.format(text=text, tests="\n".join(one["test_list"]))


def check_of(tests: list[str], setup: str) -> str:
    """Assertions as one function `check`."""
    body = "\n".join(f"    {line}" for test in tests for line in test.strip().split("\n"))
    return f"{setup}\n\ndef check(candidate):\n{body}\n"


def tested_function(test: str) -> str:
    """The function that an assertion calls: the innermost name that is called and no builtin."""
    import builtins

    calls = [node for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Call)]
    names = [call.func.id for call in calls if isinstance(call.func, ast.Name)]
    own = [name for name in names if not hasattr(builtins, name)]
    return (own or names)[0]


def program_of(answer: Answer) -> str:
    """What stands between [BEGIN] and [DONE], or in the first block of code."""
    text = answer.text.split("[DONE]")[0].split("[BEGIN]")[-1]
    if "```" in text:
        text = text.split("```")[1].removeprefix("python").removeprefix("py")
    return text.strip("\n") + "\n"


def grade(item: Item, answer: Answer, examiner: Examiner) -> Scores:
    facts = item.facts
    program = program_of(answer)
    return {"pass@1": float(examiner.passes(program, facts["test"], facts["entry_point"]))}


MBPP = Benchmark(
    name="mbpp",
    summary="short programs from a sentence and three tests: do they pass them?",
    source="mbpp.jsonl of github google-research/google-research, folder mbpp (CC BY 4.0).",
    files=("mbpp.jsonl", "sanitized-mbpp.json"),
    metric="pass@1",
    read=read,
    grade=grade,
    runs_code=True,
)
