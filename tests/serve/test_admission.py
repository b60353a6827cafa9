"""Who is let in, and when: fair between clients, bounded, and nothing leaks."""

import asyncio

import pytest

from forerun.serve.admission import Gate
from forerun.serve.errors import ApiError


def run(test):
    return asyncio.run(asyncio.wait_for(test(), 20))


async def entered(gate, *names, **options):
    """Tasks that have tried to enter, in this order."""
    tasks = [asyncio.create_task(gate.enter(name, **options)) for name in names]
    await asyncio.sleep(0.01)
    return tasks


def inside(tasks):
    return [i for i, task in enumerate(tasks) if task.done() and not task.exception()]


def test_as_many_enter_as_there_are_lanes_and_a_few_to_follow():
    async def test():
        gate = Gate(lanes=4, queue=9)
        tasks = await entered(gate, *"aaaaaaaa")
        assert inside(tasks) == [0, 1, 2, 3, 4] and len(gate.waiting) == 3
        gate.leave(tasks[0].result())
        await asyncio.sleep(0.01)
        assert inside(tasks) == [0, 1, 2, 3, 4, 5]

    run(test)


def test_a_client_that_asks_much_does_not_keep_others_out():
    async def test():
        gate = Gate(lanes=1, queue=99)
        greedy = await entered(gate, *"aaaaaaaaaa")
        modest = await entered(gate, "b")
        assert inside(greedy) == [0, 1] and inside(modest) == []
        gate.leave(greedy[0].result())
        await asyncio.sleep(0.01)
        assert inside(modest) == [0] and inside(greedy) == [0, 1]

    run(test)


def test_a_higher_priority_goes_first():
    async def test():
        gate = Gate(lanes=1, queue=99)
        first = await entered(gate, "a", "a")
        low = await entered(gate, "b")
        high = await entered(gate, "c", priority=5)
        gate.leave(first[0].result())
        await asyncio.sleep(0.01)
        assert inside(high) == [0] and inside(low) == []

    run(test)


def test_a_full_queue_is_told_with_the_time_to_come_back():
    async def test():
        gate = Gate(lanes=1, queue=2)
        await entered(gate, *"aaaa")
        with pytest.raises(ApiError) as refused:
            await gate.enter("a")
        assert refused.value.status == 429 and int(refused.value.headers["Retry-After"]) >= 1

    run(test)


def test_in_a_full_queue_the_greediest_client_makes_room():
    async def test():
        gate = Gate(lanes=1, queue=3)
        greedy = await entered(gate, *"aaaaa")
        modest = await entered(gate, "b")
        assert len(gate.waiting) == 3
        assert greedy[4].exception().status == 429 and not greedy[3].done()
        gate.leave(greedy[0].result())
        await asyncio.sleep(0.01)
        assert inside(modest) == [0]

    run(test)


def test_who_waits_too_long_is_told_and_leaves_nothing_behind():
    async def test():
        gate = Gate(lanes=1, queue=9)
        first = await entered(gate, *"aa")
        with pytest.raises(ApiError, match="deadline") as late:
            await gate.enter("b", timeout=0.01)
        assert late.value.status == 504 and not gate.waiting
        for task in first:
            gate.leave(task.result())
        assert gate.inside == 0 and not gate._by_client

    run(test)


def test_who_gives_up_leaves_nothing_behind_whenever_it_is():
    async def test():
        gate = Gate(lanes=1, queue=9)
        first = await entered(gate, *"aa")
        waiting = await entered(gate, *"bc")
        waiting[0].cancel()
        await asyncio.sleep(0.01)
        assert [visit.client for visit in gate.waiting] == ["c"]
        gate.leave(first[0].result())  # c is let in
        waiting[1].cancel()  # and gives up before it knows
        await asyncio.sleep(0.01)
        assert gate.inside == 1
        gate.leave(first[1].result())
        gate.leave(first[1].result())
        assert gate.inside == 0

    run(test)


def test_a_closed_gate_refuses_and_tells_those_who_wait():
    async def test():
        gate = Gate(lanes=1, queue=9)
        tasks = await entered(gate, *"aaa")
        gate.close()
        await asyncio.sleep(0.01)
        assert tasks[2].exception().status == 503
        with pytest.raises(ApiError, match="shutting down"):
            await gate.enter("b")

    run(test)
