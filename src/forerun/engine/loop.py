"""Who steps an engine: a thread of its own, or whoever waits.

Callers on any thread, or in any event loop, put messages into the thread's inbox. A message is a
function that runs between two steps: it queues tickets, or cancels one. What changed during a step
is told to those who asked (`Ticket.on_change`) after that step, in order, on the engine's thread:
who is told must not block.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Protocol, TypeVar

import torch

from forerun.engine.engine import Engine
from forerun.engine.ticket import Ticket, do_nothing
from forerun.engine.undisturbed import undisturbed
from forerun.errors import EngineStopped

Event = TypeVar("Event")
Message = Callable[[], object] | None  # None: stop


class Driver(Protocol):
    """What lets requests run, and waits for what comes of them."""

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Queue tickets together: no step comes between them."""

    def cancel(self, ticket: Ticket) -> None:
        """Ask for the end of a request. Never waits: the garbage collector may call it."""

    def wait(self, over: threading.Event, timeout: float | None = None) -> bool:
        """Wait until something is over. False if time ran out before."""

    def next_event(self, events: SimpleQueue[Event]) -> Event:
        """Wait for the next event."""

    async def arrival(self, arrived: asyncio.Event) -> None:
        """Wait, without blocking the event loop, until something may have happened."""

    def close(self) -> None:
        """End all requests; further ones are refused."""


class InCaller:
    """Whoever waits steps the engine: for one thread at a time.

    Runs over several processes need this, since all of them must take the same steps in the same
    order; and so do those who want to step by hand.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self._closed = False

    def submit(self, tickets: Sequence[Ticket]) -> None:
        if self._closed:
            raise closed()
        for ticket in tickets:
            self.engine.submit(ticket)

    def cancel(self, ticket: Ticket) -> None:
        self.engine.cancel(ticket)

    def wait(self, over: threading.Event, timeout: float | None = None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not over.is_set() and self.engine.busy:
            self.engine.step()
            if deadline is not None and time.monotonic() >= deadline:
                break
        return over.is_set()

    def next_event(self, events: SimpleQueue[Event]) -> Event:
        while events.empty():
            self.engine.step()
        return events.get()

    async def arrival(self, arrived: asyncio.Event) -> None:
        self.engine.step()
        await asyncio.sleep(0)

    def close(self) -> None:
        self._closed = True
        self.engine.fail_all(closed())


class EngineThread:
    """The engine runs in a thread of its own, which starts with the first request.

    It stops when it is closed, when it is let go of, or when the interpreter exits. A process that
    was forked off afterwards has no such thread, and its requests are refused.
    """

    def __init__(self, engine: Engine, device: torch.device):
        self._loop = _Loop(engine, device)
        self._finalizer = weakref.finalize(self, self._loop.put, None)
        self._finalizer.atexit = False  # `_stop_all` also waits

    def submit(self, tickets: Sequence[Ticket]) -> None:
        self._check_process()
        self._loop.submit(tickets)

    def cancel(self, ticket: Ticket) -> None:
        if not ticket.over:
            self._loop.put(partial(self._loop.engine.cancel, ticket))

    def wait(self, over: threading.Event, timeout: float | None = None) -> bool:
        if not over.is_set():
            self._check_process()
        return over.wait(timeout)

    def next_event(self, events: SimpleQueue[Event]) -> Event:
        if events.empty():
            self._check_process()
        return events.get()

    async def arrival(self, arrived: asyncio.Event) -> None:
        self._check_process()
        await arrived.wait()

    def close(self) -> None:
        self._loop.stop(closed())

    def _check_process(self) -> None:
        """Refuse to wait for a thread that a fork has left behind. What it was doing at that
        moment, and what torch's own threads were, nobody knows."""
        if self._loop.process not in (None, os.getpid()):
            raise EngineStopped(
                "this model decoded before its process was forked, and the new process has no "
                "thread that runs it: load the model after the fork, or start processes with "
                "multiprocessing's 'spawn'."
            )


class _Loop:
    """What the thread runs. It knows the engine but not who owns it, so that letting go of the
    owner ends it."""

    def __init__(self, engine: Engine, device: torch.device):
        self.engine = engine
        self.device = device
        # Putting into it never waits, not even where the garbage collector interrupts a put.
        self.inbox: SimpleQueue[Message] = SimpleQueue()
        engine.has_messages = partial(_holds_something, self.inbox)
        self.process: int | None = None  # where the thread runs, once it does
        self._thread: threading.Thread | None = None
        self._stopped: EngineStopped | None = None
        self._lock = threading.Lock()  # nothing is submitted to a loop that has stopped
        self._changed: dict[Ticket, Callable[[], None]] = {}
        self._at_work = False

    def submit(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            ticket.on_change = partial(self._note, ticket, ticket.on_change)
        with self._lock:
            if self._stopped is not None:
                raise EngineStopped(str(self._stopped)) from self._stopped.__cause__
            if self._thread is None:
                self._start()
            self.put(partial(self._queue, tickets, torch.get_num_threads()))

    def put(self, message: Message) -> None:
        """Have the thread do something, after the step that it is in; that one ends soon."""
        self.inbox.put(message)
        self.engine.stop.set()

    def _start(self) -> None:
        self.process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="forerun-engine", daemon=True)
        _running.add(self)
        _threads.difference_update([thread for thread in _threads if not thread.is_alive()])
        _threads.add(self._thread)
        self._thread.start()

    def stop(self, reason: EngineStopped) -> None:
        """Fail what runs, and wait for the thread to end."""
        with self._lock:
            self._stopped = self._stopped or reason
        self.put(None)
        thread = self._thread
        if self.process == os.getpid() and thread is not threading.current_thread():
            assert thread is not None
            thread.join()

    def _run(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        reason = EngineStopped("this model was let go of while a request ran.")
        try:
            with torch.inference_mode():  # once: it takes time to enter
                while self._take_messages():
                    self.engine.step()
                    self._tell()
        except BaseException as error:  # the engine's own failure: nobody may wait for ever
            reason = EngineStopped(f"the engine of this model has failed: {error!r}")
            reason.__cause__ = error
        self._end(reason)

    def _take_messages(self) -> bool:
        """Apply what has come; while there is nothing to do, wait for it. False: stop."""
        while not self.engine.busy or not self.inbox.empty():
            if not self.engine.busy:
                self._set_at_work(False)
            if not self._apply(self.inbox.get()):
                return False
        self._set_at_work(True)
        return True

    def _set_at_work(self, at_work: bool) -> None:
        if at_work != self._at_work:
            self._at_work = at_work
            undisturbed.begin() if at_work else undisturbed.end()

    def _apply(self, message: Message) -> bool:
        # A function of its own: a thread that waits for the next message must not hold the last.
        if message is None:
            return False
        message()
        self._tell()
        return True

    def _queue(self, tickets: Sequence[Ticket], threads: int) -> None:
        if torch.get_num_threads() != threads:  # the caller's setting does not reach this thread
            torch.set_num_threads(threads)
        for ticket in tickets:
            self.engine.submit(ticket)

    def _note(self, ticket: Ticket, tell: Callable[[], None]) -> None:
        self._changed[ticket] = tell

    def _tell(self) -> None:
        """Tell callers what has changed."""
        changed = self._changed
        if changed:
            self._changed = {}
            for ticket, tell in changed.items():
                if ticket.over:
                    ticket.on_change = do_nothing  # who is told may hold the ticket
                tell()

    def _end(self, reason: EngineStopped) -> None:
        """Fail all who are still here, and those whose messages came too late."""
        with self._lock:
            self._stopped = self._stopped or reason
            reason = self._stopped
        try:
            while not self.inbox.empty():
                self._apply(self.inbox.get())
            self.engine.fail_all(reason)
            self._tell()
        finally:
            self._set_at_work(False)
            _running.discard(self)


def _holds_something(inbox: SimpleQueue[Message]) -> bool:
    return not inbox.empty()


def closed() -> EngineStopped:
    return EngineStopped("this model is closed: load it again.")


_running: set[_Loop] = set()
_threads: set[threading.Thread] = set()  # those that have ended their loop may still free memory


def _stop_all() -> None:
    """A thread that is inside of torch while the interpreter goes would bring it down."""
    for loop in list(_running):
        loop.stop(EngineStopped("the interpreter exits."))
    for thread in list(_threads):
        thread.join()


def _forget_all() -> None:
    """A process that was forked off has none of these threads."""
    _running.clear()
    _threads.clear()
    undisturbed.forget()


atexit.register(_stop_all)
if hasattr(os, "register_at_fork"):  # not on every system
    os.register_at_fork(after_in_child=_forget_all)
