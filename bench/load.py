"""Many requests that come at random moments: prompts of 64 to 8,192 tokens, outputs of 16 to 512,
both uniform by their logarithm. Tokens per second, time to the first token and time per token, for
`auto`, `ar` and a grid of fixed methods.

    python bench/load.py --model DIR --draft DIR --device cuda --dtype bfloat16 --json FILE
    python bench/load.py --model DIR --draft DIR --device cuda --record TRACES
    python bench/load.py --shape qwen2.5-7b --draft-shape qwen2.5-0.5b --traces TRACES --device cuda
    python bench/load.py --publish FILE ...             (writes docs/serving.md)

`--record` writes what a real pair does: the target's greedy text after every prompt of
bench/auto.py, and what its draft model would have said at every place. `--traces` replays that with
a model of another shape. Its weights are random, its forwards and those of its draft model run and
take their time; what they say is put in the place of their own words.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
from auto import PROMPTS, Contestant, label, machine, quantile
from page import DOCS, write_part

import forerun
import forerun.engine.prefetch as prefetch_file
from forerun.api import Model
from forerun.drafters.autoregressive import ModelDrafter
from forerun.drafters.base import Draft
from forerun.engine.pack import Batch
from forerun.profile.shapes import random_model
from forerun.sequence.canvas import Canvas
from forerun.sequence.rows import TOKEN

START = "<!-- load: bench/load.py writes this part -->"
END = "<!-- end of load -->"
SHORTEST, LONGEST = 64, 8192  # tokens of a prompt
FEWEST, MOST = 16, 512  # tokens of an output
FIXED: list[Contestant] = [("lookup", {"k": 5}), ("lookup", {"k": 10})]
DRAFTED: list[Contestant] = [("speculative", {"k": 3}), ("speculative", {"k": 6})]
SURE = 1e4  # the logit of what is replayed


class Trace(NamedTuple):
    """What a pair did with a prompt: its text, and what the draft model would have said."""

    prompt: list[int]
    output: list[int]
    guesses: list[int]


class Request(NamedTuple):
    at: float  # seconds
    prompt: list[int]
    tokens: int


class Text(NamedTuple):
    """A replayed request: all its tokens, and guesses for those behind the prompt."""

    tokens: list[int]
    prompt: int
    guesses: list[int]


def between(chance: random.Random, least: int, most: int) -> int:
    """A number, uniform by its logarithm."""
    return round(math.exp(chance.uniform(math.log(least), math.log(most))))


def arrivals(chance: random.Random, rate: float, seconds: float) -> Iterator[float]:
    now = chance.expovariate(rate)
    while now < seconds:
        yield now
        now += chance.expovariate(rate)


def filler_text() -> str:
    """Text to fill long prompts with: this project's own."""
    files = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    return "\n".join(file.read_text() for file in files)


class RealLoad:
    """Requests of a real model."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        how = dict(device=arguments.device, dtype=arguments.dtype)
        context = arguments.longest + arguments.most
        self.model = forerun.load(
            arguments.model, lanes=arguments.lanes, max_context=context, **how
        )
        self.draft: Model | None = None
        if arguments.draft:
            self.draft = forerun.load(arguments.draft, lanes=1, max_context=context + 8, **how)
        self.filler = self.model.tokenizer.encode(filler_text())
        self.prompts = [
            self.model.tokenizer.encode(text)[-arguments.longest :]
            for texts in PROMPTS.values()
            for text in texts
        ]

    def requests(self, rate: float, seconds: float) -> list[Request]:
        chance = random.Random(f"{rate:g}")
        found = []
        for at in arrivals(chance, rate, seconds):
            length = between(chance, min(SHORTEST, self.arguments.longest), self.arguments.longest)
            tokens = between(chance, min(FEWEST, self.arguments.most), self.arguments.most)
            found.append(self.request(chance, at, length, tokens))
        return found

    def request(self, chance: random.Random, at: float, length: int, tokens: int) -> Request:
        question = chance.choice(self.prompts)[-length:]
        begin = chance.randrange(max(1, len(self.filler) - length))
        before = self.filler[begin : begin + length - len(question)]
        return Request(at, [*before, *question], tokens)

    def record(self) -> list[Trace]:
        """What the pair does with every prompt."""
        assert self.draft is not None, "--record needs --draft"
        how = dict(method="ar", max_tokens=self.arguments.most, ignore_eos=True, raise_errors=True)
        traces = []
        for prompt, result in zip(self.prompts, self.model.generate(self.prompts, **how)):
            text = [*prompt, *result.token_ids]
            said: Any = self.draft.generate(text, method="ar", max_tokens=1, prompt_logprobs=1)
            entries = said.prompt_logprobs[len(prompt) :]
            traces.append(Trace(prompt, result.token_ids, [e["top"][0]["token"] for e in entries]))
        return traces


class ReplayedLoad(RealLoad):
    """Requests of a model of some shape, which says what another has said."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        held = json.loads(arguments.traces.read_text())
        self.traces = [Trace(*trace) for trace in held["traces"]]
        self.texts: dict[tuple[int, int], Text] = {}
        device = torch.device(arguments.device or "cpu")
        dtype = getattr(torch, arguments.dtype or "float32")
        context = arguments.longest + arguments.most
        self.model = random_model(arguments.shape, device, dtype, arguments.lanes, context)
        self.draft = None
        if arguments.draft_shape:
            self.draft = random_model(arguments.draft_shape, device, dtype, 1, context)
        runner: Any = self.model.host.runner
        runner.forward = self.replaying(runner.forward)
        patched: Any = ModelDrafter
        patched.propose = self.proposing(ModelDrafter.propose)
        # What Jacobi begins ahead has positions that only the device knows.
        prefetch_file.LEAST_COST = math.inf

    def request(self, chance: random.Random, at: float, length: int, tokens: int) -> Request:
        trace = chance.choice(self.traces)
        name = len(self.texts)
        vocab = self.model.vocab
        question = trace.prompt[-(length - 2) :]
        before = [chance.randrange(5, vocab) for _ in range(length - 2 - len(question))]
        prompt = [5 + name // 1000, 5 + name % 1000, *before, *question]
        text = Text([*prompt, *trace.output], len(prompt), trace.guesses)
        self.texts[prompt[0], prompt[1]] = text
        return Request(at, prompt, min(tokens, len(trace.output)))

    def replaying(self, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def replayed(batch: Batch, *more: Any) -> torch.Tensor:
            logits_RV = forward(batch, *more)
            said: list[int] = []
            for segment in batch.segments:
                rows = segment.plan.rows[TOKEN]
                text = self.texts.get((int(rows[0]), int(rows[min(1, len(rows) - 1)])))
                if text is None:  # what costs are measured with
                    return logits_RV
                for branch in segment.plan.reads:
                    said += says(text, rows, branch.tolist())
            said_R = torch.tensor(said).to(logits_RV.device, non_blocking=True)
            logits_RV.scatter_(1, said_R[:, None], SURE)
            return logits_RV

        return replayed

    def proposing(self, propose: Any) -> Any:
        async def proposed(drafter: ModelDrafter, seq: Canvas, k: int) -> Draft:
            draft = await propose(drafter, seq, k)
            text = self.texts[int(seq.tokens[0]), int(seq.tokens[1])]
            begin = seq.known - text.prompt
            guesses = text.guesses[begin : begin + len(draft)]
            return Draft(draft.positions[: len(guesses)], guesses)

        return proposed


def says(text: Text, rows: Any, reads: Sequence[int]) -> list[int]:
    """What the replayed model says behind each of these rows: the text, as long as rows are its
    own. Of a single row only the place is known, if its forward was begun ahead."""
    found = []
    follows = True
    for row in reads:
        inside = row + 1 < len(text.tokens)
        if len(reads) > 1 and row >= text.prompt:
            follows = follows and row < len(text.tokens) and rows[row] == text.tokens[row]
        found.append(text.tokens[row + 1] if inside and follows else 4)
    return found


@dataclass
class Row:
    """What a load of requests felt like."""

    method: str
    per_second: float  # requests that came
    requests: int
    tokens_per_second: float
    first_token_p50: float  # seconds, waiting for a lane included
    first_token_p99: float
    per_token_p50: float  # seconds of one sequence, after its first token
    per_token_p99: float
    choices: dict[str, int]


def measure(load: RealLoad, contestant: Contestant, rate: float, requests: list[Request]) -> Row:
    method, options = contestant
    if load.draft is not None and method in ("speculative", "auto"):
        options = {**options, "draft": load.draft}
    load.model.host.forget()
    began = time.perf_counter()
    jobs = []
    for at, prompt, tokens in requests:
        time.sleep(max(0.0, began + at - time.perf_counter()))
        how = dict(method=method, max_tokens=tokens, ignore_eos=True, **options)
        jobs.append(load.model.submit(prompt, **how))
    results = []
    for each in jobs:
        each.wait()
        results += each.results()
    took = time.perf_counter() - began
    for result in results:
        if result.error is not None:
            raise result.error
    first = [r.stats.queued_seconds + (r.stats.first_token_seconds or 0.0) for r in results]
    pace = [
        (r.stats.seconds - (r.stats.first_token_seconds or 0.0)) / max(1, r.stats.tokens - 1)
        for r in results
    ]
    chosen: dict[str, int] = {}
    for result in results:
        for name, count in result.stats.choices.items():
            chosen[name] = chosen.get(name, 0) + count
    tokens_per_second = sum(r.stats.tokens for r in results) / took
    times = [quantile(values, share) for values in (first, pace) for share in (0.5, 0.99)]
    return Row(label(contestant), rate, len(results), tokens_per_second, *times, chosen)


def report(arguments: argparse.Namespace) -> dict[str, Any]:
    began = time.perf_counter()
    load = ReplayedLoad(arguments) if arguments.traces else RealLoad(arguments)
    if arguments.record:
        traces = load.record()
        agreed = [a == b for t in traces for a, b in zip(t.output, t.guesses)]
        print(f"{len(traces)} texts, the draft model agrees at {sum(agreed) / len(agreed):.0%}")
        names = dict(model=Path(arguments.model).name, draft=Path(arguments.draft).name)
        arguments.record.write_text(json.dumps({**names, "traces": traces}))
        return {}
    contestants: list[Contestant] = [("ar", {}), ("auto", {})]
    contestants += FIXED[:1] + (DRAFTED if load.draft else []) + FIXED[1:]
    rows: list[Row] = []
    for rate in (None, *arguments.rates):
        if rate is None:  # all at once and short: sizes are captured, costs are measured
            requests = [Request(0.0, *r[1:]) for r in load.requests(2 * arguments.lanes, 1.0)]
            requests = [r._replace(tokens=min(r.tokens, 32)) for r in requests]
        else:
            requests = load.requests(rate, arguments.window)
        for number, contestant in enumerate(contestants):
            late = time.perf_counter() - began > arguments.seconds
            if number >= 2 and (late or (rate is None and number % 2)):
                continue
            for _ in range(1 if rate is None else 1 + arguments.warm):
                row = measure(load, contestant, rate or 0.0, requests)
            if rate is not None:
                print(row, flush=True)
                rows.append(row)
                keep(arguments, load, rows)
    return found_so_far(arguments, load, rows)


def keep(arguments: argparse.Namespace, load: RealLoad, rows: Sequence[Row]) -> None:
    """Write what was found so far: whoever is cut off has that."""
    if arguments.json:
        found = found_so_far(arguments, load, rows)
        arguments.json.write_text(json.dumps(found, indent=1))


def found_so_far(
    arguments: argparse.Namespace, load: RealLoad, rows: Sequence[Row]
) -> dict[str, Any]:
    curve = load.model.host.costs.curve or {}
    name = arguments.shape if arguments.traces else Path(arguments.model).name
    drafter = arguments.draft_shape if arguments.traces else arguments.draft
    return dict(
        model=name,
        draft=drafter and Path(drafter).name,
        replayed=bool(arguments.traces),
        machine=machine(arguments.device),
        dtype=str(load.model.backbone.dtype).removeprefix("torch."),
        torch=torch.__version__,
        date=date.today().isoformat(),
        lanes=arguments.lanes,
        window=arguments.window,
        warm=arguments.warm,
        longest=arguments.longest,
        most=arguments.most,
        curve={str(n): round(1e3 * each, 4) for n, each in curve.items()},
        rows=[asdict(row) for row in rows],
    )


def best_fixed(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The fixed method with most tokens per second; of those within 2 %, the one that writes
    fastest: below the machine's limit all get through what comes."""
    fixed = [row for row in rows if row["method"] not in ("ar", "auto")]
    most = max(row["tokens_per_second"] for row in fixed)
    near = [row for row in fixed if row["tokens_per_second"] >= 0.98 * most]
    return min(near, key=lambda row: row["per_token_p50"])


def table(found: dict[str, Any]) -> str:
    lines = [
        "| requests/s | method | tokens/s | ms to the first token: p50, p99 | "
        "ms per token: p50, p99 | steps that drafted |",
        "|---|---|---|---|---|---|",
    ]
    for rate in dict.fromkeys(row["per_second"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["per_second"] == rate]
        named = {row["method"]: row for row in rows}
        shown = [("ar", named["ar"]), ("auto", named["auto"])]
        if len(rows) > 2:
            best = best_fixed(rows)
            shown.append((f"{best['method']} (best of {len(rows) - 2})", best))
        for name, row in shown:
            times = [1e3 * row[f"{what}_{p}"] for what in TIMES for p in ("p50", "p99")]
            steps = sum(row["choices"].values())
            drafted = steps and 1 - row["choices"].get("none", 0) / steps
            lines.append(
                f"| {rate:g} | {name} | {row['tokens_per_second']:,.0f} | "
                f"{times[0]:,.0f}, {times[1]:,.0f} | {times[2]:,.1f}, {times[3]:,.1f} | "
                f"{f'{drafted:.0%}' if steps else ''} |"
            )
    return "\n".join(lines)


TIMES = ("first_token", "per_token")


def section(found: dict[str, Any]) -> str:
    pair = f"{found['model']}" + (f" with {found['draft']} to draft" if found["draft"] else "")
    warm = found.get("warm", 0)
    warmed = f", in the last of {1 + warm} turns" if warm else ""
    how = " (random weights; what a real pair said is replayed)" if found["replayed"] else ""
    return (
        f"{pair}{how}, {found['dtype']}, {found['lanes']} lanes, on {found['machine']}, torch "
        f"{found['torch']}, {found['date']}. Requests come for {found['window']:g} seconds, with "
        f"prompts of {SHORTEST} to {found['longest']:,} tokens and outputs of {FEWEST} to "
        f"{found['most']}{warmed}.\n\n{table(found)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="zoo:ar")
    parser.add_argument("--draft")
    parser.add_argument("--shape")
    parser.add_argument("--draft-shape")
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--lanes", type=int, default=32)
    parser.add_argument("--longest", type=int, default=LONGEST, help="prompt")
    parser.add_argument("--most", type=int, default=MOST, help="tokens of an output")
    parser.add_argument("--rates", type=float, nargs="*", default=[4, 16], help="per second")
    parser.add_argument("--window", type=float, default=3, help="seconds in which requests come")
    parser.add_argument("--warm", type=int, default=0, help="turns of each that do not count")
    parser.add_argument("--seconds", type=float, default=75, help="then no more fixed methods")
    parser.add_argument("--record", type=Path, help="write what the pair does here")
    parser.add_argument("--traces", type=Path, help="replay what --record wrote")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--publish", type=Path, nargs="*", help="write the page from these files")
    arguments = parser.parse_args()
    if arguments.publish:
        parts = [section(json.loads(file.read_text())) for file in arguments.publish]
        write_part(DOCS / "serving.md", "\n\n".join(parts), START, END)
        return
    found = report(arguments)
    if found:
        print(table(found))


if __name__ == "__main__":
    main()
