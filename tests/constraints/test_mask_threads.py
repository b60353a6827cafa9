"""Masks are made one after the other, or by threads where those are sooner done: the same masks."""

import ctypes
import time

import numpy as np
import pytest

pytest.importorskip("llguidance")

from forerun.constraints.llguidance_engine import MaskThreads


class SlowMatcher:
    """Writes its number into every byte of its mask."""

    def __init__(self, number, seconds):
        self.number = number
        self.seconds = seconds

    def unsafe_compute_mask_ptr(self, address, size):
        time.sleep(self.seconds)
        ctypes.memset(address, self.number, size)


class Executor:
    """Threads that take so long, whatever they do."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.calls = []

    def unsafe_compute_mask_ptr(self, numbered, first, size, count):
        assert count == len(numbered)
        self.calls.append(count)
        time.sleep(self.seconds)
        for matcher, row in numbered:
            ctypes.memset(first + row * size, matcher.number, size)


def masks_of(threads, count, seconds):
    matchers = [SlowMatcher(1 + i, seconds) for i in range(count)]
    masks_NW = np.zeros((count, 3), np.int32)
    threads.fill(matchers, masks_NW)
    assert masks_NW.view(np.uint8).tolist() == [[1 + i] * 12 for i in range(count)]


def threads_that_take(seconds):
    threads = MaskThreads()
    threads._executor = Executor(seconds)
    threads._count = 15
    return threads, threads._executor.calls


def test_threads_make_what_takes_long():
    threads, calls = threads_that_take(0.005)
    for _ in range(4):
        masks_of(threads, 8, seconds=0.005)
    assert calls == [7] * 4  # the first one tells how long the others will take


def test_threads_that_wake_slowly_are_left_alone_for_little():
    threads, calls = threads_that_take(0.2)
    threads._wakes_in = 0.19  # as was seen
    masks_of(threads, 8, seconds=0.0005)
    assert not calls
    masks_of(threads, 8, seconds=0.05)  # and make what takes long all the same
    assert calls == [7]


def test_that_they_wake_slowly_is_believed_little_by_little_and_forgotten():
    threads, calls = threads_that_take(0.05)
    before = threads._wakes_in
    threads._fill_together([], 0, 12, 0.0)
    assert before < threads._wakes_in < 2 * before
    threads._wakes_in = 0.1
    masks_of(threads, 8, seconds=0.0)
    assert not calls[1:] and threads._wakes_in < 0.1


def test_one_thread_is_no_help():
    threads, calls = threads_that_take(0.0)
    threads._count = 1
    masks_of(threads, 8, seconds=0.005)
    assert not calls
