"""What a server counts, under vLLM's names with `forerun:` before them, so that its dashboards and
alerts need only another prefix."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from forerun.requests.result import Result

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
MOST_POSITIONS = 64  # of drafts that are told apart


class ModelLoad(Protocol):
    """How busy a model is."""

    id: str

    @property
    def running(self) -> int: ...

    @property
    def waiting(self) -> int: ...

    @property
    def busy_lanes(self) -> int: ...

    @property
    def cache_use(self) -> float: ...

    @property
    def prefix_hit_rate(self) -> float: ...

    @property
    def restarts(self) -> int: ...


class Named(Protocol):
    id: str


class Ended(Protocol):
    """A request whose sequences are over."""

    waited: float

    @property
    def served(self) -> Named: ...

    def reason(self, result: Result) -> str: ...


class Metrics:
    """Counters and histograms of one server; gauges are read when somebody looks."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        label = ["model_name"]

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(
                f"forerun:{name}", text, label, buckets=SECONDS, registry=self.registry
            )

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(f"forerun:{name}", text, [*label, *more], registry=self.registry)

        self.first_token = histogram("time_to_first_token_seconds", "Of streams, queue included.")
        self.between = Intervals(
            "forerun:inter_token_latency_seconds", "Of streams: between two pieces."
        )
        self.registry.register(self.between)
        self.per_token = histogram("request_time_per_output_token_seconds", "Decoding per token.")
        self.end_to_end = histogram("e2e_request_latency_seconds", "From arrival to the end.")
        self.queue = histogram("request_queue_time_seconds", "Waiting for a lane.")
        self.decode = histogram("request_decode_time_seconds", "In a lane.")
        self.prompt_tokens = counter("prompt_tokens", "Tokens read.")
        self.generated = counter("generation_tokens", "Tokens written.")
        self.finished = counter(
            "request_success", "Sequences by how they ended.", "finished_reason"
        )
        self.refused = counter("request_refused", "Requests by the status of the answer.", "status")
        self.forwards = counter("forwards", "Forwards of the target, per sequence.")
        self.drafts = counter("spec_decode_num_drafts", "Verdicts on drafts.")
        self.drafted = counter("spec_decode_num_draft_tokens", "Tokens drafted.")
        self.accepted = counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted.")
        self.accepted_at = counter(
            "spec_decode_num_accepted_tokens_per_pos", "By place in the draft.", "position"
        )

    def watch(self, loads: Iterable[ModelLoad]) -> None:
        self.registry.register(LoadGauges(loads))

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def ended(self, decoding: Ended, result: Result) -> None:
        """Count a sequence that is over."""
        stats = result.stats
        model = decoding.served.id
        self.finished.labels(model, decoding.reason(result)).inc()
        self.prompt_tokens.labels(model).inc(stats.prompt_tokens)
        self.generated.labels(model).inc(stats.tokens)
        self.forwards.labels(model).inc(stats.forwards)
        self.queue.labels(model).observe(decoding.waited + stats.queued_seconds)
        self.decode.labels(model).observe(stats.seconds)
        if stats.tokens > 1:
            self.per_token.labels(model).observe(stats.seconds / stats.tokens)
        self._count_drafts(model, result)

    def _count_drafts(self, model: str, result: Result) -> None:
        verdicts = [event for event in result.trace if event.drafted]
        self.drafts.labels(model).inc(len(verdicts))
        self.drafted.labels(model).inc(sum(len(event.drafted) for event in verdicts))
        self.accepted.labels(model).inc(sum(event.accepted for event in verdicts))
        kept = [0] * MOST_POSITIONS
        for event in verdicts:
            for position in range(min(event.accepted, MOST_POSITIONS)):
                kept[position] += 1
        for position, count in enumerate(kept):
            if count:
                self.accepted_at.labels(model, str(position)).inc(count)


class Intervals(Collector):
    """A histogram for what happens at every token: the library's own takes many times as long."""

    def __init__(self, name: str, text: str):
        self.name = name
        self.text = text
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}

    def note(self, model: str, seconds: float) -> None:
        if model not in self._counts:
            self._counts[model] = [0] * (len(SECONDS) + 1)
            self._sums[model] = 0.0
        self._counts[model][bisect_left(SECONDS, seconds)] += 1
        self._sums[model] += seconds

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self.name, self.text, labels=["model_name"])
        limits = [*map(str, map(float, SECONDS)), "+Inf"]
        for model, counts in list(self._counts.items()):
            buckets = list(zip(limits, map(float, accumulate(counts))))
            family.add_metric([model], buckets, self._sums[model])
        yield family


class LoadGauges(Collector):
    """How busy models are now."""

    def __init__(self, loads: Iterable[ModelLoad]):
        self.loads = loads

    def collect(self) -> Iterator[GaugeMetricFamily]:
        gauges = {
            "running": GaugeMetricFamily(
                "forerun:num_requests_running", "Sequences in a lane.", labels=["model_name"]
            ),
            "waiting": GaugeMetricFamily(
                "forerun:num_requests_waiting", "Requests without one.", labels=["model_name"]
            ),
            "busy_lanes": GaugeMetricFamily(
                "forerun:num_lanes_busy", "Lanes that are taken.", labels=["model_name"]
            ),
            "cache_use": GaugeMetricFamily(
                "forerun:kv_cache_usage_perc", "Share of pages in use.", labels=["model_name"]
            ),
            "prefix_hit_rate": GaugeMetricFamily(
                "forerun:prefix_cache_hit_rate",
                "Share of prompt rows found in pages.",
                labels=["model_name"],
            ),
            "restarts": GaugeMetricFamily(
                "forerun:engine_restarts", "Engines that failed.", labels=["model_name"]
            ),
        }
        for load in self.loads:
            for name, gauge in gauges.items():
                gauge.add_metric([load.id], getattr(load, name))
        yield from gauges.values()
