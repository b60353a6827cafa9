"""A flag that any thread raises, and that C++ can look at without Python's leave.

Who asks Python in the middle of a launch waits until other threads let go of the interpreter: the
event loop of a server may hold it for milliseconds.
"""

from __future__ import annotations

import ctypes


class Flag:
    """Raised, or not. `address` is where C++ finds it, as 64 bits."""

    def __init__(self) -> None:
        self._value = ctypes.c_int64(0)
        self.address = ctypes.addressof(self._value)

    def __bool__(self) -> bool:
        return bool(self._value.value)

    def set(self) -> None:
        self._value.value = 1

    def clear(self) -> None:
        self._value.value = 0
