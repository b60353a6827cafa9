"""What can go wrong at the caller's side. Every message names the argument, what it was, and what
would be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ForerunError(Exception):
    """Base of all errors that Forerun raises for its callers."""


class BadOption(ForerunError, ValueError):
    """An argument has a value that means nothing here."""


class NothingPossible(ForerunError):
    """A law without mass: no token can be drawn."""


class NothingToSee(ForerunError):
    """A drafter looks at hidden states that its target does not have, or no longer."""


class NotAble(ForerunError, ValueError):
    """A model cannot do what a method asks, or a backbone cannot be driven by rows."""


class BadCheckpoint(ForerunError, ValueError):
    """A checkpoint is missing, incomplete, damaged, or of a kind that is not supported."""


class TokenizerMismatch(ForerunError, ValueError):
    """Draft and target do not speak the same tokens."""


class EngineStopped(ForerunError, RuntimeError):
    """A model was closed, or its engine has failed: it decodes nothing more."""


class TooLate(ForerunError, TimeoutError):
    """A request cannot be over by its deadline."""


class NoRoom(ForerunError, MemoryError):
    """The slots that were asked for do not fit in memory."""


def unknown(
    kind: str,
    name: str,
    known: Iterable[str],
    error: type[ForerunError] = BadOption,
    otherwise: str = "",
) -> ForerunError:
    """The error for a name that is not in a table, with the closest names; where none is close, all
    of them, or what is said `otherwise`."""
    known = sorted(known)
    close = difflib.get_close_matches(str(name), known, n=3)
    hint = (
        f"did you mean {' or '.join(repr(c) for c in close)}?"
        if close
        else otherwise or f"known: {', '.join(known) or 'none'}."
    )
    return error(f"{kind} {name!r} is unknown: {hint}")
