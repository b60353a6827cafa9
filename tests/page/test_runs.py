"""Runs that are started together: all go on, or none does."""

import asyncio

import pytest

from forerun.errors import BadOption
from forerun.page import runs
from forerun.serve.server import Server
from forerun.serve.settings import Settings

LONG = {"model": "zoo:ar", "prompt": "def f(", "max_tokens": 300, "temperature": 0}


def asked(*changes):
    return runs.RunsRequest.model_validate({"runs": [{**LONG, **change} for change in changes]})


async def begin(server, *changes):
    return await runs.start(server, asked(*changes), "someone")


async def settled(server):
    engine = server.models.served("zoo:ar").model.engine
    for _ in range(2000):
        if not engine.busy:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("a lane is still taken")


def test_whoever_leaves_the_queue_leaves_nothing_behind():
    async def scenario():
        server = Server.of(Settings(models=("zoo:ar",), lanes=1))
        first = await begin(server, {}, {})  # one runs, one waits in the engine
        gate = server.models.served("zoo:ar").gate
        waiting = asyncio.ensure_future(begin(server, {}, {}))
        while len(gate.waiting) < 2:
            await asyncio.sleep(0.005)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert gate.inside == 2 and not gate.waiting
        runs.close(first)
        await settled(server)
        assert gate.inside == 0 and not server.decodings.running
        server.models.close()

    asyncio.run(scenario())


def test_if_one_cannot_begin_the_others_end():
    async def scenario():
        server = Server.of(Settings(models=("zoo:ar",), lanes=2))
        wrong = {"forerun": {"method": "jacobi", "options": {"block": 0}}}
        with pytest.raises(BadOption, match="block=0"):
            await begin(server, {}, wrong)
        await settled(server)
        assert not server.decodings.running and server.models.served("zoo:ar").gate.inside == 0
        server.models.close()

    asyncio.run(scenario())


def test_whoever_stops_reading_ends_the_run():
    async def scenario():
        server = Server.of(Settings(models=("zoo:ar",), lanes=1))
        started = await begin(server, {})
        kinds = []
        async for some in runs.lines(started):
            kinds += [line["kind"] for line in some]
            if "commit" in kinds:
                break
        runs.close(started)
        await settled(server)
        assert "end" not in kinds  # the first token was told long before the last
        [result] = started[0].decoding.jobs.results()
        assert result.finish_reason == "cancelled"
        server.models.close()

    asyncio.run(scenario())


def test_a_healed_canvas_is_told_as_it_is_decoded():
    """The page draws what the first line says: a blank that nobody fills would stay one."""

    async def scenario():
        server = Server.of(Settings(models=("zoo:masked",), lanes=1))
        change = {"model": "zoo:masked", "prompt": "def fibon", "max_tokens": 4}
        started = await begin(server, change)
        told = [line async for some in runs.lines(started) for line in some]
        server.models.close()
        return told

    told = asyncio.run(scenario())
    [start] = [line for line in told if line["kind"] == "start"]
    canvas = start["tokens"]
    assert canvas.count(None) == 4
    for line in told:
        if line["kind"] == "commit":
            for position, token in zip(line["positions"], line["tokens"]):
                canvas[position] = token
    assert None not in canvas
