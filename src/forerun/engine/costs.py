"""What a step costs here: the seconds of a forward by its rows, measured once per machine and kind
of model, kept in a file, and corrected by the steps that really ran.

A *step* is everything from one verdict to the next: the forward, its rules, and what the host does
beside them. It is *judged* if somebody has drafted: then less was begun ahead. Times of steps are
noisy, so medians count. Nothing that is drawn depends on these numbers: they say how many
tokens are worth drafting, and exact methods draw the same from any draft.
"""

from __future__ import annotations

import hashlib
import json
import math
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
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from forerun.engine.episodes import Episodes

VERSION = 2  # of the file
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
FIRST = (1, 8, 2, 4, 16, 32, 64, 128)  # the order of measuring: a slow model has only the first two
SECONDS = {"cpu": 1.0, "cuda": 3.0}  # after which nothing more is measured
REPEATS = {"cpu": 3, "cuda": 6}  # on a GPU the second run of a size captures it
STEADY = {"cpu": 0.05, "cuda": 0.0}  # seconds that a size is run for, if it is short
MOST_REPEATS = 20
FEW = 16  # drafted tokens: predictions are made for so many at once
UNREAD = 8  # rows of a sequence that nobody reads: more are a prompt
RECENT = 15  # steps of a size that count
ENOUGH = 3  # of them, to be believed
STALE = 512  # steps after which an observation counts no more
REFRESH = 8  # steps after which predictions are made anew
EARLY = 32  # steps, before which they are after each
# What a judged step has more than a plain one, until some have been seen: seconds, on a GPU, where
# the host's work is otherwise hidden behind the next forward; and a share.
SHORT = 1.5e-3  # seconds of a forward
SEVERAL = 16  # tokens between two choices beside such ones
JUDGED_SECONDS = {"cpu": 0.0, "cuda": 4e-4}
JUDGED_SHARE = 1.02
EACH_SECONDS = {"cpu": 1e-4, "cuda": 3e-4}  # and so much for each sequence that drafts
# and such a share of that for each sequence beside it: on a GPU none is in step any longer
BESIDE = {"cpu": 0.0, "cuda": 1.0}
EACH_WEIGHT = 16  # drafts that this counts for
# What it takes to draft so many tokens by a model for the first time: on a GPU that is captured.
FIRST_TIME_SECONDS = {"cpu": 0.0, "cuda": 0.5}
HOST_SECONDS = 5e-4  # that the host works beside a forward which judges or drafts
WILD = 4  # times the usual: what is more is taken for so much
LUCKY = 0.9  # share of a draft that is accepted at best
OUTDATED = 0.5  # a curve of which steps take less than this share

Curve = Mapping[int, float]  # seconds by rows
S = TypeVar("S", float, np.ndarray)  # seconds, of one step or of many


def rows_bucket(rows: int) -> int:
    """Numbers of rows that count as one: each up to 8, then four between powers of two."""
    if rows <= 8:
        return rows
    step = 1 << (rows.bit_length() - 3)
    return -(-rows // step) * step


@dataclass
class Crowd:
    """What the last forward held: rows that the next one will have again, more or less, because
    they are no prompt's; and of how many sequences."""

    rows: int = 0
    sequences: int = 0


class Seen(NamedTuple):
    """Seconds that were seen: in which step, and how much the host had to do in it, counted in
    sequences that draft."""

    step: int
    seconds: float
    load: float = 0.0


class Observed:
    """Seconds of steps of one size."""

    def __init__(self) -> None:
        self._seen: deque[Seen] = deque(maxlen=RECENT)

    def add(self, step: int, seconds: float, load: float = 0.0) -> None:
        self._seen.append(Seen(step, seconds, load))

    def typical(self, now: int, each: float = 0.0) -> float | None:
        """Their median, if enough of them are recent; less what `each` draft has cost."""
        recent = [seen.seconds - each * seen.load for seen in self._seen if now - seen.step < STALE]
        return median(recent) if len(recent) >= ENOUGH else None

    def damped(self, now: int) -> float:
        """Their median, believed the more of them there are: half of a single one."""
        recent = [seen.seconds for seen in self._seen if now - seen.step < STALE]
        return median(recent) * len(recent) / (len(recent) + 1) if recent else 0.0

    def per_draft(self, now: int, prior: float) -> float:
        """What each draft costs, where that was seen. A step with few of them says little of one
        with many: what a step costs once cannot be told apart. So `prior` counts, too."""
        recent = [seen for seen in self._seen if now - seen.step < STALE]
        if not recent:
            return prior
        most = WILD * max(prior, median(seen.seconds for seen in recent))
        total = sum(seen.load * min(seen.seconds, most) for seen in recent)
        drafts = sum(seen.load for seen in recent)
        return max(0.0, (EACH_WEIGHT * prior + total) / (EACH_WEIGHT + drafts))


class StepCosts:
    """What steps of one model cost. Until a curve is known, nothing is, and nobody drafts."""

    def __init__(self, device_type: str = "cpu"):
        self.device_type = device_type
        self.curve: Curve | None = None
        self.corrects = True  # by what is observed
        self.shared = True  # do other sequences count?
        self.at_once = 1  # tokens of plain text that are written in one launch
        self.writes_any_length = True  # does a launch of fewer cost as much less?
        self.launch = 0.0  # seconds of rounds that follow a verdict by themselves, at most
        self.crowd = Crowd()
        self.pace = 1.0  # tokens that a sequence gets from a step
        self.seen = 0
        self._read = 0  # rows of prompts in the last forward
        self._reading = 0  # and in the next one
        self._observed: dict[tuple[int, bool], Observed] = defaultdict(Observed)
        self._ratio = Observed()  # of plain steps to the curve
        self._any_ratio = Observed()  # and of all steps without a draft model
        self._each_seen = Observed()
        self.each = EACH_SECONDS[self._kind]  # what the host does for a sequence that drafts
        self._draft_seconds = Observed()  # of one forward of a draft model
        self._around: dict[int, Observed] = defaultdict(Observed)  # a draft, by sequences
        self._between: dict[int, float] = {}  # points of the curve, as far as anybody asked
        self._between_of: Curve | None = None
        self._usual: dict[tuple[int, bool], float | None] = {}  # what was observed, by size
        self._predicted: dict[tuple[int, bool], float] = {}
        self._steps: dict[tuple[int, int], Sequence[float]] = {}
        self._around_now: float | None = None
        self._ratio_kept: float | None = None
        self._judged = np.zeros(0)  # by rows
        self._worth: dict[int, bool] = {}

    @property
    def _kind(self) -> str:
        """Does the device work on its own, or is its time the host's?"""
        return "cuda" if self.device_type == "cuda" else "cpu"

    @property
    def known(self) -> bool:
        return self.curve is not None

    @property
    def is_outdated(self) -> bool:
        """Do steps take far less than forwards once took? Then those were measured on a busy
        machine, and what more rows cost there says nothing."""
        ratio = self._any_ratio.typical(self.seen)
        return ratio is not None and ratio < OUTDATED

    def learn_anew(self, curve: Curve) -> None:
        """Begin with another curve, as if no step had been seen."""
        self.curve = curve
        self._observed.clear()
        self._ratio = Observed()
        self._any_ratio = Observed()
        self._each_seen = Observed()
        self._around.clear()
        self._forget_predictions()

    @property
    def begins_ahead(self) -> bool:
        """Is a plain step begun before it is asked for?"""
        return self.device_type == "cuda" and self.at_once == 1

    @property
    def first_time(self) -> float:
        """Seconds that a length takes more which a draft model has not drafted yet."""
        return FIRST_TIME_SECONDS[self._kind]

    @property
    def between_choices(self) -> int:
        """Tokens of plain text that are best written before drafts are thought of again: as many as
        a launch has; or several, where a step is so short that thinking would be seen."""
        if self.begins_ahead and self.known and self.forward(1) < SHORT:
            return SEVERAL
        return self.at_once

    @property
    def rows_are_cheap(self) -> bool:
        """Do more rows in one forward cost little more time?"""
        if self.curve is None:
            return self.device_type != "cpu"
        return self.forward(32) < 2 * self.forward(1)

    def forward(self, rows: int) -> float:
        """Seconds of a forward, as measured: straight lines between what was."""
        if self._between_of is not self.curve:
            self._between = {}
            self._between_of = self.curve
        found = self._between.get(rows)
        if found is None:
            assert self.curve is not None
            found = self._between[rows] = interpolated(self.curve, rows)
        return found

    @property
    def sequences(self) -> int:
        """How many sequences the last forward held."""
        return self.crowd.sequences

    def plain(self, sequences: int) -> float:
        """Seconds of a step in which nobody drafts."""
        return self._predict(max(1, sequences), 0)

    def steps_with(self, others: int, drafting: int, most: int) -> Sequence[float]:
        """Seconds of a step in which others have so many rows, so many of them a draft, and a
        sequence drafts 0, 1, 2 tokens and so on, up to `most` at least."""
        found = self._steps.get((others, drafting))
        if found is None or len(found) <= most:
            first = others + 2  # rows, with one drafted token
            end = first + max(most, FEW)
            judged = self.judged_steps(end - 1)[first:end]
            more = self.each_more + (self._load(drafting + 1) - self._load(1)) * self.each
            plain = self._beside_prompts(others + 1, drafting)
            found = self._steps[others, drafting] = [plain, *(judged + more).tolist()]
        return found

    @property
    def each_more(self) -> float:
        """What a step costs more if one sequence more drafts in it, but for its rows."""
        return self.each * (1 - BESIDE[self._kind])

    def tokens_per_second(self, rows: int, tokens: float, draft_seconds: float = 0.0) -> float:
        """What all sequences get of a step in which one has so many rows and gets so many tokens,
        if the others do as in the last. By the curve alone: of lengths that are never drafted no
        step is ever seen, and what is seen of the others is noisy."""
        others = max(0, self.crowd.sequences - 1) if self.shared else 0
        beside = self.crowd.rows * others // (others + 1)
        host = 2 * HOST_SECONDS if draft_seconds else HOST_SECONDS  # it asks a second model
        seconds = self.forward(beside + rows) + host + draft_seconds
        return (others * self.pace + tokens) / seconds

    def seconds_if_all_have(self, rows: int) -> float:
        """Of a step in which each sequence of the last one has so many rows."""
        sequences = max(1, self.crowd.sequences) if self.shared else 1
        return self.forward(sequences * rows) + HOST_SECONDS

    def judged_steps(self, most: int) -> np.ndarray:
        """Seconds of steps of 0, 1 and so on up to `most` rows in which somebody drafts, less what
        the host does for each who does."""
        if len(self._judged) <= most:
            seconds_N = self._judged_alone(1, most)
            if self._reading:
                beside_N = self._judged_alone(1 + self._reading, most) - self._reading_work
                seconds_N = np.maximum(seconds_N, beside_N)
            more = self._load(1) * self.each + self.around_drafts - self.each_more
            self._judged = np.concatenate([seconds_N[:1], seconds_N]) + more
        return self._judged[: most + 1]

    def _judged_alone(self, first: int, count: int) -> np.ndarray:
        """`_without_drafts` of so many numbers of rows, of steps in which somebody drafts: of
        hundreds at once, since a batch plans with them."""
        rows = range(first, first + count)
        forward_N = np.array([self.forward(n) for n in rows])
        seconds_N = np.empty(count)
        begin = 0
        while begin < count:
            size = rows_bucket(rows[begin])
            end = min(size + 1 - first, count)
            seen = self._usual_of(size, True)
            part_N = forward_N[begin:end]
            if seen is None:
                seconds_N[begin:end] = self._judged_by_curve(self._ratio_now * part_N)
            else:
                seconds_N[begin:end] = seen * part_N / self.forward(size)
            begin = end
        return seconds_N

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
        seconds = self._beside_prompts(sequences + drafting * k, drafting)
        return tokens / seconds > sequences / self.plain(sequences)

    def draft_forward(self) -> float | None:
        """Seconds of one forward of the draft model, if this model's steps have shown it."""
        return self._draft_seconds.typical(self.seen)

    def spent_on_drafts(self, drafting: int, draft_forwards: int) -> float:
        """Seconds of a step that its rows did not take: of a draft model, and of the host for each
        sequence that drafted."""
        return draft_forwards * (self.draft_forward() or 0.0) + self._load(drafting) * self.each

    def _load(self, drafting: int) -> float:
        """What the host has to do where so many sequences draft, counted in them."""
        if not drafting:
            return 0.0
        return drafting + BESIDE[self._kind] * max(0, self.crowd.sequences - drafting)

    def _predict(self, rows: int, drafting: int) -> float:
        """Seconds of a step of so many rows in which so many sequences draft."""
        key = (rows, drafting > 0)
        found = self._predicted.get(key)
        if found is None:
            found = self._predicted[key] = self._without_drafts(rows, drafting > 0)
        if not drafting:
            return found
        return found + self._load(drafting) * self.each

    @property
    def around_drafts(self) -> float:
        """What a judged step costs beside itself: plain ones before and after it take longer, as
        nothing was begun ahead, or a launch was left or had fewer tokens."""
        if self._around_now is None:
            seen = self._around[self.crowd.sequences.bit_length()]
            self._around_now = max(0.0, seen.damped(self.seen))
        return self._around_now

    def observe_around(self, seconds: float) -> None:
        """So much was lost around a judged step of as many sequences as there are now."""
        if self.corrects:
            self._around[self.crowd.sequences.bit_length()].add(self.seen, seconds)

    def beyond_usual(self, rows: int, tokens: int, seconds: float) -> float:
        """What so many plain steps of so many rows took more than such ones do; less where they
        were faster."""
        if not self.known:
            return 0.0
        each = self._predict(rows, 0)
        return min(seconds - tokens * each, (WILD - 1) * each)

    def _beside_prompts(self, rows: int, drafting: int) -> float:
        """Seconds of such a step, less what it takes to read the prompts that it reads: that is
        work, too. But rows beside them may cost more than rows alone."""
        around = self.around_drafts if drafting else 0.0
        alone = self._predict(rows, drafting)
        if not self._reading:
            return alone + around
        beside = self._predict(rows + self._reading, drafting) - self._reading_work
        return max(alone, beside) + around

    @property
    def _reading_work(self) -> float:
        """What it takes to read the prompts that a step reads."""
        plain = max(1, self.crowd.sequences)
        return self._predict(plain + self._reading, 0) - self._predict(plain, 0)

    def _without_drafts(self, rows: int, judged: bool) -> float:
        """Seconds of such a step, less what the host does for each sequence that drafts."""
        size = rows_bucket(rows)
        seen = self._usual_of(size, judged)
        if seen is None:
            return self._by_curve(rows, judged)
        return seen * self.forward(rows) / self.forward(size)

    def _usual_of(self, size: int, judged: bool) -> float | None:
        """What steps of a size were observed to take."""
        key = (size, judged)
        if key not in self._usual:
            self._usual[key] = self._observed[key].typical(self.seen, self.each)
        return self._usual[key]

    def _by_curve(self, rows: int, judged: bool) -> float:
        """What the curve says, as much slower or faster as plain steps were of late."""
        seconds = self._ratio_now * self.forward(rows)
        return self._judged_by_curve(seconds) if judged else seconds

    @property
    def _ratio_now(self) -> float:
        if self._ratio_kept is None:
            self._ratio_kept = self._ratio.typical(self.seen) or 1.0
        return self._ratio_kept

    def _judged_by_curve(self, plain: S) -> S:
        """Seconds of steps in which somebody drafts, by those of plain ones of as many rows."""
        return JUDGED_SHARE * plain + JUDGED_SECONDS[self._kind]

    def observe(self, rows: int, drafting: int, draft_forwards: int, seconds: float) -> None:
        """A step with a forward of so many rows, in which so many sequences drafted, took so
        long."""
        if not self.corrects or self.curve is None or seconds <= 0:  # a clock that stands still
            return
        self.seen += 1
        if draft_forwards:
            spent = max(0.0, seconds - self._predict(rows, drafting)) / draft_forwards
            self._draft_seconds.add(self.seen, spent)
        else:
            self._observe_step(rows, drafting, seconds)
        if self.seen % REFRESH == 0 or self.seen < EARLY:
            prior = EACH_SECONDS[self._kind]
            self.each = self._each_seen.per_draft(self.seen, prior)
            self._forget_predictions()

    def _observe_step(self, rows: int, drafting: int, seconds: float) -> None:
        self._any_ratio.add(self.seen, seconds / self.forward(rows))
        if drafting:
            load = self._load(drafting)
            each = (seconds - self._by_curve(rows, True)) / load
            self._each_seen.add(self.seen, each, load)
        else:
            self._ratio.add(self.seen, seconds / self.forward(rows))
        size = rows_bucket(rows)
        as_if = seconds * self.forward(size) / self.forward(rows)  # of the largest of its size
        self._observed[size, drafting > 0].add(self.seen, as_if, self._load(drafting))

    def meet(self, crowd: Crowd) -> None:
        """A forward holds so much. With more sequences or fewer, steps cost something else."""
        before = self.crowd.sequences
        self.crowd = crowd
        others = before.bit_length() != crowd.sequences.bit_length()  # as `_around` counts them
        if others or (before != crowd.sequences and BESIDE[self._kind]):
            self._forget_predictions()

    def observe_prompts(self, rows: int) -> None:
        """A forward read so many rows of prompts. If the one before it did, too, so will the next:
        they leave less room for drafts."""
        before, self._read = self._read, rows
        reading = rows_bucket(min(before, rows)) if before else 0
        if reading or self._reading:
            self._reading = reading
            self._forget_predictions()

    def _forget_predictions(self) -> None:
        self._usual.clear()
        self._predicted.clear()
        self._steps.clear()
        self._worth.clear()
        self._around_now = None
        self._ratio_kept = None
        self._judged = self._judged[:0]

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

    def steps_with(self, others: int, drafting: int, most: int) -> Sequence[float]:
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
    """Seconds of `run(rows)` for a few numbers of rows up to `most`: the least of some repeats. Of
    short ones there are more: a neighbour's time slice would count. After the second number, only
    while there is time."""
    found: dict[int, float] = {}
    began = time.perf_counter()
    for rows in [each for each in FIRST if each <= most]:
        spent = time.perf_counter() - began
        if len(found) >= 2 and spent > SECONDS[device_type]:
            break
        repeats = 1 if spent > SECONDS[device_type] else REPEATS[device_type]
        seconds = [_seconds_of(run, rows) for _ in range(repeats)]
        while len(seconds) < MOST_REPEATS and sum(seconds) < STEADY[device_type]:
            seconds.append(_seconds_of(run, rows))
        found[rows] = min(seconds)
    return rising(found)


def _seconds_of(run: Callable[[int], object], rows: int) -> float:
    began = time.perf_counter()
    run(rows)
    return time.perf_counter() - began


def rising(curve: Curve) -> dict[int, float]:
    """A curve on which more rows never cost less. Where they seem to, fewer rows were disturbed:
    noise only adds."""
    out: dict[int, float] = {}
    least = math.inf
    for rows in sorted(curve, reverse=True):
        least = min(least, curve[rows])
        out[rows] = least
    return dict(sorted(out.items()))


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
    drafting: int = 0  # sequences that drafted
    whole: bool = True  # does it hold no prompt?
    is_usual: bool = True  # or was something compiled or captured on the way?
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
        self._episodes = Episodes()

    def forward(
        self, costs: StepCosts, rows: Sequence[int], reads: Sequence[int], drafting: bool
    ) -> None:
        """A forward begins, in which each sequence has so many rows and reads so many of them."""
        now = self._now
        prompts = sum(own for own, read in zip(rows, reads) if own > read + UNREAD)
        if drafting:
            now.draft_forwards += 1
            now.whole = now.whole and not prompts
            return
        now.costs = costs
        now.rows += sum(rows)
        now.drafting += sum(read > 1 for read in reads)
        now.whole = now.whole and not prompts
        costs.meet(Crowd(sum(map(min, rows, reads)), len(rows)))
        costs.observe_prompts(prompts)

    def rows(self, pace: Paced, rows: int, reading: int) -> None:
        """A forward begins in which so many rows run; of these, so many read prompts."""
        held = self._now.by_model.setdefault(pace, Rows())
        held.writing = max(held.writing, rows - reading)
        held.reading += reading

    def wrote(self, tokens: int) -> None:
        """A draft model wrote on by itself: its first forward was counted."""
        self._now.draft_forwards += tokens - 1

    def wrote_text(self, tokens: int) -> None:
        """A model wrote so many tokens of plain text in one launch: as many steps, alike."""
        step, self._now = self._now, Step()
        now = self.now()
        if self._arrived is not None and step.is_usual and step.costs is not None:
            for pace, held in step.by_model.items():
                pace.stepped(now - self._arrived, held.writing, held.reading)
            if step.whole:
                self._episodes.plain(step.costs, step.rows, now - self._arrived, tokens)
        self.tokens = 0
        self._arrived = now

    def went_on(self, costs: StepCosts, tokens: Sequence[int]) -> None:
        """Behind a verdict came more rounds in one launch, of which so many tokens came each: they
        take none of the next step's time."""
        for each in tokens:
            costs.observe_pace(each, max(1, costs.crowd.sequences))
        self.tokens -= sum(tokens)  # whoever gets them will count them as the verdict's
        self._arrived = self.now()

    def unusual(self) -> None:
        """Something in this step is done for the first time: what it takes says nothing."""
        self._now.is_usual = False
        if self._over is not None:
            self._over.is_usual = False

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
        if self._arrived is not None and step.is_usual:
            spent = step.costs.spent_on_drafts(step.drafting, step.draft_forwards)
            for pace, held in step.by_model.items():
                pace.stepped(max(0.0, seconds - spent), held.writing, held.reading)
        if self._arrived is not None and step.whole and step.is_usual:
            if step.drafting or step.draft_forwards:
                self._episodes.judged(step.costs)
                step.costs.observe(step.rows, step.drafting, step.draft_forwards, seconds)
            elif step.costs.at_once == 1 or self._episodes.runs:
                # Else it tells nothing: plain text costs what it does where it is written at once.
                self._episodes.plain(step.costs, step.rows, seconds, 1)
            if self.tokens > 0:
                step.costs.observe_pace(self.tokens, max(1, step.costs.crowd.sequences))
        else:
            self._episodes.break_off()
        self.tokens = 0
        self._arrived = now
        self._over = None

    def idle(self) -> None:
        """Nothing runs: the time until the next step is nobody's."""
        self._episodes.idle()
        self._now = Step()
        self._over = None
        self._arrived = None
        self.tokens = 0
