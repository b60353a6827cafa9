"""A target's own text, for its drafter to learn from: it asks itself questions and answers them,
answers questions that it is given, and continues code.

Many texts are written side by side, one token of each at a time, and without a pause: a text that
ends makes room for the next. So every step is the same computation, which a GPU replays as one
program. Most answers are greedy (`greedy`), the others are drawn at temperature 1.

B texts at once, C columns of the cache.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from forerun.errors import BadOption
from forerun.train.frozen import Cache, FrozenTarget

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What is known of a token, as bits.
ANSWER = 1  # the target wrote it, after a prompt
BEGINS = 2  # a text
GREEDY = 4
CODE = 8  # a text that continues code

ASK, TELL = 1, 2  # what follows a script: the target asks, or it answers
LONGEST_SCRIPT = 256
LONGEST_QUESTION = 160
PERIODS = 48  # tokens: the longest loop that is noticed
PATIENCE = 3  # times that a loop may repeat, and some tokens more, before a text is ended

# How questions may begin, so that all kinds are asked; most begin as the target likes.
OPENINGS = (
    "Write a Python function that",
    "Write a function in Python to",
    "Fix the bug in this Python code:\n",
    "Explain what this code does:\n",
    "How many",
    "Calculate",
    "Solve for x:",
    "A train",
    "If a",
    "What is the sum of",
    "Summarize the following text:\n",
    "Summarize this article in two sentences:\n",
    "Translate the following sentence into French:",
    "Translate into German:",
    "Translate to Spanish:",
    "Read the text and answer the question.\n\nText:",
    "Based on the following passage, answer the question.\n",
    "What is",
    "Who",
    "Why do",
    "How do I",
    "Write a short story about",
    "Write an email",
    "Give me three",
    "List",
)


@dataclass(frozen=True)
class TextOptions:
    """How much own text, and of which kinds."""

    seconds: float = 150.0
    texts: int = 2048  # at once
    longest: int = 512  # tokens of a text, its prompt among them
    code: float = 0.3  # share of texts that continue code
    given: float = 0.25  # share that answer given questions
    greedy: float = 0.6  # share of answers that are greedy
    seed: int = 0
    most: int = 40_000_000  # tokens


@dataclass(frozen=True)
class Scripts:
    """Prompts, as tokens that are put before what the target writes, kind after kind."""

    tokens_NT: Tensor
    lengths_N: Tensor
    after_N: Tensor  # ASK or TELL
    kinds: tuple[tuple[int, int], ...]  # (first, count): the answer header, openings, given, code

    def to(self, device: torch.device) -> Scripts:
        return Scripts(
            self.tokens_NT.to(device),
            self.lengths_N.to(device),
            self.after_N.to(device),
            self.kinds,
        )


def read_prompts(file: str | Path) -> tuple[list[str], list[str]]:
    """(questions, beginnings of code) from a file with a JSON object a line: {"chat": …} or
    {"text": …}."""
    questions, code = [], []
    with Path(file).open() as lines:
        for number, line in enumerate(lines, 1):
            entry = json.loads(line)
            if not isinstance(entry, dict) or not {"chat", "text"} & set(entry):
                raise BadOption(f"{file}, line {number}: must be {{'chat': …}} or {{'text': …}}.")
            if "chat" in entry:
                questions.append(entry["chat"])
            else:
                code.append(entry["text"])
    return questions, code


def make_scripts(
    tokenizer: PreTrainedTokenizerBase, questions: Sequence[str], code: Sequence[str]
) -> Scripts:
    """Prompts as tokens. Without a chat template there is only code."""

    def scripts(texts: Sequence[str], after: int) -> list[tuple[list[int], int]]:
        if not texts:
            return []
        found = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return [(ids, after) for ids in found]

    start, header = _chat_frame(tokenizer)
    groups: list[list[tuple[list[int], int]]] = [[], [], [], []]
    if header:
        groups[0] = scripts([header], TELL)
        groups[1] = scripts([start], ASK) * len(OPENINGS)
        groups[1] += scripts([start + text for text in OPENINGS], ASK)
        groups[2] = scripts([start + text + header for text in questions], TELL)
    groups[3] = [(ids[:LONGEST_SCRIPT], after) for ids, after in scripts(code, TELL)]
    groups = [[x for x in group if 0 < len(x[0]) <= LONGEST_SCRIPT] for group in groups]
    if not any(groups[1:]):
        raise BadOption(
            "this target has no chat template, so it cannot ask itself questions: give prompts."
        )
    return _as_table(groups)


def _chat_frame(tokenizer: Any) -> tuple[str, str]:
    """What the chat template puts before a question, and between it and the answer."""
    if not getattr(tokenizer, "chat_template", None):
        return "", ""
    sentinel = "QUESTION"
    messages = [{"role": "user", "content": sentinel}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    start, _, header = text.partition(sentinel)
    return start, header


def _as_table(groups: Sequence[Sequence[tuple[list[int], int]]]) -> Scripts:
    scripts = [script for group in groups for script in group]
    tokens = torch.zeros(len(scripts), LONGEST_SCRIPT, dtype=torch.long)
    for row, (ids, _) in enumerate(scripts):
        tokens[row, : len(ids)] = torch.tensor(ids)
    lengths = torch.tensor([len(ids) for ids, _ in scripts])
    after = torch.tensor([after for _, after in scripts])
    firsts = np.cumsum([0, *(len(group) for group in groups)])
    kinds = tuple((int(first), len(group)) for first, group in zip(firsts, groups))
    return Scripts(tokens, lengths, after, kinds)


class Writer:
    """B texts in the writing. All that changes from step to step is numbers in memory."""

    def __init__(
        self, target: FrozenTarget, scripts: Scripts, ends: Iterable[int], options: TextOptions
    ):
        self.target = target
        self.options = options
        device = target.weights.device
        self.scripts = scripts.to(device)
        self.ends = torch.tensor(sorted(ends), device=device)
        B = options.texts
        self.cache = Cache(target, B, options.longest)

        def whole(value: int = 0, *shape: int) -> Tensor:
            return torch.full((B, *shape), value, dtype=torch.long, device=device)

        self.time = torch.zeros(1, dtype=torch.long, device=device)
        self.start_B = whole()  # when the text began
        self.script_B = whole()
        self.place_B = whole()  # in the script
        self.asked_B = whole()  # tokens of the question so far
        self.ending_B = torch.ones(B, dtype=torch.bool, device=device)
        self.greedy_B = torch.zeros(B, dtype=torch.bool, device=device)
        self.token_B = whole()
        self.marks_B = whole()
        self.past_BP = whole(-1, PERIODS)
        self.runs_BP = whole(0, PERIODS)
        self.columns_C = torch.arange(options.longest, device=device)
        self.decide(whole())

    def step(self) -> None:
        """Run the token of every text and decide the next one."""
        longest = self.options.longest
        column = self.time % longest
        written = self.time - (column - self.columns_C) % longest  # when each column was
        seen = (written[None] >= self.start_B[:, None]) & (written[None] >= 0)
        logits = self.target.step(
            self.token_B, self.time - self.start_B, self.cache, column, seen
        ).float()
        noise = torch.empty_like(logits).exponential_().log_().neg_()
        asking_B = self.scripts.after_N[self.script_B] == ASK
        drawn_B = asking_B | ~self.greedy_B
        sample_B = (logits + noise * drawn_B[:, None]).argmax(-1)
        self.time += 1
        self.decide(sample_B)

    def decide(self, sample_B: Tensor) -> None:
        """The next token of every text: of its script, else the sample; where a text has ended,
        the first of another."""
        scripts = self.scripts
        new_B = self.ending_B.clone()
        self._begin_texts(new_B)
        scripted_B = self.place_B < scripts.lengths_N[self.script_B]
        place = self.place_B.clamp(max=LONGEST_SCRIPT - 1)
        token_B = torch.where(scripted_B, scripts.tokens_NT[self.script_B, place], sample_B)
        asking_B = ~scripted_B & (scripts.after_N[self.script_B] == ASK)
        answer_B = ~scripted_B & ~asking_B
        self.place_B += scripted_B
        self.asked_B += asking_B
        ended_B = (token_B[:, None] == self.ends).any(1)
        # A question that is over is followed by the answer header, which begins with its end.
        over_B = asking_B & (ended_B | (self.asked_B >= LONGEST_QUESTION))
        self.script_B.masked_fill_(over_B, 0)
        token_B = torch.where(over_B, scripts.tokens_NT[0, 0], token_B)
        self.place_B.masked_fill_(over_B, 1)
        self.asked_B.masked_fill_(over_B, 0)
        self.token_B.copy_(token_B)
        length_B = self.time + 1 - self.start_B
        looped_B = self._loops(token_B, answer_B)
        full_B = length_B >= self.options.longest
        self.ending_B.copy_(full_B | (answer_B & (ended_B | looped_B)))
        code_B = self.script_B >= scripts.kinds[3][0]
        self.marks_B.copy_(
            answer_B * ANSWER + new_B * BEGINS + self.greedy_B * GREEDY + code_B * CODE
        )

    def _begin_texts(self, new_B: Tensor) -> None:
        options = self.options
        kind_B = torch.rand_like(new_B, dtype=torch.float32)
        pick_B = torch.rand_like(kind_B)
        _, openings, given, code = self.scripts.kinds
        shares = [options.code * (code[1] > 0), options.given * (given[1] > 0)]
        if not openings[1]:
            shares = [1.0, 0.0]
        script_B = _pick(openings, pick_B)
        script_B = torch.where(kind_B < sum(shares), _pick(given, pick_B), script_B)
        script_B = torch.where(kind_B < shares[0], _pick(code, pick_B), script_B)
        self.script_B.copy_(torch.where(new_B, script_B, self.script_B))
        self.start_B.copy_(torch.where(new_B, self.time, self.start_B))
        greedy_B = torch.rand_like(kind_B) < options.greedy
        self.greedy_B.copy_(torch.where(new_B, greedy_B, self.greedy_B))
        for counter in (self.place_B, self.asked_B):
            counter.masked_fill_(new_B, 0)
        self.past_BP.masked_fill_(new_B[:, None], -1)
        self.runs_BP.masked_fill_(new_B[:, None], 0)

    def _loops(self, token_B: Tensor, answer_B: Tensor) -> Tensor:
        """Does a text repeat itself, with some period, for so long that nothing new will come?"""
        same_BP = (self.past_BP == token_B[:, None]) & answer_B[:, None]
        self.runs_BP.copy_((self.runs_BP + 1) * same_BP)
        self.past_BP.copy_(torch.cat([token_B[:, None], self.past_BP[:, :-1]], 1))
        periods_P = torch.arange(1, PERIODS + 1, device=token_B.device)
        return (self.runs_BP > PATIENCE * periods_P + 24).any(1)


def _pick(kind: tuple[int, int], u_B: Tensor) -> Tensor:
    first, count = kind
    return first + (u_B * count).long().clamp(max=max(0, count - 1))


@dataclass(frozen=True)
class OwnText:
    """Texts end to end: tokens, what is known of each, and where each text begins."""

    tokens: np.ndarray
    marks: np.ndarray

    def save(self, file: Path) -> None:
        np.savez(file, tokens=self.tokens, marks=self.marks)

    @classmethod
    def load(cls, file: Path) -> OwnText:
        with np.load(file) as stored:
            return cls(stored["tokens"], stored["marks"])

    def spans(self) -> np.ndarray:
        """(first, last + 1, first token of the answer) of every text with an answer, [N, 3]."""
        firsts = np.flatnonzero(self.marks & BEGINS)
        lasts = np.append(firsts[1:], len(self.tokens))
        answers = np.append(np.flatnonzero(self.marks & ANSWER), len(self.tokens))
        begun = answers[np.searchsorted(answers, firsts)]
        spans = np.stack([firsts, lasts, begun], 1)
        return spans[begun + 2 < lasts]

    def apart(self, spans: np.ndarray, held_out: np.ndarray) -> np.ndarray:
        """The spans without those whose prompt is also that of a held-out one: a greedy answer to
        the same prompt is the same text."""
        prompts = [self.tokens[first:begun].tobytes() for first, _, begun in spans]
        seen = {self.tokens[first:begun].tobytes() for first, _, begun in held_out}
        return spans[[prompt not in seen for prompt in prompts]]


def write_own_text(
    target: FrozenTarget,
    scripts: Scripts,
    ends: Iterable[int],
    options: TextOptions,
    report: Callable[[str], None] = lambda line: None,
) -> OwnText:
    """Write for as long as the options say. Texts that are unfinished at the end are kept as they
    are."""
    torch.manual_seed(options.seed)
    began = time.perf_counter()
    with torch.inference_mode():
        writer = Writer(target, scripts, ends, options)
        tokens, marks = _stream(writer, began, report)
    # Time goes along the first axis: a text is a column.
    return OwnText(
        tokens.T.reshape(-1).astype(np.int32), _begun(marks).T.reshape(-1).astype(np.uint8)
    )


def _begun(marks_TB: np.ndarray) -> np.ndarray:
    marks_TB[0] |= BEGINS
    return marks_TB


def _stream(
    writer: Writer, began: float, report: Callable[[str], None], chunk: int = 64
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and marks, [T, B] each."""
    options = writer.options
    kept_tokens: list[np.ndarray] = []
    kept_marks: list[np.ndarray] = []
    advance = _captured(writer) if writer.token_B.is_cuda else writer.step
    steps = 0
    while time.perf_counter() - began < options.seconds and steps * options.texts < options.most:
        tokens, marks = [], []
        for _ in range(chunk):
            tokens.append(writer.token_B.to(torch.int32))
            marks.append(writer.marks_B.to(torch.uint8))
            advance()
        kept_tokens.append(torch.stack(tokens).cpu().numpy())
        kept_marks.append(torch.stack(marks).cpu().numpy())
        steps += chunk
        if steps % (chunk * 16) == 0:
            rate = steps * options.texts / (time.perf_counter() - began)
            report(f"own text: {steps * options.texts:,} tokens, {rate:,.0f} a second")
    return np.concatenate(kept_tokens), np.concatenate(kept_marks)


def _captured(writer: Writer) -> Callable[[], None]:
    """One step as a CUDA graph; the plain step where it cannot be captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # they move the texts on, before anything is kept
            writer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            writer.step()
    except RuntimeError:
        torch.cuda.synchronize()
        return writer.step
    return graph.replay
