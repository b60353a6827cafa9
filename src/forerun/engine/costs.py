"""What a step costs here: the seconds of a forward by its rows, measured once per machine and kind
of model, kept in a file, and corrected by the steps that really ran.

A *step* is everything from one verdict to the next: the forward, its rules, and what the host does
beside them. It is *judged* if somebody has drafted: then nothing was begun ahead. Times of steps
are noisy, so medians count. Nothing that is drawn depends on these numbers: they say how many
tokens are worth drafting, and exact methods draw the same from any draft.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch

VERSION = 1  # of the file
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
FIRST = (1, 8, 2, 4, 16, 32, 64, 128)  # the order of measuring: a slow model has only the first two
SECONDS = {"cpu": 1.0, "cuda": 3.0}  # after which nothing more is measured
REPEATS = {"cpu": 3, "cuda": 6}  # on a GPU the second run of a size captures it
FEW = 16  # drafted tokens: predictions are made for so many at once
UNREAD = 8  # rows of a sequence that nobody reads: more are a prompt
RECENT = 15  # steps of a size that count
ENOUGH = 3  # of them, to be believed
STALE = 512  # steps after which an observation counts no more
REFRESH = 8  # steps after which predictions are made anew
# What a judged step has more than a plain one, until some have been seen: seconds, on a GPU, where
# the host's work is otherwise hidden behind the next forward; and a share.
JUDGED_SECONDS = {"cpu": 0.0, "cuda": 4e-4}
JUDGED_SHARE = 1.02
LUCKY = 0.9  # share of a draft that is accepted at best

Curve = Mapping[int, float]  # seconds by rows


def rows_bucket(rows: int) -> int:
    """Numbers of rows that count as one: each up to 8, then four between powers of two."""
    if rows <= 8:
        return rows
    step = 1 << (rows.bit_length() - 3)
    return -(-rows // step) * step


@dataclass
class Crowd:
    """What the last forward held: rows that were no prompt's, of how many sequences."""

    rows: int = 0
    sequences: int = 0


@dataclass
class Observed:
    """Seconds of steps of one size, with the number of the step."""

    seconds: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=RECENT))

    def typical(self, now: int) -> float | None:
        """Their median, if enough of them are recent."""
        recent = [seconds for number, seconds in self.seconds if now - number < STALE]
        return median(recent) if len(recent) >= ENOUGH else None


class StepCosts:
    """What steps of one model cost. Until a curve is known, nothing is, and nobody drafts."""

    def __init__(self, device_type: str = "cpu"):
        self.device_type = device_type
        self.curve: Curve | None = None
        self.corrects = True  # by what is observed
        self.shared = True  # do other sequences count?
        self.crowd = Crowd()
        self.pace = 1.0  # tokens that a sequence gets from a step
        self.seen = 0
        self._observed: dict[tuple[int, bool], Observed] = defaultdict(Observed)
        self._ratios: dict[bool, Observed] = {False: Observed(), True: Observed()}
        self._draft_seconds = Observed()  # of one forward of a draft model
        self._predicted: dict[tuple[int, bool], float] = {}
        self._steps: dict[int, Sequence[float]] = {}
        self._worth: dict[int, bool] = {}

    @property
    def known(self) -> bool:
        return self.curve is not None

    @property
    def begins_ahead(self) -> bool:
        """Is a plain step begun before it is asked for?"""
        return self.device_type == "cuda"

    @property
    def rows_are_cheap(self) -> bool:
        """Do more rows in one forward cost little more time?"""
        if self.curve is None:
            return self.device_type != "cpu"
        return self.forward(32) < 2 * self.forward(1)

    def forward(self, rows: int) -> float:
        """Seconds of a forward, as measured: straight lines between what was."""
        assert self.curve is not None
        return interpolated(self.curve, rows)

    @property
    def sequences(self) -> int:
        """How many sequences the last forward held."""
        return self.crowd.sequences

    def plain(self, sequences: int) -> float:
        """Seconds of a step in which nobody drafts."""
        return self._predict(max(1, sequences), False)

    def steps_with(self, others: int, most: int) -> Sequence[float]:
        """Seconds of a step in which others have so many rows, and a sequence drafts 0, 1, 2 tokens
        and so on, up to `most` at least."""
        found = self._steps.get(others)
        if found is None or len(found) <= most:
            rows = range(others + 1, others + 2 + max(most, FEW))
            found = self._steps[others] = [self._predict(n, True) for n in rows]
        return found

    def worth_drafting(self, sequences: int) -> bool:
        """Could drafts pay in a batch of so many sequences, if nearly all of them were accepted?
        Where not, nobody need look for one."""
        found = self._worth.get(sequences)
        if found is None:
            found = self._worth[sequences] = any(
                self._could_pay(sequences, drafting, k)
                for drafting in {1, sequences // 2, sequences} - {0}
                for k in (1, 2, 4, FEW)
            )
        return found

    def _could_pay(self, sequences: int, drafting: int, k: int) -> bool:
        """Could it pay if some sequences draft k tokens each?"""
        tokens = sequences + drafting * k * LUCKY
        seconds = self._predict(sequences + drafting * k, True)
        return tokens / seconds > sequences / self.plain(sequences)

    def draft_forward(self) -> float | None:
        """Seconds of one forward of the draft model, if this model's steps have shown it."""
        return self._draft_seconds.typical(self.seen)

    def _predict(self, rows: int, judged: bool) -> float:
        key = (rows_bucket(rows), judged)
        found = self._predicted.get(key)
        if found is None:
            found = self._predicted[key] = self._make_prediction(rows, judged)
        return found

    def _make_prediction(self, rows: int, judged: bool) -> float:
        seen = self._observed[rows_bucket(rows), judged].typical(self.seen)
        if seen is not None:
            return seen
        ratio = self._ratios[judged].typical(self.seen)
        if ratio is not None:
            return ratio * self.forward(rows)
        if not judged:
            # A busy neighbour slows all steps: what judged ones have shown holds for plain ones.
            slow = self._ratios[True].typical(self.seen) if self.device_type == "cpu" else None
            return (slow / JUDGED_SHARE if slow else 1.0) * self.forward(rows)
        plain = self._ratios[False].typical(self.seen) or 1.0
        return JUDGED_SHARE * plain * self.forward(rows) + JUDGED_SECONDS[self.device_type]

    def observe(self, rows: int, judged: bool, draft_forwards: int, seconds: float) -> None:
        """A step with a forward of so many rows took so long."""
        if not self.corrects or self.curve is None:
            return
        self.seen += 1
        if draft_forwards:
            drafting = max(0.0, seconds - self._predict(rows, judged)) / draft_forwards
            self._draft_seconds.seconds.append((self.seen, drafting))
        else:
            self._observed[rows_bucket(rows), judged].seconds.append((self.seen, seconds))
            ratio = seconds / self.forward(rows)
            self._ratios[judged].seconds.append((self.seen, ratio))
        if self.seen % REFRESH == 0:
            self._predicted.clear()
            self._steps.clear()
            self._worth.clear()

    def observe_pace(self, tokens: int, sequences: int) -> None:
        """So many tokens came of the last step."""
        self.pace += 0.05 * (max(1.0, tokens / sequences) - self.pace)


class FixedCosts(StepCosts):
    """Costs that are given and never change, whoever else is there: for certification and tests."""

    def __init__(self, curve: Curve, draft_forward: float = 0.0):
        super().__init__()
        self.curve = dict(curve)
        self.corrects = False
        self.shared = False
        self._draft_forward = draft_forward
        self._fixed: list[float] = []

    def plain(self, sequences: int) -> float:
        return self.forward(1)

    def steps_with(self, others: int, most: int) -> Sequence[float]:
        known = len(self._fixed)
        self._fixed += [self.forward(1 + k) for k in range(known, most + 1)]
        return self._fixed

    def worth_drafting(self, sequences: int) -> bool:
        return True

    def draft_forward(self) -> float | None:
        return self._draft_forward


def interpolated(curve: Curve, rows: int) -> float:
    """A curve between its points; behind the last one it goes on as before it."""
    known = sorted(curve)
    if rows in curve or len(known) == 1:
        return curve.get(rows, curve[known[0]])
    at = min(max(bisect_left(known, rows), 1), len(known) - 1)
    low, high = known[at - 1], known[at]
    slope = (curve[high] - curve[low]) / (high - low)
    return curve[low] + slope * (rows - low)


def measure(run: Callable[[int], object], most: int, device_type: str) -> dict[int, float]:
    """Seconds of `run(rows)` for a few numbers of rows up to `most`: the least of some repeats.
    After the second number, only while there is time."""
    found: dict[int, float] = {}
    began = time.perf_counter()
    for rows in [each for each in FIRST if each <= most]:
        spent = time.perf_counter() - began
        if len(found) >= 2 and spent > SECONDS[device_type]:
            break
        repeats = 1 if spent > SECONDS[device_type] else REPEATS[device_type]
        found[rows] = min(_seconds_of(run, rows) for _ in range(repeats))
    return rising(found)


def _seconds_of(run: Callable[[int], object], rows: int) -> float:
    began = time.perf_counter()
    run(rows)
    return time.perf_counter() - began


def rising(curve: Curve) -> dict[int, float]:
    """A curve on which more rows never cost less."""
    out: dict[int, float] = {}
    highest = 0.0
    for rows in sorted(curve):
        highest = max(highest, curve[rows])
        out[rows] = highest
    return out


def identity(backbone: Any) -> dict[str, str]:
    """What a curve holds for: this machine, this version of torch, a model of this shape."""
    shape = [backbone.layers, backbone.heads, backbone.key_heads, backbone.head_dim, backbone.vocab]
    device = backbone.device
    chip = f"{platform.machine()} {cpu_name()} x{os.cpu_count()}, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        chip = torch.cuda.get_device_name(device)
    return {
        "version": str(VERSION),
        "machine": f"{platform.node()}: {chip}",
        "torch": str(torch.__version__),
        "model": f"{type(backbone).__name__} {shape} {backbone.cost:.0f} parameters",
        "dtype": f"{backbone.dtype} {getattr(backbone, 'quantize', '') or ''}".strip(),
        "deterministic": str(bool(getattr(backbone, "deterministic", False))),
    }


def cpu_name() -> str:
    """The processor's name, where the system tells it."""
    with suppress(OSError, StopIteration, IndexError), open("/proc/cpuinfo") as lines:
        named = next(each for each in lines if each.startswith(("model name", "CPU part")))
        return named.split(":", 1)[1].strip()
    return platform.processor()


def cost_file(about: Mapping[str, str]) -> Path:
    """Where a curve is kept: below FORERUN_CACHE, or the user's cache folder. 'off' keeps none."""
    home = os.environ.get("FORERUN_CACHE")
    if home is None:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        home = os.path.join(base, "forerun")
    name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:20]
    return Path(home) / "costs" / f"{name}.json"


_kept: dict[str, dict[int, float]] = {}  # by this process, where FORERUN_CACHE is off


def keeps_files() -> bool:
    return os.environ.get("FORERUN_CACHE") != "off"


def load_curve(about: Mapping[str, str]) -> dict[int, float] | None:
    """A curve that was kept. None if there is none, or if it is another machine's, another
    version's, or broken: then it is measured again."""
    if not keeps_files():
        return _kept.get(json.dumps(about))
    try:
        held = json.loads(cost_file(about).read_text())
        if held["about"] != about:
            return None
        curve = {int(rows): float(seconds) for rows, seconds in held["seconds"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    whole = len(curve) >= 2 and all(rows > 0 and 0 < s < 3600 for rows, s in curve.items())
    return rising(curve) if whole else None


def save_curve(about: Mapping[str, str], curve: Curve) -> None:
    """Keep a curve. A folder that cannot be written is no error: it is measured again."""
    if not keeps_files():
        _kept[json.dumps(about)] = dict(curve)
        return
    file = cost_file(about)
    new = file.with_suffix(f".{os.getpid()}.tmp")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps({"about": about, "seconds": curve}, indent=1))
        new.replace(file)


class Share(NamedTuple):
    """What one sequence has of a forward."""

    rows: int
    reads: int

    @property
    def is_prompt(self) -> bool:
        return self.rows > self.reads + UNREAD

    @property
    def counted(self) -> int:
        """Rows that the next forward will have again, more or less: a prompt is read once."""
        return min(self.rows, self.reads)


class Paced(Protocol):
    """Whoever decides how many rows of prompts a forward reads."""

    def stepped(self, seconds: float, writing: int, reading: int) -> None: ...


@dataclass
class Rows:
    """The rows of one model in a step: of those who write, at most in one forward; and of
    prompts."""

    writing: int = 0
    reading: int = 0


@dataclass
class Step:
    """A step while it runs: what its forwards held."""

    costs: StepCosts | None = None  # of the model that judges
    rows: int = 0
    judged: bool = False
    whole: bool = True  # does it hold no prompt?
    draft_forwards: int = 0
    by_model: dict[Paced, Rows] = field(default_factory=dict)


class StepWatch:
    """Tells costs how long steps took, from one arrival of outcomes to the next."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self.tokens = 0  # that came of the last step
        self._now = Step()
        self._over: Step | None = None
        self._arrived: float | None = None

    def forward(self, costs: StepCosts, shares: Sequence[Share], drafting: bool) -> None:
        """A forward begins."""
        now = self._now
        if drafting:
            now.draft_forwards += 1
            return
        now.costs = costs
        now.rows += sum(share.rows for share in shares)
        now.judged = now.judged or any(share.reads > 1 for share in shares)
        now.whole = now.whole and not any(share.is_prompt for share in shares)
        costs.crowd = Crowd(sum(share.counted for share in shares), len(shares))

    def rows(self, pace: Paced, rows: int, reading: int) -> None:
        """A forward begins in which so many rows run; of these, so many read prompts."""
        held = self._now.by_model.setdefault(pace, Rows())
        held.writing = max(held.writing, rows - reading)
        held.reading += reading

    def wrote(self, tokens: int) -> None:
        """A draft model wrote on by itself: its first forward was counted."""
        self._now.draft_forwards += tokens - 1

    def drawing(self) -> None:
        """Rules are applied. If a model has judged, what begins now belongs to the next step."""
        if self._now.costs is not None:
            self._over = self._now
            self._now = Step()

    def arrived(self) -> None:
        """Outcomes are known."""
        step = self._over
        if step is None:
            return
        assert step.costs is not None
        now = self.now()
        seconds = now - self._arrived if self._arrived is not None else 0.0
        if self._arrived is not None:
            for pace, held in step.by_model.items():
                pace.stepped(seconds, held.writing, held.reading)
        if self._arrived is not None and step.whole:
            step.costs.observe(step.rows, step.judged, step.draft_forwards, seconds)
            if self.tokens:
                step.costs.observe_pace(self.tokens, max(1, step.costs.crowd.sequences))
        self.tokens = 0
        self._arrived = now
        self._over = None

    def idle(self) -> None:
        """Nothing runs: the time until the next step is nobody's."""
        self._now = Step()
        self._over = None
        self._arrived = None
        self.tokens = 0
