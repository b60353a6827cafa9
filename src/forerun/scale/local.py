"""Workers on this machine: this process alone, or several."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from forerun.options import check_whole
from forerun.scale.work import Answered, Part, Worker, WorkerPlan, WorkersLost

MOST_LOSSES = 3  # of workers in a row, without an answer in between
LOOKS_FOR_PARENT = 2.0  # seconds


@dataclass(frozen=True)
class LocalPool:
    """One worker is this process; several are processes of their own."""

    workers: int = 1
    threads: int = 1  # of each worker

    def __post_init__(self) -> None:
        check_whole("workers", self.workers)
        check_whole("threads", self.threads)

    def run(self, plan: WorkerPlan, parts: Iterable[Part]) -> Iterator[Answered]:
        if self.workers == 1:
            return self._here(plan, parts)
        return self._in_processes(plan, parts)

    def _here(self, plan: WorkerPlan, parts: Iterable[Part]) -> Iterator[Answered]:
        import torch

        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            worker = plan.make()
            for part in parts:
                yield Answered(part.name, worker(part.value), os.getpid())
        finally:
            torch.set_num_threads(before)

    def _in_processes(self, plan: WorkerPlan, parts: Iterable[Part]) -> Iterator[Answered]:
        left = {part.name: part for part in parts}
        losses = 0
        while left:
            try:
                for answered in self._until_lost(plan, list(left.values())):
                    del left[answered.name]
                    losses = 0
                    yield answered
            except BrokenProcessPool:
                losses += 1
                if losses == MOST_LOSSES:
                    raise WorkersLost(
                        f"{losses} times a worker ended without an answer: is there memory for "
                        f"{self.workers} models? Use fewer --workers, fewer --lanes or a smaller "
                        "--max-context."
                    ) from None

    def _until_lost(self, plan: WorkerPlan, parts: list[Part]) -> Iterator[Answered]:
        """Answers until a worker ends; the pool ends with it."""
        others = set(multiprocessing.active_children())
        executor = ProcessPoolExecutor(
            min(self.workers, len(parts)),
            multiprocessing.get_context("spawn"),
            initializer=_begin,
            initargs=(self.threads, os.getpid()),
        )
        try:
            asked: dict[Future[tuple[Any, int]], str] = {
                executor.submit(_work, plan, part.value): part.name for part in parts
            }
            for done in as_completed(asked):
                answer, pid = done.result()
                yield Answered(asked[done], answer, pid)
            executor.shutdown()
        finally:
            executor.shutdown(wait=False, cancel_futures=True)
            for child in set(multiprocessing.active_children()) - others:
                child.terminate()  # whatever it does is asked again, or not wanted any more


_worker: Worker | None = None  # of a process that is one


def _begin(threads: int, parent: int) -> None:
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever asked decides when this ends
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """A worker whose parent was killed would wait for ever."""
    while os.getppid() == parent:
        time.sleep(LOOKS_FOR_PARENT)
    os._exit(1)


def _work(plan: WorkerPlan, value: Any) -> tuple[Any, int]:
    global _worker
    if _worker is None:
        _worker = plan.make()
    return _worker(value), os.getpid()
