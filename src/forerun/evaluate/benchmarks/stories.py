"""Stories of five sentences, in the format of ROCStories (Mostafazadeh et al., 2016), of which one
or three are missing (Guo & Ermon, 2025, Table 3). ROUGE compares what is filled in with what stood
there. Models that fill blanks get as many tokens as stood there; left-to-right models see what
comes before, and are cut after as many sentences: the left-context baseline."""

from __future__ import annotations

from forerun.errors import BadOption
from forerun.evaluate.benchmarks.base import (
    Answer,
    Benchmark,
    Data,
    Examiner,
    Fill,
    Item,
    Scores,
    find_file,
    parse_object,
    read_lines,
)
from forerun.evaluate.metrics import rouge

SENTENCES = 5
MISSING = {1: (2,), 3: (1, 2, 3)}  # sentences that are missing, from 0


def read_stories(file: str) -> list[list[str]]:
    """Five sentences a story: JSON lines with "sentences", or lines of five fields with tabs
    between them."""
    stories = []
    for number, line in enumerate(read_lines(file), 1):
        if not line.strip():
            continue
        if line.lstrip().startswith("{"):
            sentences = parse_object(file, number, line).get("sentences", ())
        else:
            sentences = line.split("\t")[-SENTENCES:]  # ROCStories puts id and title before them
        if len(sentences) != SENTENCES:
            raise BadOption(f"{file}:{number} has {len(sentences)} sentences instead of five.")
        stories.append([sentence.strip() for sentence in sentences])
    return stories


def read(data: Data) -> list[Item]:
    missing = MISSING.get(int(data.options.get("missing", 1)))
    if missing is None:
        raise BadOption(f"missing={data.options['missing']} must be 1 or 3 sentences.")
    items = []
    for number, sentences in enumerate(read_stories(find_file(STORIES, data.path))):
        before = " ".join(sentences[: missing[0]])
        truth = " ".join(sentences[i] for i in missing)
        after = " ".join(sentences[missing[-1] + 1 :])
        ask = Fill(before + " ", truth, " " + after, ("sentences", len(missing)), max_tokens=96)
        items.append(Item(str(number), ask, {"truth": truth}))
    return items


def grade(item: Item, answer: Answer, examiner: Examiner) -> Scores:
    return {name: value / 100 for name, value in rouge(answer.text, item.facts["truth"]).items()}


STORIES = Benchmark(
    name="stories",
    summary="one or three sentences of five are missing: ROUGE of what is filled in",
    source='stories of five sentences: ROCStories\' file with tabs, or JSON lines with "sentences" '
    "(given on request at cs.rochester.edu/nlp/rocstories).",
    files=("stories.tsv", "stories.jsonl"),
    metric="rougeL",
    read=read,
    grade=grade,
)
