"""An hour of random lives: `python -m tests.soak --minutes 60 --json soak.json`.

The same state machine as tests/engine/test_lives.py, over and over with new random choices, until
time is over. It prints what was done to the engine and what came of it.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

from tests.engine.lives import REQUESTS, TALLY, alone, requests_of
from tests.engine.test_lives import live


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    for kind in REQUESTS:
        for index in range(len(requests_of(kind))):
            alone(kind, index)
    began = time.monotonic()
    memory: list[float] = []
    while time.monotonic() - began < 60 * arguments.minutes:
        for kind in REQUESTS:
            live(kind, examples=10, database=None)
        memory.append(resident())
        report = summary(time.monotonic() - began, memory)
        print(json.dumps(report), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=1))


def summary(seconds: float, memory: list[float]) -> dict[str, object]:
    return {
        "minutes": round(seconds / 60, 1),
        "requests": TALLY.requests,
        "compared with the one alone": TALLY.compared,
        "steps": TALLY.steps,
        "faults": dict(TALLY.faults),
        "mismatches": len(TALLY.mismatches),
        "lanes leaked": TALLY.lanes_leaked,
        "MiB after the first round": round(memory[0]),
        "MiB now": round(memory[-1]),
        "MiB at most": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def resident() -> float:
    """MiB that this process has in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


if __name__ == "__main__":
    main()
