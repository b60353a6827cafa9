"""How measurements that take long report their progress."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]  # (done, total)


def no_progress(done: int, total: int) -> None:
    """For callers that need no report."""
