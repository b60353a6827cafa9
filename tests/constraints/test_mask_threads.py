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
    return threads, threads._executor.calls


def test_threads_make_what_takes_long():
    threads, calls = threads_that_take(0.002)
    for _ in range(4):
        masks_of(threads, 8, seconds=0.005)
    assert calls == [7] * 4  # the first one tells how long the others will take


def test_threads_that_take_longer_are_left_alone():
    threads, calls = threads_that_take(0.05)
    for _ in range(12):
        masks_of(threads, 8, seconds=0.001)
    assert 1 <= len(calls) <= 2


def test_they_are_tried_again():
    threads, calls = threads_that_take(0.05)
    masks_of(threads, 8, seconds=0.001)
    threads._executor.seconds = 0.0
    while len(calls) < 2:
        before = threads._together
        masks_of(threads, 8, seconds=0.001)
        assert threads._together < before
    assert threads._together < 0.02
