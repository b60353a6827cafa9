"""WikiText (Merity et al., 2016, arXiv 1609.07843): how likely are whole pages?

Perplexities per word (by white space) and per byte of the text as it is, and bits per byte, as
lm-evaluation-harness's `wikitext` counts them: so models with different tokens can be compared.
For a masked model the log-probability is a bound (`evaluate.likelihood` says which).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from forerun.evaluate.benchmarks.base import (
    Answer,
    Benchmark,
    Data,
    Examiner,
    Item,
    Read,
    Scores,
    find_file,
    parse_object,
    read_lines,
)

HEADING = re.compile(r"^ = [^=].*[^=] = $")  # a page begins; sections have more signs


def read(data: Data) -> list[Item]:
    file = find_file(WIKITEXT, data.path)
    lines = read_lines(file)
    if lines and lines[0].lstrip().startswith("{"):
        numbered = enumerate(lines, 1)
        objects = [parse_object(file, number, line) for number, line in numbered if line.strip()]
        pages = [str(one.get("page") or one.get("text", "")) for one in objects]
    else:
        pages = pages_of(lines)
    return [Item(str(number), Read(page)) for number, page in enumerate(pages) if page.strip()]


def pages_of(lines: Sequence[str]) -> list[str]:
    pages: list[list[str]] = [[]]
    for line in lines:
        if HEADING.match(line):
            pages.append([])
        pages[-1].append(line)
    return ["\n".join(page) for page in pages]


def grade(item: Item, answer: Answer, examiner: Examiner) -> Scores:
    assert isinstance(item.ask, Read)
    text = item.ask.text
    return {
        "nats": -answer.logprobs[0],
        "words": float(len(re.split(r"\s+", text))),
        "bytes": float(len(text.encode())),
    }


def combine(scores: Sequence[Scores]) -> Scores:
    nats = sum(one["nats"] for one in scores)
    size = sum(one["bytes"] for one in scores)
    return {
        "word perplexity": math.exp(nats / sum(one["words"] for one in scores)),
        "byte perplexity": math.exp(nats / size),
        "bits per byte": nats / size / math.log(2),
    }


WIKITEXT = Benchmark(
    name="wikitext",
    summary="how likely are whole pages? Perplexity per word and per byte",
    source='wiki.test.raw of WikiText-2 (CC BY-SA), or JSON lines with "page".',
    files=("wiki.test.raw", "wikitext.jsonl"),
    metric="word perplexity",
    percent=False,
    lower_is_better=True,
    read=read,
    grade=grade,
    combine=combine,
)
