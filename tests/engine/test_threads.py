"""One model, many callers: any thread, any event loop, and what becomes of those that give up."""

import asyncio
import gc
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch

from bench.threads import run as let_loose
from forerun.engine.loop import InCaller
from forerun.errors import EngineStopped
from tests.helpers import PROMPTS, fresh, model, settled

HOW = dict(max_tokens=12, ignore_eos=True)


def alone(prompt=PROMPTS[0], **how):
    return model().generate(prompt, **{**HOW, **how}).token_ids


def engine_threads():
    return {t for t in threading.enumerate() if t.name == "forerun-engine"}


def wait_until(true, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.002)
    assert true()


def test_threads_and_tasks_get_what_each_would_get_alone():
    found = let_loose(fresh(lanes=4), threads=12, tasks=16, seconds=1.0)
    assert found["wrong"] == [] and found["equal"] > 5 and found["cancelled"] > 5
    assert (found["busy lanes"], found["waiting"], found["threads left"]) == (0, 0, 0)


def test_a_thread_starts_with_the_first_request_and_ends_with_the_model():
    before = engine_threads()
    m = fresh(lanes=1)
    assert engine_threads() <= before
    m.generate("x", **HOW)
    m.generate("y", **HOW)
    [thread] = engine_threads() - before
    engine = weakref.ref(m.engine)
    del m
    gc.collect()
    wait_until(lambda: not thread.is_alive())
    gc.collect()
    assert engine() is None


def test_a_closed_model_refuses_and_gives_back_its_cache():
    with fresh(lanes=1) as m:
        assert m.generate("x", **HOW).token_ids == alone("x")
        slots = weakref.ref(m.host)
    gc.collect()
    assert slots() is None
    for again in (m.generate, m.stream, m.submit):
        with pytest.raises(EngineStopped, match="closed"):
            again("x", **HOW)
    m.close()


def test_closing_ends_what_runs_with_an_error():
    m = fresh(lanes=1)
    slow(m)
    running = m.submit(PROMPTS[0], **HOW)
    waiting = m.submit(PROMPTS[1], **HOW)
    wait_until(lambda: m.engine.running)
    m.close()
    for jobs in (running, waiting):
        with pytest.raises(EngineStopped, match="closed"):
            jobs.outcome()


def slow(m, seconds=0.02):
    forward = m.backbone.forward

    def sleeping(batch, slots):
        time.sleep(seconds)
        return forward(batch, slots)

    m.backbone.forward = sleeping


def test_a_failure_of_the_engine_itself_reaches_everyone():
    m = fresh(lanes=2)
    slow(m)
    both = [m.submit(PROMPTS[i], **HOW) for i in (0, 1)]
    wait_until(lambda: len(m.engine.running) == 2)
    m.engine._next_for_forward = lambda: 1 / 0
    for jobs in both:
        with pytest.raises(EngineStopped, match="ZeroDivisionError"):
            jobs.run()
            jobs.outcome()
    with pytest.raises(EngineStopped, match="ZeroDivisionError") as told:
        m.generate("x", **HOW)
    assert isinstance(told.value.__cause__, ZeroDivisionError)


def test_a_tokenizer_that_fails_at_the_end_fails_one_request():
    m = fresh(lanes=2)
    decode = m.decode
    m.decode = lambda tokens: decode(tokens) if len(tokens) < 4 else 1 / 0
    stream = m.stream("x", max_tokens=9, ignore_eos=True)
    with pytest.raises(ZeroDivisionError):
        list(stream)
    m.decode = decode
    assert m.generate(PROMPTS[0], **HOW).token_ids == alone()


def test_requests_are_awaited():
    async def both():
        m = fresh(lanes=2)
        pieces = []

        async def stream():
            async for piece in m.astream("ABAB", **HOW):
                pieces.append(piece)

        results = asyncio.gather(*(m.agenerate(PROMPTS[i], **HOW) for i in range(3)))
        _, found = await asyncio.gather(stream(), results)
        return [r.token_ids for r in found], "".join(pieces)

    found, text = asyncio.run(both())
    assert found == [alone(PROMPTS[i]) for i in range(3)]
    assert text == model().generate("ABAB", **HOW).text


def test_an_event_loop_goes_on_while_a_request_runs():
    async def ticks():
        m = fresh(lanes=1)
        slow(m, 0.05)
        request = asyncio.create_task(m.agenerate("x", max_tokens=4, ignore_eos=True))
        count = 0
        while not request.done():
            await asyncio.sleep(0.005)
            count += 1
        return count

    assert asyncio.run(ticks()) > 10


@pytest.mark.parametrize("streams", [False, True])
def test_cancelling_a_task_cancels_its_request(streams):
    m = fresh(lanes=1)
    slow(m)

    async def stream():
        async for _ in m.astream("ABAB", max_tokens=100, ignore_eos=True):
            pass

    async def cancel():
        waiting = asyncio.ensure_future(
            stream() if streams else m.agenerate("ABAB", max_tokens=100, ignore_eos=True)
        )
        await asyncio.sleep(0.1)
        assert m.engine.running
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(cancel())
    assert settled(m, 1.0).engine.free_lanes == [0]


def test_an_event_loop_that_is_gone_harms_nobody():
    m = fresh(lanes=1)
    slow(m)
    streams = []

    async def leave():
        stream = m.stream("ABAB", max_tokens=20, ignore_eos=True)
        streams.append(stream)
        async for _ in stream.jobs:
            return

    asyncio.run(leave())
    assert len(streams[0].results[0].token_ids) < 20
    assert m.generate(PROMPTS[0], **HOW).token_ids == alone()


def test_the_requests_of_one_call_begin_together():
    m = fresh(lanes=4)
    m.generate(PROMPTS[:4], **HOW)
    assert m.engine.clock.forwards == HOW["max_tokens"]


def test_events_come_after_the_step_that_made_them():
    m = fresh(lanes=1)
    for _ in range(20):
        m.engine.clock.total = 0.0
        m.generate("x", max_tokens=1)
        assert m.engine.clock.total > 0


def test_the_engine_uses_as_many_threads_as_its_caller():
    m = fresh(lanes=1)
    seen = []
    forward = m.backbone.forward
    m.backbone.forward = lambda *a: seen.append(torch.get_num_threads()) or forward(*a)
    for threads in (1, 2, 1):
        torch.set_num_threads(threads)
        m.generate("x", max_tokens=1)
    assert seen == [1, 2, 1]


def test_without_a_thread_whoever_waits_steps():
    m = model().twin(2, threaded=False)
    alone()
    before = engine_threads()
    assert isinstance(m.driver, InCaller)
    assert m.generate(PROMPTS[0], **HOW).token_ids == alone()
    assert "".join(m.stream("ABAB", **HOW)) == model().generate("ABAB", **HOW).text
    assert asyncio.run(m.agenerate(PROMPTS[0], **HOW)).token_ids == alone()
    assert engine_threads() <= before
    m.close()
    with pytest.raises(EngineStopped, match="closed"):
        m.generate("x")


def in_child(m, stream, answers):
    for ask in (lambda: m.generate("x", max_tokens=2), lambda: next(stream)):
        try:
            ask()
        except EngineStopped as error:
            answers.put(str(error))
    os._exit(0)


def test_a_forked_process_is_refused_at_once():
    m = fresh(lanes=1)
    m.generate("x", **HOW)
    slow(m)
    stream = m.stream("x", **HOW)
    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()
    child = fork.Process(target=in_child, args=(m, stream, answers))
    child.start()
    child.join(20)
    assert child.exitcode == 0
    assert all("after the fork" in answers.get() for _ in range(2))
    assert len("".join(stream)) >= 0 and m.generate(PROMPTS[0], **HOW).token_ids == alone()


def first_in_child(m, answers):
    answers.put(m.generate(PROMPTS[0], **HOW).token_ids)


def test_a_model_that_never_decoded_works_after_a_fork():
    m = fresh(lanes=1)
    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()
    child = fork.Process(target=first_in_child, args=(m, answers))
    child.start()
    child.join(20)
    assert child.exitcode == 0 and answers.get() == alone()


def test_the_interpreter_exits_while_a_request_runs():
    code = """
from forerun.api import Model
from forerun.backbones.table import TableBackbone
from forerun.families.causal import Causal
model = Model("table", Causal(), TableBackbone(4, context=1000), lanes=1)
jobs = model.submit([1], max_tokens=900)
while not jobs.tokens:
    pass
raise SystemExit(3)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3 and done.stderr == ""


def test_the_interpreter_waits_for_a_thread_that_still_frees_its_engine():
    """One that is inside of torch when the interpreter goes would abort the process."""
    code = """
import gc, time, torch
from forerun.api import Model
from forerun.backbones.table import TableBackbone
from forerun.families.causal import Causal

class Slow:
    def __del__(self):
        for _ in range(100):
            torch.rand(300, 300) @ torch.rand(300, 300)

model = Model("table", Causal(), TableBackbone(4, context=100), lanes=1)
model.generate([1], method="ar", max_tokens=2)
model.engine.slow = Slow()
del model
gc.collect()
time.sleep(0.1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == ""
