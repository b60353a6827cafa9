"""What clients send, in the shapes of OpenAI, Mistral and llama.cpp, and our own.

A field that is not here is refused. `None` means that nothing was said. Fields that cannot change
an answer are taken and ignored; those that would, and that we do not have, are refused unless they
ask for nothing (`refuse_unsupported`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from forerun.serve.errors import refused

INT64 = 2**63
Seed = Annotated[int, Field(ge=-INT64, lt=INT64)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Prompt = str | list[TokenId]

SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "allowed_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "heal",
    "seed",
    "n",
)
CONSTRAINTS = ("regex", "choices", "grammar")
# What would change an answer, and what may be sent all the same because it asks for nothing.
UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "best_of": (1,),
    "background": (False,),
    "conversation": (),
    "context_management": ([],),
    "include": ([],),
    "image": (),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt_template": (),
    "reasoning": ({},),
    "truncation": ("disabled",),
}


class Wire(BaseModel):
    """A request, or a part of one."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class Extension(Wire):
    """Our own: how to decode, and what to tell of it."""

    method: str | None = Field(default=None, max_length=100, description="see /v1/models")
    draft: str | None = Field(
        default=None, max_length=200, description="a drafter, or a model served here"
    )
    options: dict[str, Any] = Field(default={}, description="options of the method and its drafter")
    deadline: Number | None = Field(
        default=None, gt=0, description="seconds; then what is there comes"
    )
    priority: int = Field(default=0, ge=-100, le=100, description="higher goes first")
    trace: bool | Literal["stream"] = Field(
        default=False, description="keep it; 'stream' sends it too"
    )


class StreamOptions(Wire):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Sampled(Wire):
    """What all requests that decode may say."""

    model: str | None = Field(default=None, max_length=500)
    temperature: Number | None = None
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    top_p: Number | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    allowed_tokens: list[TokenId] | None = None
    min_tokens: Count | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    heal: bool | None = None
    seed: Seed | None = None
    n: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    forerun: Extension = Field(default_factory=lambda: Extension())
    # taken and ignored
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    request_id: Any = None

    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that were given. OpenAI's temperature is 1 where none is."""
        given = {name: getattr(self, name, None) for name in SAMPLING}
        found = {name: value for name, value in given.items() if value is not None}
        found.setdefault("temperature", 1.0)
        if found.get("top_k") == -1:
            found["top_k"] = 0
        if "logit_bias" in found:
            found["logit_bias"] = _biases(found["logit_bias"])
        if found.get("stop") in ("", []):
            del found["stop"]
        return found

    @property
    def samples(self) -> int:
        return self.n if self.n is not None else 1

    @property
    def wants_usage(self) -> bool:
        options = self.stream_options
        return options is not None and bool(options.include_usage or self.counts_on)

    @property
    def counts_on(self) -> bool:
        """Is usage wanted in every chunk?"""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    found = {}
    for token, bias in given.items():
        if not token.isascii() or not token.isdigit() or len(token) > 9:
            raise refused(f"logit_bias has {token!r}: its keys must be token ids.", "logit_bias")
        found[int(token)] = bias
    return found


class Constrained(Wire):
    """What an answer must look like, in our own words. Which engine reads it is not the client's
    to say."""

    regex: str | None = None
    choices: list[str] | None = None
    grammar: str | None = None


class Formatted(Constrained):
    """A request that may ask for a form as OpenAI has it."""

    response_format: dict[str, Any] | None = None


class PredictedPart(Wire):
    type: Literal["text"]
    text: str


class Prediction(Wire):
    """OpenAI's predicted outputs."""

    type: Literal["content"] = "content"
    content: str | list[PredictedPart]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class CompletionRequest(Sampled, Formatted):
    prompt: Prompt | list[Prompt] | None = None
    suffix: str | None = None
    max_tokens: Count | None = None
    echo: bool | None = None
    logprobs: Count | None = None
    best_of: Any = None
    prediction: Prediction | None = None


class ChatRequest(Sampled, Formatted):
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    prediction: Prediction | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    moderation: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class ResponsesRequest(Sampled, Constrained):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    top_logprobs: Count | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    background: Any = None
    conversation: Any = None
    context_management: Any = None
    include: Any = None
    image: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    previous_response_id: Any = None
    reasoning: Any = None
    truncation: Any = None


class FimRequest(Sampled):
    """Mistral's fill-in-the-middle."""

    prompt: str
    suffix: str | None = None
    max_tokens: Count | None = None
    random_seed: Seed | None = None


class ExtraFile(BaseModel):
    filename: str = ""
    text: str = ""


class LlamaInfillRequest(BaseModel):
    """llama.cpp's `/infill`. Its many further fields are settings of its own engine: they are
    ignored."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model: str | None = Field(default=None, max_length=500)
    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[ExtraFile] = []
    prompt: str = ""
    n_predict: int = Field(default=128, lt=2**31)
    temperature: Number | None = None
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    top_p: Number | None = None
    min_p: Number | None = None
    stop: list[str] | None = None
    heal: bool | None = None  # ours
    seed: Seed | None = None
    stream: bool | None = None


class InfillRequest(Sampled):
    """Texts with holes: ours."""

    text: str | dict[str, Any] | list[str | dict[str, Any]] | None = None
    token_ids: list[TokenId | None] | list[list[TokenId | None]] | None = None
    logprobs: Count | None = None


class EmbeddingsRequest(BaseModel):
    """Refused, whatever it holds."""


class TokenizeRequest(Wire):
    model: str | None = Field(default=None, max_length=500)
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Wire):
    model: str | None = Field(default=None, max_length=500)
    tokens: list[TokenId]


def refuse_unsupported(request: Sampled) -> None:
    """Refuse what would change the answer and cannot be done."""
    given = request.model_fields_set
    for name, harmless in UNSUPPORTED.items():
        value = getattr(request, name) if name in given else None
        if value is not None and value not in harmless:
            raise refused(f"{name} is not supported here: leave it out.", name, "unsupported")


def field_names(body: Any, where: Sequence[str]) -> list[str]:
    """The fields that may stand beside an unknown one."""
    if len(where) > 1 and where[-2] == "forerun":
        return list(Extension.model_fields)
    if len(where) > 1 and where[-2] == "stream_options":
        return list(StreamOptions.model_fields)
    kinds: list[type[BaseModel]] = [CompletionRequest, ChatRequest, ResponsesRequest, InfillRequest]
    for kind, needed in zip(kinds, ("prompt", "messages", "input", "text")):
        if isinstance(body, Mapping) and needed in body:
            return list(kind.model_fields)
    return list(CompletionRequest.model_fields)
