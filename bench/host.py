"""What the host does in a step, for methods that draft: microseconds of Python per step and per
sequence, with a device that takes no time (`bench/no_device.py`); and how many of them the device
waits, because the next forward cannot begin before they are over (`waits`).

    python bench/host.py                             # all methods at batch 1, 8 and 32
    python bench/host.py --methods lookup --profile  # and where the time goes

A step is everything from one verdict to the next; `whole` is microseconds per token of whole
requests that come at once, from their prompts on. On a GPU every call of torch also costs a launch,
2 to 10 microseconds, which this device does not have: so calls are counted, too.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from no_device import Script, model_without_device
from torch.overrides import TorchFunctionMode

from forerun.api import Model
from forerun.checkpoints import tiny
from forerun.families.base import Family
from forerun.families.causal import Causal
from forerun.families.features import Features
from forerun.families.masked import Masked
from forerun.probability.markov import Markov
from forerun.probability.noise import uniform
from forerun.probability.pending import PendingLaws
from forerun.sequence.canvas import Canvas

VOCAB = 256
PROMPT = 256
METHODS = (
    "ar",
    "jacobi",
    "lookahead",
    "multiblock",
    "lookup",
    "speculative",
    "specdiff",
    "look",
    "auto",
    "auto+draft",
)
PHRASE = 24  # tokens that a text repeats
CHANGES = 0.07  # share of its tokens that are others
DRAFT_RIGHT = 0.86  # share of a draft model's tokens that are the text's
GUESS_RIGHT = 0.35  # share of what a model says behind a wrong guess


def is_wrong(key: int, at: int, kind: int, share: float) -> bool:
    return uniform(key, at, kind) < share


@lru_cache(maxsize=1 << 20)
def text_token(number: int, at: int) -> int:
    """A text that repeats a phrase, with changes that stay for a while."""
    if is_wrong(number, at, 0, CHANGES):
        return int(VOCAB * uniform(number, at, 1))
    return text_token(number, at - PHRASE) if at >= PHRASE else (50 * number + at) % VOCAB


def number_of(seq: Canvas) -> int:
    return int(seq.tokens[0])


def text(seq: Canvas, at: int) -> int:
    return text_token(number_of(seq), PROMPT + at)


def drafted(seq: Canvas, at: int) -> int:
    wrong = is_wrong(number_of(seq), at, 2, 1 - DRAFT_RIGHT)
    return 7 if wrong else text(seq, at)


def guessed(seq: Canvas, at: int) -> int:
    distance = at - seq.filled  # what is wrong now may be right in the next step
    wrong = is_wrong(number_of(seq), at, 3 + distance, 1 - GUESS_RIGHT)
    return 7 if wrong else text(seq, at)


class CountedCalls(TorchFunctionMode):
    """Calls of torch that a GPU would have to be told of, and of those that only look."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        makes_nothing = func.__name__ in ("__get__", "__len__") or PendingLaws in types
        self.calls += not makes_nothing
        return func(*args, **(kwargs or {}))


def draft_family(method: str) -> Family | None:
    if method == "look":
        tokens = len(tiny.tokenizer())
        markov = Markov(*torch.zeros(2, tokens, 4))
        return Features(tokens, tokens - 1, block=8, markov=markov)
    if method == "specdiff":
        return Masked(VOCAB)
    return Causal() if method in ("speculative", "auto+draft") else None


@dataclass
class Bench:
    """One method at one size of a batch."""

    method: str
    batch: int
    tokens: int
    temperature: float
    k: int | None = None  # tokens of a draft, where that is not left to the method

    def __post_init__(self) -> None:
        self.script = Script(text, drafted, guessed)
        self.model, self.draft = self._models()
        self.steps = 0
        self.written = 0
        self.best = float("inf")
        self.waited = float("inf")  # seconds per step in which the device has nothing to do
        self.whole = float("inf")  # seconds per token, from the prompts to the last one

    def _models(self) -> tuple[Model, Model | None]:
        context = PROMPT + self.tokens + 64
        family = draft_family(self.method)
        tokenizer = tiny.tokenizer()
        # only what goes ahead needs integers on the device
        device = "meta" if self.method in ("lookahead", "multiblock") else "cpu"
        return model_without_device(tokenizer, self.batch, context, self.script, family, device)

    def submit(self) -> Any:
        prompts = [
            [number, *(text_token(number, at) for at in range(1, PROMPT))]
            for number in range(self.batch)
        ]
        options: dict[str, Any] = dict(max_tokens=self.tokens, temperature=self.temperature)
        if self.k is not None:
            options["k"] = self.k
        if self.draft is not None:
            options["draft"] = self.draft
        method = "specdiff" if self.method == "look" else self.method.partition("+")[0]
        return self.model.submit(prompts, method=method, ignore_eos=True, **options)

    def warm_up(self) -> None:
        """Read all prompts, and make programs of sizes that come again."""
        for _ in range(2):
            self.submit()
            self.model.engine.run()

    def run(self, profile: cProfile.Profile | None = None) -> float:
        """Seconds of the host per step, of one decoding."""
        jobs = self.submit()
        engine = self.model.engine
        while not all(one.seq.filled for one in engine.running) or not engine.running:
            engine.step()  # until all prompts are read
        began_at = sum(one.seq.filled for one in engine.running)
        before = engine.hosts[0].work.forwards
        self.script.begin()
        gc.collect()
        began = time.thread_time()
        with profile or nullcontext():
            while min(one.seq.remaining for one in engine.running) > 20:  # the batch is whole
                engine.step()
        spent = time.thread_time() - began - self.script.seconds
        self.steps = engine.hosts[0].work.forwards - before
        self.waited = min(self.waited, self.script.waited / self.steps)
        self.written = sum(one.seq.filled for one in engine.running) - began_at
        engine.run()
        for result in jobs.results():
            if result.error is not None:
                raise result.error
        return spent / self.steps

    def measure(self) -> None:
        self.best = min(self.best, self.run())
        jobs = self.submit()
        self.script.begin()
        began = time.thread_time()
        self.model.engine.run()
        spent = time.thread_time() - began - self.script.seconds
        self.whole = min(self.whole, spent / sum(len(one.token_ids) for one in jobs.results()))

    def row(self) -> str:
        engine = self.model.engine
        before = engine.hosts[0].work.forwards
        with CountedCalls() as counted:
            results = self.submit()
            engine.run()
        calls = counted.calls / (engine.hosts[0].work.forwards - before)
        events = [event for one in results.results() for event in one.trace if event.drafted]
        tried = sum(len(event.drafted) for event in events)
        kept = sum(event.accepted for event in events)
        micros = 1e6 * self.best
        share = f"{100 * kept / tried:4.0f} %" if tried else "     -"
        per_step = self.written / self.steps / self.batch
        return (
            f"{self.method:12} {self.batch:5} {micros:9.0f} {micros / self.batch:9.1f} "
            f"{1e6 * self.waited:7.0f} {1e6 * self.whole:7.1f} {calls:7.1f} {per_step:7.2f} {share}"
        )


def profiled(bench: Bench) -> None:
    profile = cProfile.Profile()
    bench.run(profile)
    pstats.Stats(profile).sort_stats("tottime").print_stats(60)


def collection() -> str:
    """What a full garbage collection takes, which no step must wait for."""
    gc.collect()
    began = time.perf_counter()
    gc.collect()
    seconds = time.perf_counter() - began
    return f"a full garbage collection: {1e3 * seconds:.0f} ms, {len(gc.get_objects()):,} objects"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--max-tokens", type=int, default=120)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--k", type=int)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args()
    print("method       batch  us/step  us/sequence   waits  whole  calls  tokens accepted")
    for method in asked.methods:
        for batch in asked.batch:
            bench = Bench(method, batch, asked.max_tokens, asked.temperature, asked.k)
            bench.warm_up()
            for _ in range(asked.rounds):
                bench.measure()
            print(bench.row(), flush=True)
            if asked.profile:
                profiled(bench)
    print(collection())


if __name__ == "__main__":
    main()
