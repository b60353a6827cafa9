"""Worlds for the stateful test of isolation: a model with few lanes, requests of every method, and
everything that can go wrong beside them.

Whatever happens to its neighbours, a request that ends must end as it does alone: the same tokens,
text, reasons and log-probabilities. Models are float64, where the order of additions never decides.
"""

from __future__ import annotations

import functools
import gc
import math
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from forerun.errors import ForerunError
from tests.helpers import PROMPTS, fresh, model, stepped

LANES = 3
POISON = [255, 254, 255]  # a prompt whose forwards are no numbers
TOKENS = dict(max_tokens=9, ignore_eos=True)


def request(prompt: int = 0, **how: Any) -> dict[str, Any]:
    return {"prompt": PROMPTS[prompt], **TOKENS, **how}


def holes(canvas: list[int | None], **how: Any) -> dict[str, Any]:
    return {"token_ids": canvas, **how}


WARM = dict(temperature=0.9, top_p=0.95)
BUSY = dict(
    temperature=1.0,
    repetition_penalty=1.2,
    presence_penalty=0.4,
    logit_bias={7: 1.5},
    min_tokens=3,
    stop_token_ids=[11, 220],
    ignore_eos=False,
)


def with_samplings(*methods: dict[str, Any]) -> list[dict[str, Any]]:
    """Every method greedy, warm with log-probabilities, and with all else that edits a law; on
    prompts of other lengths."""
    found = []
    for i, method in enumerate(methods):
        found.append(request(i % 5, **method))
        found.append(request((i + 1) % 5, **method, **WARM, seed=i, logprobs=2, n=1 + i % 2))
        found.append(request((i + 2) % 5, **method, **{**TOKENS, **BUSY}, seed=i + 1))
    return found


@functools.cache
def drafts() -> dict[str, Any]:
    f64 = torch.float64
    return {"causal": model("llama", f64, seed=1), "masked": model("masked", f64)}


def causal_requests() -> list[dict[str, Any]]:
    causal, masked = drafts()["causal"], drafts()["masked"]
    return with_samplings(
        dict(method="ar"),
        dict(method="jacobi", block=4),
        dict(method="jacobi", block=5, start="random", refill=False),
        dict(method="multiblock", block=4, candidates=2),
        dict(method="lookahead", window=3, ngram=3, guesses=3),
        dict(method="lookup", k=4),
        dict(method="auto"),
        dict(method="predicted", k=4, prediction=[5, 5, 9, 3, 100, 7, 5]),
        dict(method="speculative", draft=causal, k=3),
        dict(method="specdiff", draft=masked, k=4, keep=True),
        dict(method="specdiff", draft=masked, k=4, steps=2, adapt=True),
        dict(method="specdiff", draft=masked, k=3, first=3, first_draft=causal),
        dict(method="specdiff-confidence", draft=masked, k=4),
        dict(method="specdiff-ddpm", draft=masked, k=4),
    )


def subset_requests() -> list[dict[str, Any]]:
    causal = drafts()["causal"]
    canvas = [None, None, 5, None, 9, None, 3]
    filling = [
        holes(canvas, method=method, seed=seed, temperature=float(seed), **how)
        for seed in (0, 1)
        for method, how in (
            ("sequential", {}),
            ("assd", dict(k=3)),
            ("assd", dict(k=16, ahead="every")),
            ("assd", dict(draft=causal, k=2)),
            ("assd", dict(draft="ngram", k=2, n=1 + seed, logprobs=1)),
        )
    ]
    writing = with_samplings(
        dict(method="sequential"),
        dict(method="assd", k=4, ahead="none"),
        dict(method="assd", k=3, ahead="every"),
        dict(method="assd-tolerant", k=4, tolerance=0.2),
    )
    return filling + writing


def xlnet_requests() -> list[dict[str, Any]]:
    return [
        holes([4, None, None, 9, None], method=method, seed=seed, n=n, temperature=warmth, **how)
        for seed, n, warmth in ((0, 1, 0.0), (1, 1, 1.0), (2, 2, 1.0))
        for method, how in (("sequential", {}), ("assd", dict(k=3)), ("assd-tolerant", {}))
    ]


def masked_requests() -> list[dict[str, Any]]:
    return with_samplings(
        dict(method="stepwise", block=4),
        dict(method="stepwise", block=4, cache="dual", refresh=2),
        dict(method="ssd", block=4, drafts=3),
        dict(method="ssd", block=4, drafts=3, cache="prefix", refresh=2, tree="chain"),
        dict(method="threshold", block=4, threshold=0.3, cache="dual", refresh=2),
        dict(method="entropy-bounded", block=4, bound=1.0),
        dict(method="steps", block=4, steps=2),
        dict(method="ancestral", steps=4),
    )


def block_requests() -> list[dict[str, Any]]:
    routers = ("span", "score", "hysteresis", "bandit")
    return with_samplings(
        dict(method="ar"),
        dict(method="block", threshold=0.3),
        dict(method="block", threshold=0.2, edit=0.5),
        dict(method="block-stepwise"),
        dict(method="block-ssd", drafts=3),
        dict(method="s2d2-exact", k=3),
        dict(method="s2d2-exact", k=2, ahead="every"),
        dict(method="s2d2-canvases", threshold=0.3, drafts=3),
        *(dict(method="s2d2", threshold=0.3, router=router) for router in routers),
    )


REQUESTS = {
    "llama": causal_requests,
    "gpt2": causal_requests,
    "any-subset": subset_requests,
    "xlnet": xlnet_requests,
    "masked": masked_requests,
    "masked-shifted": masked_requests,
    "block": block_requests,
    "block-shifted": block_requests,
}


def submitted(m: Any, how: dict[str, Any]) -> Any:
    arguments = dict(how)
    if "prompt" in arguments:
        return m.submit(arguments.pop("prompt"), **arguments)
    return m.submit_infill(**arguments)


@functools.cache
def requests_of(kind: str) -> list[dict[str, Any]]:
    return REQUESTS[kind]()


@functools.cache
def alone(kind: str, index: int) -> list[Any]:
    """What a request gives that has a model to itself."""
    m = stepped(fresh(kind, torch.float64, lanes=1))
    jobs = submitted(m, requests_of(kind)[index])
    m.engine.run()
    return jobs.results()


@dataclass
class Tally:
    """What was done to an engine, and what came of it."""

    requests: int = 0
    compared: int = 0
    steps: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    mismatches: list[str] = field(default_factory=list)
    lanes_leaked: int = 0


TALLY = Tally()


class World:
    """One engine and the requests in it."""

    def __init__(self, kind: str):
        self.kind = kind
        self.model = stepped(_model(kind))
        self.engine = self.model.engine
        self.open: list[tuple[int, Any]] = []  # (number of the request, its jobs)
        self.spoilt: list[Any] = []  # jobs that were cancelled, or were made to fail

    def submit(self, index: int) -> None:
        TALLY.requests += 1
        index %= len(requests_of(self.kind))
        self.open.append((index, submitted(self.model, requests_of(self.kind)[index])))

    def step(self, count: int) -> None:
        for _ in range(count):
            if self.engine.busy:
                TALLY.steps += 1
                self.engine.step()
        self.compare_finished()

    def compare_finished(self) -> None:
        for entry in [entry for entry in self.open if _over(entry[1])]:
            self.open.remove(entry)
            index, jobs = entry
            compare(self.kind, index, jobs.results())

    def cancel(self, which: int) -> None:
        if self.open:
            TALLY.faults["cancelled"] += 1
            self.spoil(which % len(self.open)).cancel()

    def spoil(self, which: int) -> Any:
        """Take one out of those that must end as they do alone."""
        _, jobs = self.open.pop(which)
        self.spoilt.append(jobs)
        return jobs

    def abandon_a_stream(self, index: int, pieces: int) -> None:
        """Open a stream, read a little, and let the garbage collector find it in mid-step."""
        TALLY.faults["abandoned"] += 1
        how = dict(requests_of(self.kind)[index % len(requests_of(self.kind))])
        if "prompt" not in how:
            return
        stream = self.model.stream(how.pop("prompt"), **{**how, "n": 1})
        stream.itself = stream
        with suppress(ForerunError):  # some requests are refused once they run
            for _ in range(pieces):
                next(stream, None)
        del stream
        threshold = gc.get_threshold()
        gc.set_threshold(10)
        try:
            self.step(2)
        finally:
            gc.set_threshold(*threshold)
        gc.collect()
        self.step(1)

    def interrupt(self, which: int) -> None:
        """A keyboard interrupt between the answers of two sequences."""
        running = [one.ticket for one in self.engine.running]
        if not running:
            return
        TALLY.faults["interrupted"] += 1
        ticket = running[which % len(running)]
        told = ticket.on_change

        def interrupted() -> None:
            ticket.on_change = told
            told()
            raise KeyboardInterrupt

        ticket.on_change = interrupted
        try:
            for _ in range(4):
                self.step(1)
        except KeyboardInterrupt:
            pass
        finally:  # a step may fail for another reason: that is what is looked for
            ticket.on_change = told
        self.compare_finished()

    def fail_a_forward(self) -> None:
        """A forward that raises half-way: it fails those whom it served."""
        TALLY.faults["failed forward"] += 1
        backbone = self.model.backbone
        forward = backbone.forward

        def failing(batch: Any, slots: Any) -> Any:
            forward(batch, slots)
            raise RuntimeError("out of memory")

        backbone.forward = failing
        try:
            if self.engine.busy:
                self.engine.step()
        finally:
            del backbone.forward
        for i in reversed(range(len(self.open))):
            tickets = [job.ticket for job in _jobs(self.open[i][1])]
            if any(isinstance(t.error, RuntimeError) for t in tickets):
                self.spoil(i)

    def poison(self) -> None:
        """A request whose forwards are no numbers, and leave none in its slots."""
        TALLY.faults["not a number"] += 1
        self.hostile(POISON, blanks=6)

    def outgrow(self) -> None:
        """A request that fills the whole context."""
        TALLY.faults["out of context"] += 1
        self.hostile([9, 8] * 70, blanks=20)

    def hostile(self, prompt: list[int], blanks: int) -> None:
        """A request that ends badly, as all models of this world can be asked."""
        how = holes([*prompt, *[None] * blanks]) if self.kind == "xlnet" else {"prompt": prompt}
        self.spoilt.append(submitted(self.model, {**how, "temperature": 1.0}))

    def plug_in(self, bad: Any) -> None:
        """A method of somebody else's that does not behave."""
        TALLY.faults[f"plugin: {bad.__name__}"] += 1
        jobs = submitted(self.model, requests_of(self.kind)[0])
        for job in _jobs(jobs):
            job.ticket.start = functools.partial(bad, job.seq, self.model.handle())
        self.spoilt.append(jobs)

    def check_pages(self) -> None:
        """Every page is counted as often as lanes have it."""
        for host in self.engine.hosts:
            host.pool.check([memo.pages for memo in host.memos])

    def end(self) -> None:
        """Serve all who are left; nothing may stay behind."""
        while self.engine.busy:
            self.step(1)
        self.compare_finished()
        assert not self.open, "a request never ended"
        assert all(_over(jobs) for jobs in self.spoilt)
        self.check_pages()
        TALLY.lanes_leaked += LANES - len(self.engine.free_lanes)
        assert self.engine.free_lanes == list(range(LANES)), "a lane was not given back"


@functools.cache
def _model(kind: str) -> Any:
    """One engine for all lives of a kind: what one leaves behind is the next one's past."""
    m = fresh(kind, torch.float64, lanes=LANES)
    m.engine.page = 8
    # So few that pages run out, and sequences are computed again.
    m.engine.slots = 88 if kind in ("llama", "gpt2") else 200
    m.engine.chunk = 5
    m.host.pool.copies = kind in ("gpt2", "masked-shifted")  # the others hold pages together
    backbone = m.backbone
    kind_of = type(backbone)

    class Poisonable(kind_of):
        def forward(self, batch: Any, slots: Any) -> Any:
            logits = super().forward(batch, slots)
            at = 0
            for i, segment in enumerate(batch.segments):
                reads = sum(map(len, segment.plan.reads))
                if segment.plan.rows[0, :3].tolist() == POISON:
                    logits[at : at + reads] = math.nan
                    for layer in range(self.layers):
                        for kept in slots.flat(layer):
                            kept[batch.span(i)] = math.nan
                at += reads
            return logits

    backbone.__class__ = Poisonable
    return m


def _jobs(jobs: Any) -> list[Any]:
    return [job for job in jobs.jobs if hasattr(job, "ticket")]


def _over(jobs: Any) -> bool:
    return all(job.ticket.over for job in _jobs(jobs))


def compare(kind: str, index: int, found: list[Any]) -> None:
    """Each result must be what it is alone."""
    TALLY.compared += 1
    for ours, own in zip(found, alone(kind, index), strict=True):
        problem = difference(ours, own)
        if problem:
            how = requests_of(kind)[index]
            TALLY.mismatches.append(f"{kind} {how}: {problem}")
            raise AssertionError(TALLY.mismatches[-1])


def difference(ours: Any, own: Any) -> str | None:
    """What differs between two results, if anything does."""
    for name in ("token_ids", "text", "finish_reason"):
        a, b = getattr(ours, name, None), getattr(own, name, None)
        if a != b:
            return f"{name} {a!r}, alone {b!r}"
    if (ours.error is None) != (own.error is None):
        return f"error {ours.error!r}, alone {own.error!r}"
    for a, b in zip(ours.logprobs or [], own.logprobs or [], strict=True):
        if not math.isclose(a["logprob"], b["logprob"], rel_tol=1e-6, abs_tol=1e-9):
            return f"logprob {a}, alone {b}"
    return None


async def awaits_while_closing(seq: Any, target: Any) -> None:
    try:
        while True:
            await target.next_law(seq)
    finally:
        await target.next_law(seq)


def is_no_coroutine(seq: Any, target: Any) -> int:
    return 5


async def invents_a_token(seq: Any, target: Any) -> None:
    seq.fill(seq.next(1), [10**6], "invented")


async def awaits_nonsense(seq: Any, target: Any) -> None:
    import asyncio

    await asyncio.sleep(0)


async def raises(seq: Any, target: Any) -> None:
    raise ForerunError("no")


PLUGINS = (is_no_coroutine, invents_a_token, awaits_nonsense, raises)
