r"""MATH-500 (Lightman et al., 2023, arXiv 2305.20050): 500 problems of MATH.

Asked without examples, "put your final answer within \boxed{}", as Qwen's and DeepSeek's reports
do. The answer in the last box is compared with the truth after the normalisation that Hendrycks et
al. publish with MATH: spaces, units, ways to write fractions and roots.
"""

from __future__ import annotations

import re

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

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
STOP = ("\nProblem:",)
REMOVED = (r"\left", r"\right", r"\!", r"\,", r"\;", "^{\\circ}", r"^\circ", r"\$", "$", r"\%", "%")
STATED = re.compile(r"answer is:?\s*(.+?)(?:\.\s|\.?$|\n)", re.IGNORECASE)


def read(data: Data) -> list[Item]:
    objects = read_objects(find_file(MATH500, data.path), ("problem", "answer"))
    items = []
    for number, one in enumerate(objects):
        ask = Write(
            prompt=f"Problem: {one['problem']}\n{INSTRUCTION}\nSolution:",
            chat=user(f"{one['problem']}\n{INSTRUCTION}"),
            stop=STOP,
            max_tokens=1024,
        )
        name = str(one.get("unique_id", number))
        items.append(Item(name, ask, {"answer": one["answer"]}, str(one.get("subject", ""))))
    return items


def last_box(text: str) -> str | None:
    r"""What stands in the last \boxed{} or \fbox{}, braces balanced."""
    start = max(text.rfind(r"\boxed{"), text.rfind(r"\fbox{"))
    if start < 0:
        return None
    begin = text.index("{", start)
    depth = 0
    for end in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[begin + 1 : end]
    return None


def extract(text: str) -> str | None:
    boxed = last_box(text)
    if boxed is not None:
        return boxed
    stated = STATED.findall(text)
    return stated[-1] if stated else None


def normalised(answer: str) -> str:
    """One way to write what can be written in several."""
    text = answer.strip().replace("\n", "").replace("tfrac", "frac").replace("dfrac", "frac")
    for word in REMOVED:
        text = text.replace(word, "")
    text = re.sub(r"\\text\{\s.*?\}", "", text)  # a unit on the right
    text = re.sub(r"\\(?:text|mbox|mathrm|textbf)\{(.*?)\}", r"\1", text)
    text = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", text)
    text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\{([^{}]*)\}(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"^(-?\d+)/(\d+)$", r"\\frac{\1}{\2}", text)
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)  # thousands
    text = re.sub(r"^[a-zA-Z]\s*=\s*", "", text)
    text = text.replace(" ", "").rstrip(".")
    text = re.sub(r"(?<!\d)\.(\d)", r"0.\1", text)
    text = re.sub(r"^(-?\d+)\.0+$", r"\1", text)
    return r"\frac{1}{2}" if text == "0.5" else text


def grade(item: Item, answer: Answer, examiner: Examiner) -> Scores:
    found = extract(answer.text)
    right = found is not None and normalised(found) == normalised(item.facts["answer"])
    return {"accuracy": float(right), "answered": float(found is not None)}


MATH500 = Benchmark(
    name="math500",
    summary="500 problems of school and contest mathematics: is the boxed answer right?",
    source='JSON lines with "problem" and "answer": test.jsonl of HuggingFaceH4/MATH-500 (MIT).',
    files=("math500.jsonl", "test.jsonl"),
    metric="accuracy",
    read=read,
    grade=grade,
)
