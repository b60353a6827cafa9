"""Run a program that a model wrote: in a process of its own, with limits on time, memory, files and
processes.

It guards against loops, floods and accidents. It is no security boundary: for hostile code use a
container or a virtual machine.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass

MEMORY = 1 << 30
FILE_SIZE = 1 << 20


@dataclass(frozen=True)
class Outcome:
    passed: bool
    reason: str  # passed | failed | timeout
    detail: str = ""  # the last line of what it complained about


def run(program: str, seconds: float = 5.0, memory: int = MEMORY) -> Outcome:
    """Does the program end without an error within its limits?"""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", program],
            cwd=folder,
            env={"PATH": "", "HOME": folder},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=lambda: _limit(seconds, memory),
        )
        try:
            _, complaint = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return Outcome(False, "timeout", f"still running after {seconds:g} s")
        finally:
            _end(process)
    lines = complaint.decode("utf-8", "replace").strip().splitlines()
    return Outcome(
        process.returncode == 0,
        "passed" if process.returncode == 0 else "failed",
        lines[-1] if lines else "",
    )


def _limit(seconds: float, memory: int) -> None:
    cpu = int(seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE, FILE_SIZE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stderr is not None:
        process.stderr.close()
