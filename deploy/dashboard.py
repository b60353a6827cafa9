"""Writes the Grafana dashboard: `python deploy/dashboard.py`. A test checks that the server has
every metric that it shows."""

from __future__ import annotations

import json
from pathlib import Path

FILE = Path(__file__).parent / "grafana" / "dashboards" / "forerun.json"
WIDTH = 12
HEIGHT = 8


def rate(name: str) -> str:
    return f"sum by (model_name) (rate(forerun:{name}[1m]))"


def quantile(share: float, name: str) -> str:
    buckets = f"sum by (le, model_name) (rate(forerun:{name}_bucket[1m]))"
    return f"histogram_quantile({share}, {buckets})"


def quantiles(name: str) -> dict[str, str]:
    return {f"p{int(100 * share)}": quantile(share, name) for share in (0.5, 0.95, 0.99)}


PANELS: list[tuple[str, str, dict[str, str]]] = [
    (
        "Tokens per second",
        "short",
        {"written": rate("generation_tokens_total"), "read": rate("prompt_tokens_total")},
    ),
    (
        "Requests",
        "short",
        {
            "running": "forerun:num_requests_running",
            "waiting": "forerun:num_requests_waiting",
            "lanes": "forerun:num_lanes_busy",
        },
    ),
    ("Time to first token", "s", quantiles("time_to_first_token_seconds")),
    ("Between two pieces", "s", quantiles("inter_token_latency_seconds")),
    ("End to end", "s", quantiles("e2e_request_latency_seconds")),
    ("Waiting for a lane", "s", quantiles("request_queue_time_seconds")),
    (
        "Tokens per forward",
        "short",
        {
            "tokens": f"{rate('generation_tokens_total')} / {rate('forwards_total')}",
        },
    ),
    (
        "Accepted of drafted",
        "percentunit",
        {
            "share": f"{rate('spec_decode_num_accepted_tokens_total')}"
            f" / {rate('spec_decode_num_draft_tokens_total')}",
        },
    ),
    (
        "Accepted by place in the draft",
        "short",
        {
            "place {{position}}": "sum by (position) "
            "(rate(forerun:spec_decode_num_accepted_tokens_per_pos_total[1m]))",
        },
    ),
    ("Cache in use", "percentunit", {"share": "forerun:kv_cache_usage_perc"}),
    (
        "How sequences end",
        "short",
        {
            "{{finished_reason}}": "sum by (finished_reason) "
            "(rate(forerun:request_success_total[1m]))",
        },
    ),
    (
        "Refused, and engines that failed",
        "short",
        {
            "{{status}}": "sum by (status) (rate(forerun:request_refused_total[1m]))",
            "restarts": "sum(forerun:engine_restarts)",
        },
    ),
]


def panel(number: int, title: str, unit: str, targets: dict[str, str]) -> dict:
    place = {"x": WIDTH * (number % 2), "y": HEIGHT * (number // 2), "w": WIDTH, "h": HEIGHT}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "gridPos": place,
        "datasource": {"type": "prometheus", "uid": "prometheus"},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(65 + i), "expr": query, "legendFormat": f"{name} {{{{model_name}}}}"}
            for i, (name, query) in enumerate(targets.items())
        ],
    }


def dashboard() -> dict:
    return {
        "uid": "forerun",
        "title": "Forerun",
        "schemaVersion": 41,
        "version": 1,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "tags": ["forerun"],
        "panels": [panel(i, *each) for i, each in enumerate(PANELS)],
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(dashboard(), indent=1) + "\n")
