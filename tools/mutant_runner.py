"""Run tests on mutants, many at a time: one process imports what is slow to import, and forks a
child for every mutant.

The child imports our package anew, with one module's source replaced, and runs the tests that run
the mutated lines, fastest first, until one fails. It needs pytest and what the tests need.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import json
import os
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import CodeType, FrameType

import pytest

# Before torch is imported: a thread pool does not survive a fork, and there are many of us.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRITON_INTERPRET"] = "1"

OPTIONS = ["-q", "-p", "no:cacheprovider", "-p", "no:timeout", "-p", "no:xdist"]
LONGEST_TEST = 15.0  # seconds; what takes longer is not worth its time here
LONGEST_FILE = 240.0
PARTS = 4  # that the tests of a file are measured in, side by side
CONTROLS = 16  # files whose tests are run without a mutant first
MEMORY = 48 << 30


class Runner:
    def __init__(self, root: Path, workers: int, limit_s: float):
        self.root = root
        self.workers = workers
        self.ends = time.monotonic() + limit_s
        sys.path[:0] = [str(root), str(root / "src")]
        os.chdir(root)
        self._preload()

    def _preload(self) -> None:
        """Import what tests will, but for ourselves: a child that does it says what it was."""
        read, write = os.pipe()
        child = fork(lambda: _say_modules(write))
        os.close(write)
        with os.fdopen(read) as said:
            names = said.read().split()
        os.waitpid(child, 0)
        if not names:
            print("tests/helpers.py could not be imported: every mutant will import all anew.")
        for name in names:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        ours = [name for name in sys.modules if name.split(".")[0] in ("forerun", "tests")]
        assert not ours, f"{ours[0]} would be the same for every mutant"

    def baseline(self, places: Sequence[Path], file: Path) -> None:
        """Which lines every test runs, and how long it takes."""
        file.unlink(missing_ok=True)
        jobs = []
        for one in sorted(test_files(places), key=lambda f: -f.stat().st_size):
            for part in range(PARTS):
                watch = partial(self._watch, one, part, file)
                jobs.append((f"{one.name} {part + 1}/{PARTS}", watch, LONGEST_FILE))
        self._all(jobs, lambda name, code, seconds: print(f"{name}: {code} in {seconds:.0f} s"))

    def _watch(self, one: Path, part: int, file: Path) -> int:
        return pytest.main([*OPTIONS, str(one)], [Watcher(self.root, file, part)])

    def run(self, mutants: list[dict], tests: list[dict], most_s: float, file: Path) -> None:
        """Test every mutant."""
        for mutant in mutants:
            mutated_source(self.root / mutant["file"], mutant)
        tests = sorted((t for t in tests if t["passed"]), key=lambda t: t["seconds"])
        unreliable = self._fail_without_mutant(mutants, tests, most_s, file.parent)
        print(f"{len(tests)} tests; {len(unreliable)} fail in this order without a mutant")
        tests = [t for t in tests if t["test"] not in unreliable]
        counts = {}

        def record(name: str, code: int, seconds: float, failed: list[str]) -> None:
            result = {
                "id": int(name),
                "outcome": outcome_of(code),
                "by": failed[0] if failed else "",
                "seconds": round(seconds, 2),
                "tests": counts[name],
            }
            with file.open("a") as lines:
                lines.write(json.dumps(result) + "\n")

        picked = [(str(m["id"]), m, selection(m, tests, most_s)) for m in mutants]
        counts.update({name: len(chosen) for name, _, chosen in picked})
        self._test_all(picked, file.parent, record)

    def _fail_without_mutant(
        self, mutants: list[dict], tests: list[dict], most_s: float, folder: Path
    ) -> set[str]:
        """Tests that fail in the order in which mutants run them, though nothing is mutated."""
        files = Counter(m["file"] for m in mutants).most_common(CONTROLS)
        nothing = {"line": 1, "was": [], "becomes": [], "runs": None}
        picked = []
        for file, _ in files:
            control = {"file": file, **nothing}
            picked.append((f"control-{len(picked)}", control, selection(control, tests, most_s)))
        failing: set[str] = set()

        def note(name: str, code: int, seconds: float, failed: list[str]) -> None:
            if outcome_of(code) == "killed" and not failed:
                raise SystemExit("tests do not run here even without a mutant.")
            failing.update(failed)

        self._test_all(picked, folder, note)
        return failing

    def _test_all(
        self,
        picked: list[tuple[str, dict, list[dict]]],
        folder: Path,
        done: Callable[[str, int, float, list[str]], None],
    ) -> None:
        def finish(name: str, code: int, seconds: float) -> None:
            failed = folder / f"{name}.failed"
            done(name, code, seconds, failed.read_text().splitlines() if failed.exists() else [])
            failed.unlink(missing_ok=True)

        jobs = []
        for name, mutant, tests in picked:
            work = partial(self._test, mutant, tests, folder / f"{name}.failed")
            jobs.append((name, work, 60 + 4 * sum(t["seconds"] for t in tests)))
        self._all(jobs, finish)

    def _test(self, mutant: dict, tests: list[dict], failed: Path) -> int:
        if not tests:
            return 5
        sys.meta_path.insert(0, Mutated(self.root, mutant))
        files = list(dict.fromkeys(t["test"].split("::")[0] for t in tests))
        first_only = ["-x"] if mutant["was"] else []
        return pytest.main([*OPTIONS, *first_only, *files], [Chosen(tests, failed)])

    def _all(
        self,
        jobs: Sequence[tuple[str, Callable[[], int], float]],
        done: Callable[[str, int, float], None],
    ) -> None:
        """Run jobs in children, so many at a time, until time is up. A job is a name, what to do,
        and its limit."""
        waiting = list(reversed(jobs))
        running: dict[int, tuple[str, float, float]] = {}
        while running or waiting:
            now = time.monotonic()
            if now > self.ends:
                for pid in running:
                    os.killpg(pid, signal.SIGKILL)
                return
            while waiting and len(running) < self.workers:
                name, work, limit = waiting.pop()
                running[fork(work)] = (name, now, now + limit)
            for pid, (name, began, deadline) in list(running.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    del running[pid]
                    done(name, os.waitstatus_to_exitcode(status), now - began)
                elif now > deadline:
                    os.killpg(pid, signal.SIGKILL)
            time.sleep(0.02)


def test_files(places: Sequence[Path]) -> list[Path]:
    """The files among some files and folders."""
    found = [[place] if place.is_file() else sorted(place.rglob("test_*.py")) for place in places]
    return [file for files in found for file in files]


def fork(work: Callable[[], int | None]) -> int:
    """A child that does this work, silently, and never returns."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 3
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        code = int(work() or 0)
    finally:
        os._exit(code)


def _say_modules(pipe: int) -> None:
    import tests.conftest  # noqa: F401
    from tests.helpers import ARCHITECTURES, network

    for arch in ARCHITECTURES:
        with contextlib.suppress(Exception):
            network(arch)
    theirs = [
        name for name in sys.modules if name.split(".")[0] not in ("forerun", "tests", "__main__")
    ]
    with os.fdopen(pipe, "w") as out:
        out.write("\n".join(theirs))


def outcome_of(code: int) -> str:
    """From pytest's exit status, or minus the signal that ended it."""
    if code in (0, 5):
        return "survived" if code == 0 else "no tests"
    return "timeout" if code in (-signal.SIGALRM, -signal.SIGKILL) else "killed"


def selection(mutant: dict, tests: list[dict], most_s: float) -> list[dict]:
    """The tests that run the mutant's lines, and then those that run any of its file: a model that
    is made once serves many tests, and only the first of them runs the lines that make it."""
    file = mutant["file"]
    near = mutant["runs"]
    of_file = [t for t in tests if file in t["lines"]]
    first = of_file
    if near is not None:
        first = [t for t in of_file if any(near[0] <= n <= near[1] for n in t["lines"][file])]
    picked: dict[str, dict] = {}
    left = most_s
    for test in [*first, *of_file]:
        if test["test"] not in picked and test["seconds"] <= left:
            picked[test["test"]] = test
            left -= test["seconds"]
    return list(picked.values())


def mutated_source(path: Path, mutant: dict) -> str:
    lines = path.read_text().splitlines()
    first = mutant["line"] - 1
    last = first + len(mutant["was"])
    if lines[first:last] != mutant["was"]:
        raise SystemExit(f"{path} has changed since the mutants were drawn: draw them again.")
    lines[first:last] = mutant["becomes"]
    return "\n".join(lines) + "\n"


class Mutated(importlib.machinery.SourceFileLoader):
    """Finds and loads one module of ours, with some of its lines replaced."""

    def __init__(self, root: Path, mutant: dict):
        path = root / mutant["file"]
        parts = path.relative_to(root / "src").with_suffix("").parts
        super().__init__(".".join(parts).removesuffix(".__init__"), str(path))
        self.source = mutated_source(path, mutant)

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> object:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self)

    def get_code(self, fullname: str) -> object:
        return compile(self.source, self.path, "exec", dont_inherit=True)


class Chosen:
    """A pytest plugin: these tests in this order, none for ever, and who failed."""

    def __init__(self, tests: list[dict], failed: Path):
        self.seconds = {t["test"]: t["seconds"] for t in tests}
        self.failed = failed
        quiet_hypothesis()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        order = {test: i for i, test in enumerate(self.seconds)}
        items[:] = sorted((i for i in items if i.nodeid in order), key=lambda i: order[i.nodeid])

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        # The default action ends the process, wherever it hangs.
        signal.setitimer(signal.ITIMER_REAL, 12 + 5 * self.seconds[item.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            with self.failed.open("a") as names:
                names.write(report.nodeid + "\n")


class Watcher:
    """A pytest plugin: writes down which lines every test runs."""

    def __init__(self, root: Path, file: Path, part: int):
        self.part = part
        self.root = str(root) + os.sep
        self.package = str(root / "src") + os.sep
        self.file = file
        self.ran: dict[str, set[int]] = {}
        self.called: set[CodeType] = set()
        quiet_hypothesis()
        self.restart = lambda: None
        if sys.version_info >= (3, 12):
            self._monitor()
        else:
            sys.settrace(self._trace)

    def _monitor(self) -> None:
        tools = sys.monitoring
        tools.use_tool_id(tools.COVERAGE_ID, "mutants")
        tools.register_callback(tools.COVERAGE_ID, tools.events.LINE, self._line)
        tools.set_events(tools.COVERAGE_ID, tools.events.LINE)
        self.restart = tools.restart_events

    def _line(self, code: CodeType, line: int) -> object:
        if code.co_filename.startswith(self.package):
            self.ran.setdefault(code.co_filename, set()).add(line)
        return sys.monitoring.DISABLE

    def _trace(self, frame: FrameType, event: str, argument: object) -> None:
        """Older Pythons: a function that is called counts whole, because tracing lines is slow."""
        code = frame.f_code
        if code not in self.called and code.co_filename.startswith(self.package):
            self.called.add(code)
            lines = self.ran.setdefault(code.co_filename, set())
            lines.update(line for *_, line in code.co_lines() if line)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = items[self.part :: PARTS]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> object:
        self.ran.clear()
        self.called.clear()
        self.passed = True
        self.restart()
        began = time.perf_counter()
        result = yield
        seconds = time.perf_counter() - began
        found = {
            "test": item.nodeid,
            "seconds": round(seconds, 3),
            "passed": self.passed and seconds < LONGEST_TEST,
            "lines": {f.removeprefix(self.root): sorted(n) for f, n in self.ran.items()},
        }
        with self.file.open("a") as lines:
            lines.write(json.dumps(found) + "\n")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed &= report.passed


def quiet_hypothesis() -> None:
    """The same examples every time, and none kept."""
    from hypothesis import settings

    settings.register_profile("mutants", derandomize=True, database=None)
    settings.load_profile("mutants")
