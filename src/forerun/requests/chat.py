"""A conversation: its messages, and the tokens that stand for them so far."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from forerun.errors import BadOption
from forerun.requests.jobs import Stream
from forerun.requests.model import DecodableModel
from forerun.requests.prompts import Message, chat_text, check_template, encode
from forerun.requests.result import Result


class ChattingModel(DecodableModel, Protocol):
    """A model that answers."""

    def generate(self, prompt: Sequence[int], **options: Any) -> Any: ...

    async def agenerate(self, prompt: Sequence[int], **options: Any) -> Any: ...

    def stream(self, prompt: Sequence[int], **options: Any) -> Stream: ...


class Chat:
    """A conversation of several turns.

    A turn goes on from the very tokens of the turns before it, so that a lane whose cache still
    holds them computes only what is new. `messages` may be read, and changed between turns.
    """

    def __init__(
        self,
        model: ChattingModel,
        messages: Sequence[Message],
        template: Mapping[str, Any],
        options: Mapping[str, Any],
    ):
        check_template(model)
        self.model = model
        self.messages: list[Message] = list(messages)
        self._template = template
        self._options = options
        self._text = ""  # what the tokens say
        self._ids: list[int] = []

    def send(self, message: str | Message, **options: Any) -> Result:
        """Say something, and wait for the answer. The options are those of `generate`, for this
        turn."""
        text, ids = self._prompt(message)
        result: Result = self.model.generate(ids, **{**self._options, **options})
        self._answered(message, text, result)
        return result

    async def asend(self, message: str | Message, **options: Any) -> Result:
        """`send` for an event loop."""
        text, ids = self._prompt(message)
        result: Result = await self.model.agenerate(ids, **{**self._options, **options})
        self._answered(message, text, result)
        return result

    def stream(self, message: str | Message, **options: Any) -> Iterator[str]:
        """Say something, and have the answer piece by piece. Both become part of the conversation
        once the answer is complete."""
        text, ids = self._prompt(message)
        stream = self.model.stream(ids, **{**self._options, **options})
        yield from map(str, stream)
        self._answered(message, text, stream.results[0])

    def _prompt(self, message: str | Message) -> tuple[str, list[int]]:
        """The conversation up to here as text and as tokens."""
        text = chat_text(self.model, [*self.messages, _said(message)], self._template)
        if self._text and text.startswith(self._text):
            return text, self._ids + encode(self.model, text[len(self._text) :], special=False)
        return text, encode(self.model, text, special=False)

    def _answered(self, message: str | Message, text: str, result: Result) -> None:
        self.messages += [_said(message), {"role": "assistant", "content": result.text}]
        assert self.model.tokenizer is not None, "checked"
        self._ids = result.prompt_ids + result.token_ids
        self._text = text + self.model.tokenizer.decode(
            result.token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


def _said(message: str | Message) -> Message:
    if isinstance(message, str):
        return {"role": "user", "content": message}
    if not isinstance(message, Mapping):
        raise BadOption(f"message={message!r} must be a text or {{'role': ..., 'content': ...}}.")
    return message
