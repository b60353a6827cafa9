"""All benchmarks by name."""

from __future__ import annotations

from forerun.errors import unknown
from forerun.evaluate.benchmarks.base import Benchmark
from forerun.evaluate.benchmarks.chats import MT_BENCH, SPEC_BENCH
from forerun.evaluate.benchmarks.gsm8k import GSM8K
from forerun.evaluate.benchmarks.hellaswag import HELLASWAG
from forerun.evaluate.benchmarks.humaneval import HUMANEVAL, HUMANEVAL_AS_QWEN
from forerun.evaluate.benchmarks.ifeval import IFEVAL
from forerun.evaluate.benchmarks.infilling import INFILLING
from forerun.evaluate.benchmarks.lambada import LAMBADA
from forerun.evaluate.benchmarks.math500 import MATH500
from forerun.evaluate.benchmarks.mbpp import MBPP
from forerun.evaluate.benchmarks.stories import STORIES
from forerun.evaluate.benchmarks.summaries import SUMMARIES
from forerun.evaluate.benchmarks.wikitext import WIKITEXT

BENCHMARKS: dict[str, Benchmark] = {
    one.name: one
    for one in (
        GSM8K,
        MATH500,
        HUMANEVAL,
        HUMANEVAL_AS_QWEN,
        MBPP,
        INFILLING,
        IFEVAL,
        MT_BENCH,
        SPEC_BENCH,
        LAMBADA,
        HELLASWAG,
        WIKITEXT,
        STORIES,
        SUMMARIES,
    )
}


def benchmark_named(name: str) -> Benchmark:
    if name not in BENCHMARKS:
        raise unknown("task", name, BENCHMARKS)
    return BENCHMARKS[name]
