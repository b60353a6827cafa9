"""Steps without long pauses of Python's garbage collector.

A full collection looks at every object of the process, and torch and transformers alone have
hundreds of thousands: tenths of a second, in which every stream stands still
(`python bench/host.py` says how many). So what exists when an engine's
thread sets to work is put aside until all of them are idle again; only what comes to exist
meanwhile is looked at. Putting it aside and taking it back cost nothing. What has been put aside
and dies is freed as ever, but for cycles, which are found when nobody works: so a stream that was
abandoned in one is decoded to its end.
"""

from __future__ import annotations

import gc
import threading

PYTHONS_OWN = 1000  # objects that are more than Python 3.12 puts aside when it starts


class Undisturbed:
    """Counts the threads of this process that are at work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._at_work = 0
        self._frozen = False  # by us: what others have put aside is left alone

    def begin(self) -> None:
        with self._lock:
            if not self._at_work and gc.get_freeze_count() < PYTHONS_OWN:
                gc.collect(1)  # what is young, or it would not be looked at until it is old
                gc.freeze()
                self._frozen = True
            self._at_work += 1

    def end(self) -> None:
        with self._lock:
            self._at_work -= 1
            if not self._at_work and self._frozen:
                gc.unfreeze()
                self._frozen = False

    def forget(self) -> None:
        """A process that was forked off has none of these threads; one may have held the lock."""
        self._lock = threading.Lock()
        self._at_work = 0
        if self._frozen:
            gc.unfreeze()
            self._frozen = False


undisturbed = Undisturbed()
