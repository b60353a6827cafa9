"""What rules take the device, from logits to outcomes, as they are captured: by our kernels, and by
torch's own operations, in turns.

    python bench/rules.py [--json FILE]                 (needs a CUDA device)
    python bench/rules.py --publish FILE                (writes the table of docs/gpu.md)
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from page import DOCS, write_part

from forerun.constraints.base import ANY, words
from forerun.engine.rules import RuleProgram, Rules
from forerun.options import Sampling
from forerun.probability import logits, noise
from forerun.probability.acceptance import matching, sample_token
from forerun.probability.logits import MaskedLogits, TokenHistory
from forerun.probability.pending import PendingLaws
from forerun.sequence.canvas import Canvas, Draw

START = "<!-- rules: bench/rules.py writes this part -->"
END = "<!-- end of rules -->"
VOCABULARIES = {"SmolLM2": 49_152, "Qwen2.5": 151_936}
BATCHES = (1, 8, 32)
DRAFTED = (0, 7)  # tokens that a verdict is on
REPLAYS = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path, help="where to write what is found")
    parser.add_argument("--publish", type=Path, help="a file that --json wrote")
    asked = parser.parse_args()
    if asked.publish:
        publish(json.loads(asked.publish.read_text()))
        return
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
    found = measure()
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))


def measure() -> dict[str, Any]:
    rows = []
    with torch.inference_mode():
        for name, vocab in VOCABULARIES.items():
            for batch in BATCHES:
                for drafted in DRAFTED:
                    for what in ("greedy", "greedy, masked", "temperature 0.8"):
                        draws = draws_of(vocab, batch, drafted, what)
                        times = {kind: one_time(draws, kind) for kind in ("torch", "kernels")}
                        row = dict(model=name, batch=batch, drafted=drafted, what=what, **times)
                        print(json.dumps(row), flush=True)
                        rows.append(row)
    device = torch.cuda.get_device_name()
    return {"rows": rows, "device": device, "date": date.today().isoformat()}


def draws_of(vocab: int, batch: int, drafted: int, what: str) -> list[Draw]:
    """Draws as a decoder makes them: one row of logits per token that is judged, and one more."""
    sampling = Sampling(temperature=0.8 if "temperature" in what else 0.0)
    each = drafted + 1
    logits_RV = 4 * torch.randn(batch * each, vocab, device="cuda", dtype=torch.bfloat16)
    masks = None
    if "masked" in what:
        masks = np.full((batch * each, words(vocab)), ANY, np.int32)
    asked = MaskedLogits(logits_RV, masks)
    draws = []
    for i in range(batch):
        history = TokenHistory(sampling, np.zeros(0, np.int64), vocab, frozenset())
        canvas = Canvas([1, *[-1] * each], history=history, seed=i)
        laws = PendingLaws.of(asked, i * each, each, sampling)
        arguments = (list(range(drafted)), laws) if drafted else (laws[0],)
        draws.append(Draw(matching if drafted else sample_token, arguments, canvas))
    return draws


def one_time(draws: list[Draw], kind: str) -> float:
    """Microseconds of one replay."""
    with by_torch() if kind == "torch" else by_kernels():
        rules = Rules()
        for _ in range(3):
            rules.apply(draws).outcomes()
        if not rules.programs:
            return float("nan")
        [program] = rules.programs.values()
        return round(microseconds(program), 1)


def microseconds(program: RuleProgram) -> float:
    run: Callable[[], object] = program._run
    taken = []
    for _ in range(6):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(REPLAYS):
            run()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return 1e3 * statistics.median(taken[1:]) / REPLAYS


@contextmanager
def by_kernels() -> Iterator[None]:
    yield


@contextmanager
def by_torch() -> Iterator[None]:
    """Without kernels of ours."""
    own = logits.can_fuse
    try:
        for module in (logits, noise):
            module.can_fuse = lambda x: False  # type: ignore[attr-defined]
        yield
    finally:
        for module in (logits, noise):
            module.can_fuse = own  # type: ignore[attr-defined]


def publish(found: dict[str, Any]) -> None:
    lines = [
        "| vocabulary | sequences | tokens judged | what | torch, µs | kernels, µs |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['model']}, {VOCABULARIES[row['model']]:,} | {row['batch']} | {row['drafted']} | "
        f"{row['what']} | {row['torch']:.0f} | {row['kernels']:.0f} |"
        for row in found["rows"]
    ]
    lines += ["", f"`python bench/rules.py`: {found['device']}, {found['date']}."]
    write_part(DOCS / "gpu.md", "\n".join(lines), START, END)


if __name__ == "__main__":
    main()
