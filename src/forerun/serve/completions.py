"""`/v1/completions`: prompts as text or token ids."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from forerun.api import Model
from forerun.requests.jobs import Jobs
from forerun.serve import fill
from forerun.serve.encoding import JsonResponse
from forerun.serve.errors import refused
from forerun.serve.forms import check_free, form_options
from forerun.serve.orders import (
    DEFAULT_COMPLETION,
    How,
    check_fits,
    check_sequences,
    how_to,
    prompt_ids,
    submit_prompts,
)
from forerun.serve.server import check_key, client_of, server_of
from forerun.serve.shapes import Completions, listed
from forerun.serve.sse import EventStream, begun, streamed, whole
from forerun.serve.streams import Ask
from forerun.serve.wire import CompletionRequest, Prompt, refuse_unsupported

router = APIRouter(dependencies=[Depends(check_key)])


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue prompts, or fill the gap before a suffix."""
    refuse_unsupported(body)
    form = form_options(body, body.response_format)
    if body.suffix is not None:
        check_free(form, "suffix")
        return await fill.completion(body, request)
    check_echo(body)
    server = server_of(request)
    prompts = listed(body.prompt)
    check_sequences(len(prompts) * body.samples, server.settings.max_sequences)
    prediction = body.prediction.text if body.prediction is not None else None
    how = await how_to(server.models, body, prediction, logprobs=body.logprobs, **form)
    ask = Ask(
        partial(submit, body, prompts, how),
        body.model,
        len(prompts) * body.samples,
        client_of(request),
        "cmpl",
        body.forerun,
    )
    decoding = await begun(request, server.decodings, ask)
    shape = Completions(decoding, body, how)
    if body.stream:
        traces = body.forerun.trace == "stream"
        return EventStream(decoding, streamed(decoding, shape, traces))
    return JsonResponse(shape.whole(await whole(request, decoding)))


def check_echo(body: CompletionRequest) -> None:
    if body.max_tokens == 0 and not body.echo:
        raise refused("max_tokens=0 writes nothing: use echo, or 1 or more.", "max_tokens")
    if body.echo and body.stream and body.logprobs is not None:
        raise refused("echo with logprobs comes whole: leave stream out.", "stream")


def submit(body: CompletionRequest, prompts: list[Prompt], how: How, model: Model) -> Jobs:
    """Hand the prompts to the engine."""
    ids = prompt_ids(model, prompts)
    longest = max(map(len, ids))
    max_tokens = body.max_tokens
    if max_tokens is None:
        max_tokens = min(DEFAULT_COMPLETION, max(1, model.context - longest))
    max_tokens = max(1, max_tokens)  # for 0, a token is decoded and not told
    check_fits(model, ids, max_tokens)
    return submit_prompts(
        model,
        ids,
        max_tokens=max_tokens,
        streams=bool(body.stream),
        traces=body.forerun.trace == "stream",
        prompt_logprobs=body.logprobs if body.echo else None,
        **how.arguments(model),
    )
