"""Answers as completions and as chats: whole, and piece by piece."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from forerun.requests.result import Result
from forerun.requests.scoring import with_texts
from forerun.requests.tools import TAGGED, ToolFormat
from forerun.sequence.logprobs import TokenLogprob
from forerun.serve import answers
from forerun.serve.encoding import encoded
from forerun.serve.forms import Message, message_of
from forerun.serve.orders import How
from forerun.serve.sse import event
from forerun.serve.streams import Decoding, Traced
from forerun.serve.wire import CompletionRequest, Prompt, Sampled

PLACE = "\0text"  # stands for the text in a template


@dataclass
class Answer(ABC):
    """What completions and chats have in common: a head, choices, usage, and what is ours."""

    decoding: Decoding
    body: Sampled
    how: How
    _told: dict[int, int] = field(default_factory=dict)  # log-probabilities sent, by sequence
    _around: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    end_mark = b"data: [DONE]\n\n"

    @abstractmethod
    def choice(self, index: int, result: Result) -> dict[str, Any]:
        """One sequence of a whole answer."""

    @abstractmethod
    def content(self, text: str) -> dict[str, Any]:
        """A piece of text in a chunk."""

    @abstractmethod
    def last_content(self) -> dict[str, Any]:
        """What a chunk has in its place that says how a sequence ended."""

    @abstractmethod
    def logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Log-probabilities of some tokens."""

    @abstractmethod
    def opening(self) -> Iterable[Any]:
        """Chunks before the first piece."""

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.decoding.id,
            "object": kind,
            "created": self.decoding.created,
            "model": self.decoding.served.id,
        }

    def usage(self, results: list[list[Result]]) -> dict[str, Any]:
        return answers.usage(results, self.how.prediction is not None)

    def _about(self, results: list[list[Result]]) -> dict[str, Any]:
        return answers.about(self.decoding, results, self.how.sampling["seed"])

    @property
    def tokenizer(self) -> Any:
        return self.decoding.model.tokenizer

    @property
    def wants_logprobs(self) -> bool:
        return self.how.sampling.get("logprobs") is not None

    def whole(self, results: list[list[Result]]) -> dict[str, Any]:
        flat = [result for group in results for result in group]
        return {
            **self._head(self.whole_object),
            "choices": [self.choice(index, result) for index, result in enumerate(flat)],
            "usage": self.usage(results),
            "forerun": self._about(results),
        }

    def finish(self, result: Result) -> str:
        return answers.finish_reason(self.decoding, result)

    # What follows writes a stream.

    def chunk(
        self, index: int, content: dict[str, Any], logprobs: Any = None, reason: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}
        chunk = {**self._head(self.chunk_object), "choices": [choice]}
        if self.body.wants_usage:
            counts = answers.usage_so_far(*self.decoding.tokens_so_far())
            chunk["usage"] = counts if self.body.counts_on else None
        return chunk

    def pieces(self, index: int, text: str) -> Iterable[Any]:
        if self.wants_logprobs or self.body.counts_on:
            yield self.chunk(index, self.content(text), self._new_logprobs(index))
            return
        head, tail = self._around.get(index) or self._template(index)
        yield head + encoded(text) + tail

    def _template(self, index: int) -> tuple[bytes, bytes]:
        """A chunk before and after its text: all else in it stays the same."""
        written = event(self.chunk(index, self.content(PLACE)))
        head, _, tail = written.rpartition(encoded(PLACE))  # the model's name comes before it
        self._around[index] = (head, tail)
        return head, tail

    def _new_logprobs(self, index: int) -> dict[str, Any] | None:
        """Those of tokens that came since the last chunk."""
        if not self.wants_logprobs or index >= len(self.decoding.sequences()):
            return None
        start = self._told.get(index, 0)
        new = self.decoding.sequences()[index].seq.logprobs.entries[start:]
        self._told[index] = start + len(new)
        return self.logprobs(with_texts(self.decoding.model, new))

    def closing(self, results: list[list[Result]]) -> Iterable[Any]:
        flat = [result for group in results for result in group]
        for index, result in enumerate(flat):
            logprobs = self._new_logprobs(index)
            last = self.chunk(index, self.last_content(), logprobs, self.finish(result))
            if index == len(flat) - 1:
                last["forerun"] = self._about(results)
            yield last
        if self.body.wants_usage:
            head = self._head(self.chunk_object)
            yield {**head, "choices": [], "usage": self.usage(results)}

    def trace(self, traced: Traced) -> dict[str, Any]:
        told = {"event": self.decoding.told(traced)}
        return {**self._head(self.chunk_object), "choices": [], "forerun": told}


@dataclass
class ChatCompletions(Answer):
    """Answers in the shape of `chat.completion`."""

    whole_object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"

    def choice(self, index: int, result: Result) -> dict[str, Any]:
        told = self.logprobs(result.logprobs or []) if self.wants_logprobs else None
        return {
            "index": index,
            "message": {"role": "assistant", "content": result.text, "refusal": None},
            "logprobs": told,
            "finish_reason": self.finish(result),
        }

    def content(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def last_content(self) -> dict[str, Any]:
        return {"delta": {}}

    def logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return answers.chat_logprobs(self.tokenizer, entries)

    def opening(self) -> Iterable[Any]:
        for index in range(len(self.decoding.jobs)):
            yield self.chunk(index, {"delta": {"role": "assistant", "content": ""}})


@dataclass
class ChatWithTools(ChatCompletions):
    """Answers that may call tools."""

    form: ToolFormat = TAGGED
    _messages: dict[int, Message] = field(default_factory=dict)  # of a stream, by sequence

    def choice(self, index: int, result: Result) -> dict[str, Any]:
        message = message_of(result.text, self.form).as_dict()
        return {**super().choice(index, result), "message": message}

    def finish(self, result: Result) -> str:
        reason = super().finish(result)
        called = reason == "stop" and message_of(result.text, self.form).complete
        return "tool_calls" if called else reason

    def pieces(self, index: int, text: str) -> Iterable[Any]:
        message = self._messages.setdefault(index, Message(self.form))
        for delta in message.push(text):
            yield self.chunk(index, {"delta": delta}, self._new_logprobs(index))

    def closing(self, results: list[list[Result]]) -> Iterable[Any]:
        for index, message in self._messages.items():
            for delta in message.finish():
                yield self.chunk(index, {"delta": delta}, self._new_logprobs(index))
        yield from super().closing(results)


def listed(prompt: Prompt | list[Prompt] | None) -> list[Prompt]:
    """The prompts that were sent, one or several. Nothing at all is a text that is still empty."""
    if prompt is None or isinstance(prompt, str):
        return [prompt or ""]
    if prompt and isinstance(prompt[0], int):
        return [prompt]
    return prompt or [""]  # type: ignore[return-value]


@dataclass
class Completions(Answer):
    """Answers in the shape of `text_completion`. Prompts may be echoed; with max_tokens=0, nothing
    else is told."""

    body: CompletionRequest

    whole_object: ClassVar[str] = "text_completion"
    chunk_object: ClassVar[str] = "text_completion"

    @property
    def _silent(self) -> bool:
        return self.body.max_tokens == 0

    def _prompt(self, index: int) -> str:
        """The text of a sequence's prompt, to be echoed."""
        prompt = listed(self.body.prompt)[index // self.body.samples]
        return prompt if isinstance(prompt, str) else self.decoding.model.decode(prompt, True)

    def choice(self, index: int, result: Result) -> dict[str, Any]:
        echoed = self._prompt(index) if self.body.echo else ""
        return {
            "index": index,
            "text": echoed + ("" if self._silent else result.text),
            "logprobs": self._all_logprobs(result) if self.wants_logprobs else None,
            "finish_reason": self.finish(result),
        }

    def _all_logprobs(self, result: Result) -> dict[str, Any]:
        entries: list[TokenLogprob | None] = list(result.prompt_logprobs or [])
        ids = list(result.prompt_ids) if self.body.echo else []
        if not self._silent:
            written = result.logprobs or []
            if self.body.echo and written:
                # A token that heals the prompt's end is told whole: no other has its first bytes.
                bare: TokenLogprob = {**written[0]}
                bare.pop("text", None)
                written = [*with_texts(self.decoding.model, [bare]), *written[1:]]
            entries += written
            ids += [entry["token"] for entry in written]
        return answers.completion_logprobs(self.tokenizer, entries, ids)

    def usage(self, results: list[list[Result]]) -> dict[str, Any]:
        told = super().usage(results)
        if self._silent:
            told |= answers.usage_so_far(told["prompt_tokens"], 0)
        return told

    def content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def pieces(self, index: int, text: str) -> Iterable[Any]:
        return () if self._silent else super().pieces(index, text)

    def last_content(self) -> dict[str, Any]:
        return {"text": ""}

    def logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        ids = [entry["token"] for entry in entries]
        return answers.completion_logprobs(self.tokenizer, entries, ids)

    def opening(self) -> Iterable[Any]:
        if self.body.echo:
            for index in range(len(self.decoding.jobs)):
                yield self.chunk(index, {"text": self._prompt(index)})
