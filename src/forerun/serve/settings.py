"""What a server is told when it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.errors import BadOption
from forerun.options import check_positive, check_whole

MEBIBYTE = 2**20
GIBIBYTE = 2**30


@dataclass(frozen=True)
class Settings:
    """All of a server's settings. The command line has a flag for each."""

    models: Sequence[str] = ()  # NAME, or ID=NAME to serve it as ID; none: the embedded models
    method: str | None = None  # of requests that name none; a model's own kind where it cannot
    draft: str | None = None
    device: str | None = None
    dtype: str | None = None
    quantize: str | None = None
    lanes: int | None = None
    max_context: int | None = None
    chat_template: str | None = None  # a file, or 'plain'; for models that have none
    memory_gib: float | None = None  # weights and caches of all loaded models together
    cache_gib: float | None = None  # keys and values of a model, which its lanes share
    api_keys: Sequence[str] = ()  # none: everybody may ask
    cors: Sequence[str] = ()  # origins whose pages may ask; none: no page of another origin
    queue: int = 256  # requests of a model that may wait; more are refused
    deadline: float | None = None  # seconds a request may take, unless it asks for less
    grace: float = 30.0  # seconds that running requests have left when the server is stopped
    stream_interval: float = 0.03  # seconds: pieces of streams that come sooner are sent together
    stalled: float = 60.0  # seconds without a byte taken after which a reader is dropped
    max_body: int = 4 * MEBIBYTE  # bytes of a request
    max_sequences: int = 128  # prompts times samples of a request
    max_holes: int = 64  # of one text
    traces: int = 256  # that are kept
    log_prompts: bool = False
    telemetry: bool = False  # OpenTelemetry, as its environment variables say

    def __post_init__(self) -> None:
        for name in ("queue", "max_body", "max_sequences", "max_holes"):
            check_whole(name, getattr(self, name))
        check_whole("traces", self.traces, 0)
        for name in ("grace", "stalled"):
            check_positive(name, getattr(self, name))
        if not 0 <= self.stream_interval <= 1:
            raise BadOption(f"stream_interval={self.stream_interval!r} must be from 0 to 1 second.")
        for name in ("deadline", "memory_gib", "cache_gib"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        if any(not key or key != key.strip() for key in self.api_keys):
            raise BadOption("api_key must be a word without spaces around it.")
