"""Regular languages as users write them: regular expressions and choices. Each becomes an automaton
over bytes, in a process of its own if it might explode."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import numpy as np

from forerun.constraints.automaton import ByteAutomaton, automaton_of_choices
from forerun.errors import BadOption, NotAble

SECONDS = 10.0  # that an expression may take to become an automaton
MEGABYTES = 2048
MOST_STATES = 20_000
LONGEST = 100_000  # characters of an expression or a schema
DEPTH = 3  # how often a schema may refer to itself
WORKER = Path(__file__).with_name("regex_worker.py")
SHOWN = 60  # characters of what is refused

LOOK_AROUND = re.compile(r"(?<!\\)(?:\\\\)*\(\?(?:=|!|<=|<!)")
# Escaped characters, sets and parentheses.
PARENTHESES = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()]", re.DOTALL)
BACK_REFERENCE = re.compile(r"(?<!\\)(?:\\\\)*\\[1-9]")


@lru_cache(maxsize=64)
def language_of_regex(regex: str) -> ByteAutomaton:
    """Texts that the whole of an expression matches. Anchors at its ends say nothing new."""
    check_length("regex", regex)
    if LOOK_AROUND.search(regex) or BACK_REFERENCE.search(regex):
        raise BadOption(
            f"regex={shown(regex)} has look-around or a back reference in it, which is no regular "
            f"language: leave it out."
        )
    if not _is_balanced(regex):  # as a group of a longer expression it might mean something else
        raise BadOption(f"regex={shown(regex)} closes a group that it does not open.")
    return compiled("regex", without_anchors(regex), regex)


@lru_cache(maxsize=64)
def language_of_choices(choices: tuple[str, ...]) -> ByteAutomaton:
    """One of some texts."""
    if not choices:
        raise BadOption("choices=[] must have at least one text.")
    check_length("choices", "".join(choices))
    return automaton_of_choices([text.encode() for text in choices])


def without_anchors(regex: str) -> str:
    regex = regex.removeprefix("^")
    escapes = len(regex) - 1 - len(regex[:-1].rstrip("\\"))
    return regex[:-1] if regex.endswith("$") and escapes % 2 == 0 else regex


def _is_balanced(regex: str) -> bool:
    """Does every closing parenthesis, outside of sets of characters, have an opening one?"""
    depth = 0
    for found in PARENTHESES.findall(regex):
        depth += {"(": 1, ")": -1}.get(found, 0)
        if depth < 0:
            return False
    return True


def check_length(name: str, text: str) -> None:
    if len(text) > LONGEST:
        raise BadOption(f"{name} has {len(text)} characters, and {LONGEST} are the most.")


def shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN else text[: SHOWN - 1] + "…")


def compiled(kind: str, text: str, given: str) -> ByteAutomaton:
    """What the worker makes of it, within its limits."""
    asked = {"kind": kind, "text": text, "depth": DEPTH}
    asked |= {"megabytes": MEGABYTES, "states": MOST_STATES}
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(WORKER)],
            input=json.dumps(asked).encode(),
            env=_environment(),
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BadOption(
            f"{kind}={shown(given)} takes more than {SECONDS:g} s to become an automaton: make it "
            f"simpler."
        ) from None
    if done.returncode:
        raise _refusal(kind, given, done.stderr.decode(errors="replace"))
    found = np.load(io.BytesIO(done.stdout))
    return ByteAutomaton(found["table"], found["final"], int(found["start"]))


def _environment() -> dict[str, str]:
    """The worker finds what we find. One thread: on a machine with many cores the room that NumPy
    keeps for each would be more than the limit."""
    path = os.pathsep.join(filter(None, sys.path))
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**os.environ, **threads, "PYTHONPATH": path}


def _refusal(kind: str, given: str, said: str) -> BadOption | NotAble:
    """Why the worker made nothing of it, in one line."""
    if said.strip() == "import":
        return NotAble(
            f"{kind}= in a hole or on a canvas needs outlines-core: pip install 'forerun[grammar]'."
        )
    if said.startswith("refused "):
        reason = " ".join(said.removeprefix("refused ").split())
        return BadOption(f"{kind}={shown(given)} cannot be used: {reason.rstrip('.')}.")
    return BadOption(
        f"{kind}={shown(given)} needs more than {MEGABYTES} MB to become an automaton: make it "
        f"simpler."
    )
