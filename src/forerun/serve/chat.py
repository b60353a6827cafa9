"""`/v1/chat/completions`: messages through a model's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from forerun.api import Model
from forerun.requests.jobs import Jobs
from forerun.requests.prompts import check_template
from forerun.serve.encoding import JsonResponse
from forerun.serve.errors import refused
from forerun.serve.forms import Tools, call_format, form_options, tools_of
from forerun.serve.orders import (
    How,
    check_fits,
    check_sequences,
    how_to,
    prompt_ids,
    submit_prompts,
)
from forerun.serve.server import check_key, client_of, server_of
from forerun.serve.shapes import ChatCompletions, ChatWithTools
from forerun.serve.sse import EventStream, begun, streamed, whole
from forerun.serve.streams import Ask
from forerun.serve.wire import ChatRequest, Sampled, refuse_unsupported

router = APIRouter(dependencies=[Depends(check_key)])

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
NOT_FOR_CLIENTS = {
    "chat_template",
    "conversation",
    "max_length",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
}
TEXT_PARTS = ("text", "input_text", "output_text")


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    refuse_unsupported(body)
    form = form_options(body, body.response_format)
    tools = tools_of(body)
    server = server_of(request)
    check_sequences(body.samples, server.settings.max_sequences)
    prediction = body.prediction.text if body.prediction is not None else None
    how = await how_to(server.models, body, prediction, logprobs=alternatives(body), **form)
    chat = Chat(
        plain_messages(body.messages),
        most_tokens(body),
        template_options(body),
        tools,
    )
    ask = Ask(
        partial(submit, body, chat, how),
        body.model,
        body.samples,
        client_of(request),
        "chatcmpl",
        body.forerun,
    )
    decoding = await begun(request, server.decodings, ask)
    shape = ChatCompletions(decoding, body, how)
    if tools is not None:
        shape = ChatWithTools(decoding, body, how, form=call_format(decoding.model))
    if body.stream:
        traces = body.forerun.trace == "stream"
        return EventStream(decoding, streamed(decoding, shape, traces))
    return JsonResponse(shape.whole(await whole(request, decoding)))


@dataclass(frozen=True)
class Chat:
    """A conversation, how long the answer may be, options of the template, and tools."""

    messages: Sequence[Mapping[str, Any]]
    max_tokens: int | None
    template: Mapping[str, Any] = field(default_factory=dict)
    tools: Tools | None = None


def template_options(body: ChatRequest) -> dict[str, Any]:
    """What a client tells the template. The template itself, and what becomes of its text, are not
    the client's."""
    given = body.chat_template_kwargs or {}
    for name in NOT_FOR_CLIENTS & given.keys():
        raise refused(f"chat_template_kwargs must not hold {name}.", "chat_template_kwargs")
    return given


def alternatives(body: ChatRequest) -> int | None:
    """How many alternatives of each token are told; None: no log-probabilities."""
    if not body.logprobs:
        if body.top_logprobs:
            raise refused("top_logprobs needs logprobs=true.", "top_logprobs")
        return None
    return body.top_logprobs or 0


def most_tokens(body: ChatRequest) -> int | None:
    """Two names of one limit; the newer one counts."""
    limits = [body.max_completion_tokens, body.max_tokens]
    found = next((limit for limit in limits if limit is not None), None)
    if found == 0:
        raise refused("max_completion_tokens=0 must be 1 or more.", "max_completion_tokens")
    return found


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates know them: text in one piece, and no role that only OpenAI has."""
    found = []
    for number, message in enumerate(messages):
        role = message.get("role")
        if role not in ROLES:
            raise refused(f"messages[{number}].role={role!r} is none of {', '.join(ROLES)}.")
        text = plain_text(message.get("content"), f"messages[{number}].content")
        named = "system" if role == "developer" else role
        calls = plain_calls(message.get("tool_calls"))
        found.append({**message, **calls, "role": named, "content": text})
    return found


def plain_calls(calls: Any) -> dict[str, Any]:
    """Earlier calls as templates know them: their arguments are values, and not JSON."""
    if not isinstance(calls, list):
        return {}
    return {"tool_calls": [_with_values(call) for call in calls]}


def _with_values(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        values = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call  # what a model wrote may be anything
    return {**call, "function": {**function, "arguments": values}}


def plain_text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refused(f"{where} must be text, or a list of parts.", "messages")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
            raise refused(f"{where} has a part of type {kind!r}: only text is read.", "messages")
        texts.append(part["text"])
    return "".join(texts)


def submit(body: Sampled, chat: Chat, how: How, model: Model) -> Jobs:
    """Hand the conversation to the engine. Without a limit, an answer may fill the context."""
    check_template(model)
    arguments = how.arguments(model)
    template = dict(chat.template)
    if chat.tools is not None:
        arguments = chat.tools.constrain(model, arguments)
        template["tools"] = chat.tools.tools
    ids = prompt_ids(model, None, list(chat.messages), template)
    check_fits(model, ids, chat.max_tokens)
    room = model.context - len(ids[0])
    return submit_prompts(
        model,
        ids,
        max_tokens=chat.max_tokens or room,
        streams=bool(body.stream),
        traces=body.forerun.trace == "stream",
        **arguments,
    )
