"""From what a benchmark asks to requests of one model: token ids, stop strings, holes.

A chat template is used where the model has one and the item has a chat. A hole is filled by models
that fill blanks. A left-to-right model gets prefix and suffix in its own tokens for filling in the
middle, if its tokenizer has some, else only the prefix.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from forerun.api import Model
from forerun.errors import BadOption
from forerun.evaluate.benchmarks.base import Answer, Fill, Item, Message, Write, seed_of
from forerun.evaluate.tasks import Gapped, MethodChoice, with_gap
from forerun.families.any_subset import SubsetScorer
from forerun.families.masked import CanvasFiller
from forerun.requests.infill import Infilled
from forerun.requests.jobs import Jobs
from forerun.requests.prompts import chat_text
from forerun.requests.result import Result

# Tokens for filling in the middle: before the prefix, before the suffix, before what is missing.
MIDDLE_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
)
MIDDLE_ENDS = (
    "<|endoftext|>",
    "<|fim_pad|>",
    "<|file_sep|>",
    "<|repo_name|>",
    "<|file_separator|>",
)
PER_LINE = 32  # tokens that a left-to-right model may write for a line or a sentence
SENTENCE_END = re.compile(r"[.!?][\"')\]]*(?=\s|$)")


@dataclass(frozen=True)
class Style:
    """How items are asked and answers decoded: all that answers hang on, besides model, method and
    data."""

    temperature: float = 0.0
    samples: int = 1
    seed: int = 0
    chat: bool = True  # use a chat template where there is one
    max_tokens: int | None = None  # None: as the benchmark says


@dataclass(frozen=True)
class Request:
    """One answer that is wanted: the prompt's ids, or a canvas with a hole."""

    item: Item
    sample: int
    ids: Gapped
    max_tokens: int
    hole: bool = False
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    chatted: bool = False
    middle: bool = False  # was the suffix shown?
    lead: str = ""  # white space of the prefix that the model is left to write
    before: str = ""  # the conversation so far

    @property
    def prompt(self) -> list[int]:
        return [token for token in self.ids if token is not None]

    @property
    def digest(self) -> str:
        """A name for what was asked: an answer is another one if this is."""
        numbers = np.array([-1 if token is None else token for token in self.ids], np.int64)
        said = f"{self.max_tokens} {self.stop} {self.stop_ids}".encode()
        return hashlib.sha256(numbers.tobytes() + said).hexdigest()[:12]

    @property
    def group(self) -> tuple[Any, ...]:
        """Requests of one group go to the model in one call."""
        return (self.hole, self.stop, self.stop_ids, self.sample if self.hole else 0)


def fills_blanks(model: Model) -> bool:
    return model.family.can(SubsetScorer) or model.family.can(CanvasFiller)


def has_template(model: Model) -> bool:
    return bool(getattr(model.tokenizer, "chat_template", None))


def request_for(
    model: Model, item: Item, sample: int, style: Style, before: Sequence[Message] = ()
) -> Request | None:
    """The request of an item; None if it does not fit the model's context. `before` is the
    conversation so far."""
    ask = item.ask
    if isinstance(ask, Fill):
        request = _filling(model, item, sample, ask)
    elif isinstance(ask, Write):
        request = _writing(model, item, sample, ask, style, before)
    else:
        raise BadOption(f"item {item.id!r} asks for no text.")
    if request.hole:
        return request if len(request.ids) <= model.context else None
    most = style.max_tokens or request.max_tokens
    room = min(most, model.context - len(request.ids))
    return with_room(request, room) if room > 0 else None


def with_room(request: Request, room: int) -> Request:
    return Request(**{**vars(request), "max_tokens": room})


def _writing(
    model: Model,
    item: Item,
    sample: int,
    ask: Write,
    style: Style,
    before: Sequence[Message],
) -> Request:
    said = "".join(f"{message['role']}: {message['content']}\n\n" for message in before)
    if style.chat and ask.chat and has_template(model):
        text = chat_text(model, [*before, *ask.chat], {}) + ask.opening
        ids = model.encode(text, special=False)
        stop = ask.chat_stop
        chatted = True
    else:
        ids = model.encode(said + ask.prompt)
        stop = ask.stop
        chatted = False
    return Request(item, sample, [*ids], ask.max_tokens, stop=stop, chatted=chatted, before=said)


def _filling(model: Model, item: Item, sample: int, ask: Fill) -> Request:
    if fills_blanks(model):
        start = len(ask.prefix)
        whole = ask.prefix + ask.truth + ask.suffix
        canvas = with_gap(model, whole, start, start + len(ask.truth))
        return Request(item, sample, canvas, len(canvas), hole=True)
    tokens = middle_tokens(model)
    if tokens is None:
        # White space at the end of a text would be an odd token to go on from.
        prefix = ask.prefix.rstrip() or ask.prefix
        most = min(ask.max_tokens, PER_LINE * (ask.ends[1] + 1))
        lead = ask.prefix[len(prefix) :]
        return Request(item, sample, [*model.encode(prefix)], most, lead=lead)
    before, after, middle, _ = tokens
    stop = ("\n",) if ask.ends == ("lines", 1) else ()
    text = before + ask.prefix + after + ask.suffix + middle
    ids = model.encode(text, special=False)
    ends = tokens.ends
    return Request(item, sample, [*ids], ask.max_tokens, stop=stop, stop_ids=ends, middle=True)


class MiddleTokens(NamedTuple):
    """The tokens of a tokenizer for filling in the middle."""

    before: str
    after: str
    middle: str
    ends: tuple[int, ...]


def middle_tokens(model: Model) -> MiddleTokens | None:
    """Those that a model's tokenizer has, looked up once: to list a vocabulary takes long."""
    vocabulary = model.vocabulary
    if vocabulary is None or vocabulary.tokenizer is None:
        return None
    return vocabulary.once("middle tokens", lambda: _middle_tokens(vocabulary.tokenizer))


def _middle_tokens(tokenizer: Any) -> MiddleTokens | None:
    known = tokenizer.get_vocab()
    ends = tuple(known[end] for end in MIDDLE_ENDS if end in known)
    found = next((t for t in MIDDLE_TOKENS if all(one in known for one in t)), None)
    return None if found is None else MiddleTokens(*found, ends)


def submit(model: Model, choice: MethodChoice, requests: Sequence[Request], style: Style) -> Jobs:
    """Have requests of one group served; they are answered in their order."""
    first = requests[0]
    common: dict[str, Any] = {
        "method": choice.method,
        "draft": choice.draft,
        "temperature": style.temperature,
        **choice.options,
    }
    if first.hole:
        seed = seed_of(style.seed, "holes", first.sample)
        canvases = [list(one.ids) for one in requests]
        return model.submit_infill(token_ids=canvases, seed=seed, **common)
    return model.submit(
        [one.prompt for one in requests],
        seed=[seed_of(style.seed, one.item.id, one.sample) for one in requests],
        max_tokens=[one.max_tokens for one in requests],
        stop=first.stop,
        stop_token_ids=first.stop_ids,
        **common,
    )


def answer_of(request: Request, result: Result) -> Answer:
    """What a result says to the item's question."""
    if isinstance(result, Infilled):
        return Answer("".join(result.fills), whole=result.text)
    text = result.text
    if isinstance(request.item.ask, Fill):
        text = without_lead(text, request.lead)
        whole = request.middle and result.finish_reason == "stop"
        text = text if whole else cut(text, *request.item.ask.ends)
    return Answer(text, chatted=request.chatted, before=request.before)


def without_lead(text: str, lead: str) -> str:
    """A text without the white space that belongs to what comes before it."""
    for character in lead:
        if not text.startswith(character):
            break
        text = text[1:]
    return text


def cut(text: str, what: str, count: int) -> str:
    """The first lines or sentences of a text."""
    if what == "lines":
        return "\n".join(text.split("\n")[:count])
    ends = [found.end() for found in SENTENCE_END.finditer(text)]
    return (text[: ends[count - 1]] if len(ends) >= count else text).strip()


def conversation(
    items: Mapping[str, Item], answers: Mapping[str, str], item: Item
) -> list[Message]:
    """What was said before an item, with the model's own answers."""
    said: list[Message] = []
    earlier = item.after
    while earlier is not None:
        one = items[earlier]
        assert isinstance(one.ask, Write)
        reply: Message = {"role": "assistant", "content": answers[earlier]}
        said = [*one.ask.chat, reply, *said]
        earlier = one.after
    return said
