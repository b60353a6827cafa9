"""Run a program that a model wrote, and the tests that judge it.

Both run in processes of their own (`jail`). Where the system has namespaces, each has no network,
no environment, sees no other process and no file but the interpreter's, and ends whole. The
program's process only answers calls; the assertions run in the other, so that a program cannot
claim to have passed. What remains is the kernel: no system call is filtered.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from forerun.errors import NotAble

MEMORY = 1 << 30
JAIL = Path(__file__).with_name("jail.py")
TO_END = 5.0  # seconds that a jail may take to end what is in it
TO_TRY = 30.0
REFUSED = "a program cannot be run in isolation: "


@dataclass(frozen=True)
class Outcome:
    passed: bool
    reason: str  # passed | failed | timeout
    detail: str = ""  # what went wrong


@dataclass(frozen=True)
class Trial:
    """A program, and the tests of its function `entry_point`: they define `check(candidate)`.
    `given` is source that the tests may use, from the task and not from the model."""

    program: str
    test: str
    entry_point: str
    given: str = ""


@dataclass(frozen=True)
class Limits:
    seconds: float = 5.0
    memory: int = MEMORY  # bytes
    isolated: bool = True  # else only limits on time, memory, files and processes hold


def run(trial: Trial, limits: Limits | None = None) -> Outcome:
    """Do the tests run to their end within the limits?"""
    limits = limits or Limits()
    ends = socket.socketpair()
    common = {
        "entry_point": trial.entry_point,
        "seconds": limits.seconds,
        "memory": limits.memory,
        "isolated": limits.isolated,
    }
    program = {**common, "role": "program", "source": trial.program}
    tester = {**common, "role": "tester", "source": trial.test, "given": trial.given}
    with (
        contextlib.closing(ends[0]),
        contextlib.closing(ends[1]),
        _jailed(program, ends[0], limits) as answering,
        _jailed(tester, ends[1], limits) as asking,
    ):
        for end in ends:  # the jails have them now: if one ends, the other notices
            end.close()
        try:
            verdict, _ = asking.communicate(timeout=limits.seconds)
        except subprocess.TimeoutExpired:
            return Outcome(False, "timeout", f"still running after {limits.seconds:g} s")
        _end(answering, limits)
        assert answering.stdout is not None
        return _outcome(verdict, answering.stdout.read())


def _outcome(verdict: bytes, of_program: bytes) -> Outcome:
    """By the tester's report. The program's side reports only that its jail could not be made."""
    found = json.loads(verdict or b"{}")
    refused = found.get("jail") or json.loads(of_program or b"{}").get("jail")
    if refused:
        raise NotAble(f"{REFUSED}{refused}.")
    if found.get("passed"):
        return Outcome(True, "passed")
    return Outcome(False, "failed", found.get("detail", "the tests did not run to their end"))


@contextlib.contextmanager
def _jailed(
    order: dict[str, object], channel: socket.socket, limits: Limits
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has its order, in an empty folder; ended at the end."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as orders:
        words = {**order, "channel": channel.fileno(), "folder": folder}
        orders.write(json.dumps(words).encode())
        orders.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(JAIL)],
            cwd=folder,
            env={},
            stdin=orders,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[channel.fileno()],
            start_new_session=True,
        )
        try:
            yield process
        finally:
            _end(process, limits)
            assert process.stdout is not None
            process.stdout.close()


def _end(process: subprocess.Popen[bytes], limits: Limits) -> None:
    """End the process and all that it started. A jail does so itself, when told."""
    if limits.isolated:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TO_END)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@cache
def why_not_isolated() -> str | None:
    """Why programs cannot be isolated here; None if they can."""
    if not sys.platform.startswith("linux"):
        return f"{sys.platform} has no namespaces, which Linux has"
    trial = Trial("def one(): return 1", "def check(f): assert f() == 1", "one")
    try:
        outcome = run(trial, Limits(seconds=TO_TRY))
    except (NotAble, OSError) as error:
        return str(error).removeprefix(REFUSED).removesuffix(".")
    return None if outcome.passed else outcome.detail


def limits_for(seconds: float, allow_code: bool) -> Limits:
    """Isolation where it can be had. Elsewhere `allow_code` is needed."""
    reason = why_not_isolated()
    if reason is not None and not allow_code:
        raise NotAble(
            f"this runs programs that a model writes, and they cannot be isolated here: {reason}. "
            "Use a Linux machine or container that allows user namespaces; or, if you accept that "
            "such a program can read your files and use the network, say --allow-code "
            "(allow_code=True)."
        )
    return Limits(seconds, isolated=reason is None)
