"""Prompts for a model's own text: functions of a corpus of Python, asked for in several ways, and
questions.

    python tools/pick_prompts.py --corpus CODE.jsonl.xz --questions GSM8K/train.jsonl \\
        --avoid HumanEval.jsonl GSM8K/test.jsonl question.jsonl --tokenizer QWEN --out prompts.jsonl

    python tools/pick_prompts.py --corpus CODE.jsonl.xz --beginnings 40000 --tokenizer M --out ...

A line of the corpus is {"text": a file's text}. Nothing is taken that shares eight words in a row
with a file to avoid, nor a function that has the name of one that HumanEval asks for. With a
tokenizer, some prompts are chats whose answer has begun, as HumanEval is usually asked. Lines of
the result are {"chat": question} or {"text": beginning}. For a model without a chat template
`--beginnings` takes as many pieces of what the corpus does not hold out, which are to be continued.
"""

from __future__ import annotations

import argparse
import ast
import json
import lzma
import random
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

WORDS = 8  # in a row that no prompt may share with what is avoided
LONGEST_HEAD = 520  # characters of a function's first lines
LONGEST_SCRIPT = 256  # tokens of a chat that has begun
LEAST_BEGUN, MOST_BEGUN = 24, 160  # tokens of a piece that is to be continued
REFERENCES = ("deprecated", ":class:", ":meth:", ":func:")

SCRIPT = (
    "Please provide a self-contained Python script that solves the following problem in a "
    "markdown code block:\n```\n{head}\n```\n"
)
COMPLETE = "Can you complete the following Python function?\n```python\n{head}\n```\n\n"
DESCRIBED = (
    "Write a Python function `{name}({arguments})`. {doc}",
    "Write a function in Python: {doc} Call it `{name}`.",
    "I need a Python function named {name} with the arguments ({arguments}). {doc}",
    "Implement this in Python.\n\n{doc}",
)
BEGUN = (
    "Below is a Python script with a self-contained function that solves the problem and passes "
    "corresponding tests:\n```python\n"
)
SOLVE = "Write a Python function solve() that returns the answer to this question: "


class Function(NamedTuple):
    name: str
    arguments: str
    doc: str
    head: str  # its first lines, docstring included

    def asked(self, way: str) -> str:
        doc = " ".join(self.doc.split())
        return way.format(name=self.name, arguments=self.arguments, doc=doc, head=self.head)


def functions(text: str) -> Iterator[Function]:
    """Short public functions with a docstring, of one file."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.split("\n")  # as `ast` counts them
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.decorator_list:
            continue
        arguments = [argument.arg for argument in node.args.args]
        doc = ast.get_docstring(node) or ""
        hidden = node.name.startswith("_") or {"self", "cls"} & set(arguments) or not arguments
        if hidden or not 40 < len(doc) < 420 or not doc.isascii():
            continue
        told = node.body[0].end_lineno or 0
        size = (node.end_lineno or 0) - told
        head = textwrap.dedent("\n".join(lines[node.lineno - 1 : told])).strip()
        if not 2 <= size <= 30 or len(head) > LONGEST_HEAD or any(w in doc for w in REFERENCES):
            continue
        yield Function(node.name, ", ".join(arguments), doc, head)


def word_runs(text: str) -> set[str]:
    words = re.findall(r"\w+", text.lower())
    return {" ".join(words[i : i + WORDS]) for i in range(len(words) - WORDS + 1)}


def strings(value: object) -> Iterator[str]:
    """Every text of a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from strings(one)


def ways_to_ask(begun: Callable[[str, str], str | None]) -> list[Callable[[Function], dict | None]]:
    """How a function may be asked for; `begun` makes a chat whose answer has begun."""

    def chat(way: str) -> Callable[[Function], dict | None]:
        return lambda function: {"chat": function.asked(way)}

    def opened(way: str, opening: str) -> Callable[[Function], dict | None]:
        def ask(function: Function) -> dict | None:
            text = begun(function.asked(way), opening)
            return text and {"text": text}  # type: ignore[return-value]

        return ask

    def bare(function: Function) -> dict:
        return {"text": function.head + "\n"}

    described = [chat(way) for way in DESCRIBED]
    return [
        *(chat(SCRIPT), chat(COMPLETE), bare),
        *(opened(SCRIPT, BEGUN), opened(COMPLETE, "```python\n")),
        *described,
    ]


def chat_that_has_begun(name: str | None) -> Callable[[str, str], str | None]:
    """A chat in a tokenizer's own template with the first words of its answer; None where it is too
    long, or there is no tokenizer."""
    if name is None:
        return lambda question, opening: None
    from forerun.train.networks import load_tokenizer

    tokenizer = load_tokenizer(name)

    def begun(question: str, opening: str) -> str | None:
        chat = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        tokens = tokenizer(text + opening, add_special_tokens=False).input_ids
        return text + opening if len(tokens) <= LONGEST_SCRIPT else None

    return begun


def beginnings(corpus: Path, name: str, count: int, rng: random.Random) -> Iterator[dict]:
    """Pieces of files that are not held out, each from the beginning of a line to anywhere."""
    from forerun.train.data import documents
    from forerun.train.networks import load_tokenizer

    tokenizer = load_tokenizer(name)
    texts = [text for text, held_out in documents(str(corpus)) if not held_out]
    for text in rng.choices(texts, [len(text) for text in texts], k=count):
        start = text.rfind("\n", 0, rng.randrange(len(text))) + 1
        piece = tokenizer(text[start : start + 4 * MOST_BEGUN], add_special_tokens=False).input_ids
        yield {"text": tokenizer.decode(piece[: rng.randint(LEAST_BEGUN, MOST_BEGUN)])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", required=True, type=Path)
    parser.add_argument("--questions", type=Path, help='lines of {"question": …}')
    parser.add_argument("--avoid", nargs="*", default=[], type=Path)
    parser.add_argument("--tokenizer")
    parser.add_argument("--ways", type=int, default=3, help="in which each function is asked for")
    parser.add_argument("--beginnings", type=int, help="so many pieces of code, and nothing else")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", required=True, type=Path)
    flags = parser.parse_args()
    rng = random.Random(flags.seed)
    if flags.beginnings:
        if flags.tokenizer is None:
            parser.error("--beginnings needs --tokenizer")
        if flags.avoid:
            parser.error("--beginnings avoids nothing but what the corpus holds out")
        pieces = beginnings(flags.corpus, flags.tokenizer, flags.beginnings, rng)
        flags.out.write_text("".join(json.dumps(one) + "\n" for one in pieces))
        return
    avoided = [json.loads(line) for file in flags.avoid for line in file.open()]
    banned = {run for one in avoided for text in strings(one) for run in word_runs(text)}
    names = {one.get("entry_point") for one in avoided if isinstance(one, dict)}
    found: dict[str, Function] = {}  # by docstring
    with lzma.open(flags.corpus, "rt") as lines:
        for line in lines:
            for function in functions(json.loads(line)["text"]):
                told = word_runs(function.head) | word_runs(function.doc)
                if function.name not in names and not told & banned:
                    found.setdefault(function.doc, function)
    ways = ways_to_ask(chat_that_has_begun(flags.tokenizer))
    asked = [way(f) for f in found.values() for way in rng.sample(ways, min(flags.ways, len(ways)))]
    prompts = [one for one in asked if one]
    if flags.questions:
        texts = [json.loads(line)["question"] for line in flags.questions.open()]
        texts = [text for text in texts if not word_runs(text) & banned]
        prompts += [{"chat": SOLVE + text if rng.random() < 0.2 else text} for text in texts]
    rng.shuffle(prompts)
    flags.out.write_text("".join(json.dumps(one) + "\n" for one in prompts))
    chats = sum("chat" in one for one in prompts)
    print(f"{flags.out}: {len(prompts):,} prompts of {len(found):,} functions, {chats:,} chats")


if __name__ == "__main__":
    main()
