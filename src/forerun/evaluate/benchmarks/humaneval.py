"""HumanEval (Chen et al., 2021, arXiv 2107.03374): write a function after its signature and
docstring; does it pass its tests?

A base model goes on from the prompt without the white space at its end, as bigcode's harness has
it, up to the first line that belongs to something else. A chat model is asked with EvalPlus's words
(Liu et al., 2023, arXiv 2305.01210) and begins its answer with EvalPlus's opening; its program is
what stands in the block of code. `pass@1` runs it after the imports and helpers that the task gives
before its function, `alone` runs nothing but it, as EvalPlus does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from forerun.evaluate.benchmarks.base import (
    Answer,
    Benchmark,
    Data,
    Examiner,
    Item,
    Message,
    Scores,
    Write,
    find_file,
    read_objects,
    user,
)

# What stands behind a function's body.
ENDS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n@", "\n```")
ASKED = "Please provide a self-contained Python script that solves the following problem in a "
ASKED += "markdown code block:\n```\n{prompt}\n```\n"
OPENING = "Below is a Python script with a self-contained function that solves the problem and "
OPENING += "passes corresponding tests:\n```python\n"
CHAT_ENDS = ("\n```", "\nif __name__", "\ndef main(", "\nprint(")
# As the coders of Qwen were asked by those who made them.
QWEN_SYSTEM = "You are an intelligent programming assistant to produce Python algorithmic solutions"
QWEN_ASKED = "Can you complete the following Python function?\n```python\n{prompt}\n```\n\n"


def read(data: Data) -> list[Item]:
    """Chats in the words of EvalPlus."""

    def ask(prompt: str) -> Write:
        chat = user(ASKED.format(prompt=prompt.strip()))
        return Write(prompt.rstrip(), chat, OPENING, ENDS, CHAT_ENDS, max_tokens=768)

    return _read(data, ask)


def read_as_qwen(data: Data) -> list[Item]:
    """Chats in the words of Qwen's own evaluation."""

    def ask(prompt: str) -> Write:
        system: Message = {"role": "system", "content": QWEN_SYSTEM}
        chat = (system, *user(QWEN_ASKED.format(prompt=prompt.strip())))
        ends = (*CHAT_ENDS, "\n#")
        return Write(prompt.rstrip(), chat, "```python\n", ENDS, ends, max_tokens=768)

    return _read(data, ask)


def _read(data: Data, ask: Callable[[str], Write]) -> list[Item]:
    objects = read_objects(find_file(HUMANEVAL, data.path), ("prompt", "test", "entry_point"))
    items = []
    for number, one in enumerate(objects):
        facts = {
            "prompt": one["prompt"].rstrip(),
            "before": one["prompt"].rpartition(f"def {one['entry_point']}(")[0],
            "test": one["test"],
            "entry_point": one["entry_point"],
            "given": one["prompt"] + one.get("canonical_solution", ""),
        }
        items.append(Item(str(one.get("task_id", number)), ask(one["prompt"]), facts))
    return items


def grade(item: Item, answer: Answer, examiner: Examiner) -> Scores:
    facts = item.facts

    def passes(program: str) -> float:
        return float(examiner.passes(program, facts["test"], facts["entry_point"], facts["given"]))

    if not answer.chatted:
        return {"pass@1": passes(facts["prompt"] + answer.text)}
    program = answer.text.split("```")[0]
    alone = passes(program)
    return {"pass@1": alone or passes(f"{facts['before']}\n{program}"), "alone": alone}


HUMANEVAL = Benchmark(
    name="humaneval",
    summary="164 functions to write: do they pass their tests?",
    source="HumanEval.jsonl of github openai/human-eval (MIT).",
    files=("HumanEval.jsonl",),
    metric="pass@1",
    read=read,
    grade=grade,
    runs_code=True,
)

HUMANEVAL_AS_QWEN = replace(
    HUMANEVAL,
    name="humaneval-qwen",
    summary="The same, asked in the words of Qwen's own evaluation of its coders.",
    read=read_as_qwen,
)
