"""`/v1/responses`, in its text form: one input, one answer, nothing kept."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from forerun.requests.result import Result
from forerun.serve import answers
from forerun.serve.chat import Chat, plain_messages, submit
from forerun.serve.encoding import JsonResponse
from forerun.serve.errors import as_api_error, refused
from forerun.serve.forms import form_options
from forerun.serve.orders import How, how_to
from forerun.serve.server import check_key, client_of, server_of
from forerun.serve.sse import EventStream, begun, event, whole
from forerun.serve.streams import Ask, Decoding, Text, first_error
from forerun.serve.wire import ResponsesRequest, refuse_unsupported

router = APIRouter(dependencies=[Depends(check_key)])


@router.post("/v1/responses")
async def responses(body: ResponsesRequest, request: Request) -> Response:
    """Answer an input."""
    check(body)
    form = form_options(body, response_format(body))
    server = server_of(request)
    how = await how_to(server.models, body, logprobs=body.top_logprobs, **form)
    chat = Chat(messages_of(body), body.max_output_tokens)
    ask = Ask(
        partial(submit, body, chat, how),
        body.model,
        1,
        client_of(request),
        "resp",
        body.forerun,
    )
    decoding = await begun(request, server.decodings, ask)
    shape = Responses(decoding, body, how)
    if body.stream:
        return EventStream(decoding, shape.stream())
    return JsonResponse(shape.response(await whole(request, decoding)))


def check(body: ResponsesRequest) -> None:
    """Refuse what would change the answer and cannot be done."""
    refuse_unsupported(body)
    if body.tools:
        raise refused("tools are not supported here: use chat completions.", "tools", "unsupported")
    if body.samples != 1:
        raise refused("n must be 1: a response is one answer.", "n")
    if body.max_output_tokens == 0:
        raise refused("max_output_tokens=0 must be 1 or more.", "max_output_tokens")


def text_format(body: ResponsesRequest) -> Any:
    """The form that was asked for, as it was."""
    asked = (body.text or {}).get("format")
    return {"type": "text"} if asked is None else asked


def response_format(body: ResponsesRequest) -> Any:
    """The same as chats have it: there a schema and its name stand one level deeper."""
    asked = text_format(body)
    if isinstance(asked, dict) and asked.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": asked}
    return asked


def messages_of(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Instructions and input as messages."""
    first = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if isinstance(body.input, str):
        return [*first, {"role": "user", "content": body.input}]
    items = []
    for number, item in enumerate(body.input):
        if item.get("type", "message") != "message":
            kind = item.get("type")
            raise refused(f"input[{number}] is of type {kind!r}: only messages are read.", "input")
        items.append({"role": item.get("role"), "content": item.get("content")})
    if not items:
        raise refused("input is empty: say something.", "input")
    return [*first, *plain_messages(items)]


@dataclass
class Responses:
    """Answers in the shape of `response`."""

    decoding: Decoding
    body: ResponsesRequest
    how: How

    @property
    def _item_id(self) -> str:
        return f"msg_{self.decoding.id.partition('-')[2]}"

    def _base(self, status: str) -> dict[str, Any]:
        sampling = self.how.sampling
        return {
            "id": self.decoding.id,
            "object": "response",
            "created_at": self.decoding.created,
            "status": status,
            "model": self.decoding.served.id,
            "error": None,
            "incomplete_details": None,
            "instructions": self.body.instructions,
            "max_output_tokens": self.body.max_output_tokens,
            "metadata": self.body.metadata if isinstance(self.body.metadata, dict) else {},
            "output": [],
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": sampling["temperature"],
            "text": {"format": text_format(self.body)},
            "tool_choice": "none",
            "tools": [],
            "top_p": sampling.get("top_p", 1.0),
            "truncation": "disabled",
            "usage": None,
        }

    def _part(self, text: str, logprobs: Any = None) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}

    def _item(self, status: str, parts: list[Any]) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": parts,
        }

    def response(self, results: list[list[Result]]) -> dict[str, Any]:
        [[result]] = results
        done = answers.finish_reason(self.decoding, result) == "stop"
        status = "completed" if done else "incomplete"
        logprobs = None
        if result.logprobs is not None:
            told = answers.chat_logprobs(self.decoding.model.tokenizer, result.logprobs)
            logprobs = told["content"]
        told_usage = answers.usage(results)
        return {
            **self._base(status),
            "incomplete_details": None if done else {"reason": "max_output_tokens"},
            "output": [self._item(status, [self._part(result.text, logprobs)])],
            "usage": {
                "input_tokens": told_usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": told_usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": told_usage["total_tokens"],
            },
            "forerun": answers.about(self.decoding, results, self.how.sampling["seed"]),
        }

    async def stream(self) -> AsyncIterator[bytes]:
        """The events of a response, numbered."""
        numbers = count()

        def told(kind: str, **values: Any) -> bytes:
            return event({"type": kind, "sequence_number": next(numbers), **values}, kind)

        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        yield told("response.created", response=self._base("in_progress"))
        yield told("response.in_progress", response=self._base("in_progress"))
        item = self._item("in_progress", [])
        yield told("response.output_item.added", output_index=0, item=item)
        yield told("response.content_part.added", **place, part=self._part(""))
        try:
            async for each in self.decoding:
                if isinstance(each, Text):
                    yield told("response.output_text.delta", **place, delta=each.text, logprobs=[])
            results = await self.decoding.results()
            if (failed := first_error(results)) is not None:
                raise failed
        except Exception as error:
            known = as_api_error(error)
            wrong = {"code": known.code or "server_error", "message": known.message}
            yield told("response.failed", response={**self._base("failed"), "error": wrong})
            yield told("error", **known.body()["error"] | {"type": "error"})
            return
        done = self.response(results)
        [finished] = done["output"]
        [part] = finished["content"]
        yield told("response.output_text.done", **place, text=part["text"], logprobs=[])
        yield told("response.content_part.done", **place, part=part)
        yield told("response.output_item.done", output_index=0, item=finished)
        yield told(f"response.{done['status']}", response=done)
