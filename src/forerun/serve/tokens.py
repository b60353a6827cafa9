"""`/tokenize`, `/detokenize`, and what is not here: `/v1/embeddings`."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from forerun.api import Model
from forerun.requests.prompts import chat_text, check_ids, check_template
from forerun.serve.chat import plain_messages
from forerun.serve.encoding import JsonResponse
from forerun.serve.errors import refused
from forerun.serve.server import check_key, server_of
from forerun.serve.wire import DetokenizeRequest, EmbeddingsRequest, TokenizeRequest

router = APIRouter(dependencies=[Depends(check_key)])


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Text, or messages, as token ids."""
    _, model = await server_of(request).models.loaded(body.model)
    return JsonResponse(await asyncio.to_thread(tokenized, body, model))


def tokenized(body: TokenizeRequest, model: Model) -> dict[str, Any]:
    if (body.prompt is None) == (body.messages is None):
        raise refused("give either a prompt or messages, not both and not neither.", "prompt")
    special = body.add_special_tokens
    text = body.prompt or ""
    if body.messages is not None:
        check_template(model)
        options = {"add_generation_prompt": body.add_generation_prompt}
        text = chat_text(model, plain_messages(body.messages), options)
        special = False
    ids = model.encode(text, special=special)
    names = None
    if body.return_token_strs and model.tokenizer is not None:
        names = model.tokenizer.convert_ids_to_tokens(ids)
    told = {"tokens": ids, "count": len(ids), "max_model_len": model.context}
    return {**told, "token_strs": names}


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Token ids as text."""
    _, model = await server_of(request).models.loaded(body.model)
    check_ids(body.tokens, model)
    return JsonResponse({"prompt": await asyncio.to_thread(model.decode, body.tokens, True)})


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingsRequest) -> Response:
    """Refused: these models decode, and have no embeddings to offer."""
    raise refused("embeddings are not offered here: these models decode.", code="unsupported")
