"""Text with gaps: `suffix`, Mistral's `/v1/fim/completions`, llama.cpp's `/infill`, and our own
`/v1/infill`.

Any-subset and masked models look at what comes after a gap: they really fill it. Left-to-right
models do it through the fill-in-the-middle tokens that some of them were trained with. Others
refuse, and say which model could.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from forerun.api import Model
from forerun.requests.infill import EDITOR_LENGTHS, Infilled, parse_ids, parse_text, read_texts
from forerun.requests.jobs import Jobs
from forerun.requests.prompts import Tokenised, encode
from forerun.requests.result import Result
from forerun.serve import answers
from forerun.serve.encoding import JsonResponse
from forerun.serve.errors import refused
from forerun.serve.fim import fim_prompt, fim_tokens
from forerun.serve.models import fills_holes
from forerun.serve.orders import (
    FILL_OPTIONS,
    How,
    check_fits,
    check_sequences,
    how_to,
    submit_prompts,
)
from forerun.serve.server import check_key, client_of, server_of
from forerun.serve.shapes import ChatCompletions, Completions, listed
from forerun.serve.sse import EventStream, Shape, begun, streamed, whole
from forerun.serve.streams import Ask, Decoding, Traced
from forerun.serve.wire import (
    CompletionRequest,
    FimRequest,
    InfillRequest,
    LlamaInfillRequest,
    Sampled,
    refuse_unsupported,
)

router = APIRouter(dependencies=[Depends(check_key)])

DEFAULT_FILL = 64  # tokens
SUFFIX_FILL = 16  # as completions have it


@dataclass(frozen=True)
class Gap:
    """What comes before and after it, and the most tokens that it may hold."""

    prefix: str
    suffix: str
    max_tokens: int


@dataclass(frozen=True)
class GapRequest:
    """Gaps to fill, all in the same way."""

    gaps: Sequence[Gap]
    body: Sampled
    kind: str
    logprobs: int | None = None

    @property
    def stops(self) -> list[str]:
        stop = self.body.stop or []
        return [stop] if isinstance(stop, str) else stop


async def completion(body: CompletionRequest, request: Request) -> Response:
    """`/v1/completions` with a suffix."""
    if body.echo or body.prediction is not None:
        name = "echo" if body.echo else "prediction"
        raise refused(f"{name} cannot be had together with suffix.", name, "unsupported")
    prompts = listed(body.prompt)
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise refused("prompt must be text where a suffix is given.", "prompt")
    most = SUFFIX_FILL if body.max_tokens is None else body.max_tokens
    gaps = [Gap(str(prompt), body.suffix or "", most) for prompt in prompts]
    asked = GapRequest(gaps, body, "cmpl", body.logprobs)
    return await answer(asked, request, lambda d, how: Completions(d, body, how))


@router.post("/v1/fim/completions")
async def fim_completions(body: FimRequest, request: Request) -> Response:
    """Fill the gap between a prompt and a suffix (Mistral's interface)."""
    if body.random_seed is not None:
        body = body.model_copy(update={"seed": body.random_seed})
    most = DEFAULT_FILL if body.max_tokens is None else body.max_tokens
    asked = GapRequest([Gap(body.prompt, body.suffix or "", most)], body, "fim")
    return await answer(asked, request, lambda d, how: ChatCompletions(d, body, how))


@router.post("/infill")
async def llama_infill(body: LlamaInfillRequest, request: Request) -> Response:
    """Fill the gap between a prefix and a suffix (llama.cpp's interface)."""
    if body.n_predict == 0:  # editors fill llama.cpp's cache like this
        return JsonResponse({"content": "", "stop": True, "tokens_predicted": 0})
    before = "".join(f"{file.text}\n" for file in body.input_extra)
    given = body.model_dump(include=set(Sampled.model_fields), exclude_none=True)
    if body.seed is not None and body.seed < 0:
        del given["seed"]  # llama.cpp's word for a random one
    most = body.n_predict if body.n_predict >= 0 else DEFAULT_FILL
    gap = Gap(before + body.input_prefix + body.prompt, body.input_suffix, most)
    asked = GapRequest([gap], Sampled(**given), "infill")
    return await answer(asked, request, lambda d, how: LlamaFill(d))


async def answer(
    asked: GapRequest, request: Request, shape_of: Callable[[Decoding, How], Any]
) -> Response:
    """Fill gaps, and answer in some shape."""
    body = asked.body
    refuse_unsupported(body)
    if any(gap.max_tokens < 1 for gap in asked.gaps):
        raise refused("max_tokens=0 must be 1 or more.", "max_tokens")
    server = server_of(request)
    how = await how_to(server.models, body, logprobs=asked.logprobs)
    _, model = await server.models.loaded(body.model)
    really = fills_holes(model.family)
    count = len(asked.gaps) * body.samples
    check_sequences(count, server.settings.max_sequences)
    able = server.models.able_to_fill()
    submit = partial(submit_holes, asked, how) if really else partial(submit_fim, asked, how, able)
    ask = Ask(
        submit,
        body.model,
        count * EDITOR_LENGTHS if really else count,
        client_of(request),
        asked.kind,
        body.forerun,
    )
    decoding = await begun(request, server.decodings, ask)
    shape = shape_of(decoding, how)
    if body.stream:
        written = FilledStream(shape, asked.stops) if really else shape
        traces = body.forerun.trace == "stream" and not really
        return EventStream(decoding, streamed(decoding, written, traces))
    results = filled(await whole(request, decoding), asked.stops)
    return JsonResponse(shape.whole(results))


def submit_holes(asked: GapRequest, how: How, model: Model) -> Jobs:
    """Have a model that looks past holes fill them. Lengths up to the most are tried, and the
    likeliest per token is taken."""
    given = how.arguments(model)
    for name in ("min_tokens", "stop_token_ids", "ignore_eos"):
        if given.get(name):
            raise refused(f"{name} has no meaning where a gap is filled.", name)
    arguments = {name: value for name, value in given.items() if name not in FILL_OPTIONS}
    texts = [
        {"prefix": gap.prefix, "suffix": gap.suffix, "max_tokens": gap.max_tokens}
        for gap in asked.gaps
    ]
    jobs = model.submit_infill(texts, raise_errors=True, **arguments)
    refuse_failed(jobs)
    return jobs


def refuse_failed(jobs: Jobs) -> None:
    """If one text is refused, none is decoded."""
    for job in jobs.jobs:
        if isinstance(job, Result) and job.error is not None:
            jobs.cancel()
            raise job.error


def submit_fim(asked: GapRequest, how: How, able: Sequence[str], model: Model) -> Jobs:
    """Have a left-to-right model fill gaps through its own tokens for that."""
    tokens = fim_tokens(model)
    given = how.arguments(model)
    heal = given.get("heal", True)
    ids: list[list[int]] = []
    for gap in asked.gaps:
        if tokens is not None:
            ids.append(fim_prompt(model, tokens, gap.prefix, gap.suffix, heal))
        elif not gap.suffix:
            ids.append(Tokenised(encode(model, gap.prefix)))
        else:
            others = " or ".join(map(repr, able)) or "none that is served here"
            raise refused(
                f"'{model.name}' goes from left to right and has no fill-in-the-middle tokens, so "
                f"it cannot see the suffix. Models that can: {others}.",
                "suffix",
                "cannot_infill",
            )
    most = min(gap.max_tokens for gap in asked.gaps)
    check_fits(model, ids, most)
    if tokens is not None:
        ends = {*given.get("stop_token_ids", ()), *tokens.all}
        given["stop_token_ids"] = sorted(ends)
    streams = bool(asked.body.stream)
    traces = asked.body.forerun.trace == "stream"
    return submit_prompts(model, ids, max_tokens=most, streams=streams, traces=traces, **given)


def filled(results: list[list[Result]], stops: Sequence[str]) -> list[list[Result]]:
    """Results whose text is what fills the gap, up to the first stop string."""
    return [[fill_of(result, stops) for result in group] for group in results]


def fill_of(result: Result, stops: Sequence[str]) -> Result:
    if not isinstance(result, Infilled):
        return result
    text = "".join(result.fills)
    found = [at for at in (text.find(stop) for stop in stops if stop) if at >= 0]
    text = text[: min(found)] if found else text
    whole = result.finish_reason == "length"  # every blank is filled: the gap is closed
    return replace(result, text=text, finish_reason="stop" if whole else result.finish_reason)


@dataclass
class FilledStream:
    """A stream of gaps that are filled at once: the text comes when the best length is known."""

    shape: Shape
    stops: Sequence[str]

    @property
    def end_mark(self) -> bytes:
        return self.shape.end_mark

    def opening(self) -> Iterable[Any]:
        return ()

    def pieces(self, index: int, text: str) -> Iterable[Any]:
        return self.shape.pieces(index, text)

    def closing(self, results: list[list[Result]]) -> Iterable[Any]:
        done = filled(results, self.stops)
        for index, result in enumerate(result for group in done for result in group):
            yield from self.shape.pieces(index, result.text)
        yield from self.shape.closing(done)

    def trace(self, traced: Traced) -> Any:
        return self.shape.trace(traced)


@dataclass
class LlamaFill:
    """Answers in the shape of llama.cpp's server, whose own streams have no end mark."""

    decoding: Decoding
    end_mark: ClassVar[bytes] = b""

    def opening(self) -> Iterable[Any]:
        return ()

    def pieces(self, index: int, text: str) -> Iterable[Any]:
        yield {"index": index, "content": text, "stop": False}

    def closing(self, results: list[list[Result]]) -> Iterable[Any]:
        yield {**self.whole(results), "content": ""}

    def trace(self, traced: Traced) -> Any:
        return {"content": "", "stop": False, "forerun": {"event": self.decoding.told(traced)}}

    def whole(self, results: list[list[Result]]) -> dict[str, Any]:
        result = results[0][0]
        stats = result.stats
        seconds = max(stats.seconds, 1e-9)
        by_word = isinstance(result.stopped_by, str)
        return {
            "index": 0,
            "content": result.text,
            "stop": True,
            "model": self.decoding.served.id,
            "tokens_predicted": stats.tokens,
            "tokens_evaluated": stats.prompt_tokens,
            "truncated": False,
            "stop_type": "word" if by_word else STOP_TYPES.get(result.finish_reason, "limit"),
            "stopping_word": result.stopped_by if by_word else "",
            "timings": {
                "prompt_n": stats.prompt_tokens,
                "predicted_n": stats.tokens,
                "predicted_ms": stats.seconds * 1000,
                "predicted_per_second": stats.tokens / seconds,
            },
            "forerun": answers.about(self.decoding, results, None),
        }


STOP_TYPES = {"stop": "eos", "length": "limit"}


@router.post("/v1/infill")
async def infill(body: InfillRequest, request: Request) -> Response:
    """Fill the holes of texts: `<|fill:8|>` is one of eight tokens, `<|fill:4-12|>` one of four to
    twelve, whichever fits best."""
    refuse_unsupported(body)
    if body.stream:
        raise refused("stream: holes are filled together, so the answer comes whole.", "stream")
    server = server_of(request)
    count = sizings(body, server.settings.max_holes) * body.samples
    how = await how_to(server.models, body, logprobs=body.logprobs)
    if body.stop in ("", []):
        body = body.model_copy(update={"stop": None})
    ask = Ask(
        partial(submit_texts, body, how),
        body.model,
        max(1, count),
        client_of(request),
        "infill",
        body.forerun,
    )
    decoding = await begun(request, server.decodings, ask)
    results = await whole(request, decoding)
    return JsonResponse(infill_answer(decoding, results, how))


def sizings(body: InfillRequest, most_holes: int) -> int:
    """In how many ways the holes of all texts can be sized: so many sequences are decoded."""
    texts = read_texts(body.text, body.token_ids)
    count = 0
    for one in texts.given:
        template = parse_ids(one) if texts.as_ids else parse_text(one)
        if len(template.sizes) > most_holes:
            raise refused(
                f"a text has {len(template.sizes)} holes, and {most_holes} are the most.", "text"
            )
        count += len(template.lengths())
    return count


def submit_texts(body: InfillRequest, how: How, model: Model) -> Jobs:
    jobs = model.submit_infill(
        body.text, token_ids=body.token_ids, raise_errors=True, **how.arguments(model)
    )
    refuse_failed(jobs)
    return jobs


def infill_answer(decoding: Decoding, results: list[list[Result]], how: How) -> dict[str, Any]:
    flat = [(number, result) for number, group in enumerate(results) for result in group]
    return {
        "id": decoding.id,
        "object": "infill",
        "created": decoding.created,
        "model": decoding.served.id,
        "choices": [
            infill_choice(index, number, result) for index, (number, result) in enumerate(flat)
        ],
        "usage": answers.usage(results),
        "forerun": answers.about(decoding, results, how.sampling["seed"]),
    }


def infill_choice(index: int, number: int, result: Result) -> dict[str, Any]:
    assert isinstance(result, Infilled)
    return {
        "index": index,
        "text_index": number,
        "text": result.text,
        "fills": list(result.fills),
        "fill_ids": [list(ids) for ids in result.fill_ids],
        "logprob": result.logprob,
        "logprobs": result.logprobs,
        "finish_reason": "stop" if result.finish_reason == "length" else "length",
    }
