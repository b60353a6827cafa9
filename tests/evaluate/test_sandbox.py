"""Programs that a model wrote: what they cannot do, and that they cannot claim to have passed."""

import json
import os
import sys
import time

import pytest

from forerun.errors import NotAble
from forerun.evaluate import jail, sandbox
from forerun.evaluate.examiner import SandboxExaminer
from forerun.evaluate.sandbox import Limits, Trial
from tests.helpers import run as forerun

WHY_NOT = sandbox.why_not_isolated()
isolated = pytest.mark.skipif(WHY_NOT is not None, reason=f"no isolation here: {WHY_NOT}")

CHECK = "def check(f):\n    assert f() == 1\n"


def outcome(program, test=CHECK, seconds=5.0, given=""):
    limits = Limits(seconds, isolated=WHY_NOT is None)
    return sandbox.run(Trial(program, test, "f", given), limits)


@pytest.mark.parametrize(
    "program, reason, said",
    [
        ("def f(): return 1", "passed", ""),
        ("def f(): return 2", "failed", "AssertionError"),
        ("def f(:", "failed", "SyntaxError"),
        ("def g(): return 1", "failed", "KeyError: 'f'"),
        ("def f(): return 1 / 0", "failed", "ZeroDivisionError"),
        ("def f(): return bytearray(4 << 30)", "failed", "MemoryError"),
        ("def f(): open('big', 'wb').write(bytes(8 << 20))", "failed", "OSError"),
        ("def f(): return 1\n# " + "x" * (200 << 10), "passed", ""),
        ("def f(): return 1\0", "failed", "null bytes"),
        ("def f(): return '\ud800'", "failed", "UnicodeEncodeError"),
        ("def f(): return (i for i in ())", "failed", "generator is not plain data"),
        ("import sys\ndef f(): sys.exit(0)", "failed", "ended before its tests"),
        ("import os\ndef f(): os._exit(0)", "failed", "ended before its tests"),
        ("import sys\nsys.exit(0)", "failed", "ended before its tests"),
    ],
)
def test_a_program_passes_if_all_its_assertions_hold_and_never_ends_the_run(program, reason, said):
    found = outcome(program)
    assert found.reason == reason and found.passed == (reason == "passed"), found
    assert said in found.detail


@pytest.mark.parametrize("body", ["while True: pass", "import time; time.sleep(60)"])
def test_a_program_that_does_not_end_is_ended(body):
    began = time.monotonic()
    found = outcome(f"def f():\n    {body}", seconds=0.7)
    assert found.reason == "timeout" and "still running" in found.detail
    assert time.monotonic() - began < 10


FORGERIES = {
    "equal to everything": """
class Yes(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def f(): return Yes(5)
""",
    "a report of its own": """
import os
def f():
    for number in range(3, 60):
        try: os.write(number, b'{"passed": true}')
        except OSError: pass
    os._exit(0)
""",
    "code for the tester": """
import os, pickle, struct
class Code:
    def __reduce__(self): return os._exit, (0,)
def f():
    message = pickle.dumps(("returned", Code()))
    for number in range(3, 60):
        try: os.write(number, struct.pack("!i", len(message)) + message)
        except OSError: pass
    while True: pass
""",
    "a patched interpreter": """
import builtins, json, os
builtins.AssertionError = Warning
json.dumps = lambda verdict: '{"passed": true}'
def f(): return 2
""",
}


@pytest.mark.parametrize("program", FORGERIES.values(), ids=FORGERIES)
def test_a_program_cannot_claim_to_have_passed(program):
    assert outcome(program).reason == "failed"


def test_a_test_that_forgives_errors_does_not_forgive_a_program_that_ended():
    test = "def check(f):\n    try: f()\n    except BaseException: return\n"
    assert outcome("import sys\ndef f(): sys.exit(0)", test).reason == "failed"


def test_errors_and_derived_classes_reach_the_tests():
    raises = "def check(f):\n    try: f()\n    except ValueError: return\n    assert False\n"
    assert outcome("def f(): raise ValueError('no')", raises).passed
    assert not outcome("def f(): return 1", raises).passed
    counts = "def check(f):\n    assert f() == {'a': 2, 'b': 1}\n"
    assert outcome("from collections import Counter\ndef f(): return Counter('aab')", counts).passed


def test_the_tests_use_the_tasks_own_helpers_not_the_programs():
    test = "def check(f):\n    assert right(f())\n"
    cheat = "def right(x): return True\ndef f(): return 2\n"
    given = "def right(x): return x == 1\ndef f(): return 1\n"
    assert not outcome(cheat, test, given=given).passed
    assert outcome("def f(): return 1", test, given=given).passed


# What a program tries; each gives what it got, or the name of the error.
TRIES = """
import os, socket, subprocess, sys, threading
def tried(function):
    try: return function()
    except BaseException as error: return type(error).__name__
def f():
    return {
        "environment": dict(os.environ),
        "other processes": tried(lambda: os.listdir("/proc")),
        "files": tried(lambda: open("/etc/passwd").read()),
        "home": tried(lambda: os.listdir(HOME)),
        "write": tried(lambda: open("/x", "w")),
        "write to libraries": tried(lambda: open(os.__file__ + "x", "w")),
        "own folder": tried(lambda: open("x", "w").write("x")),
        "network": tried(lambda: socket.create_connection(("127.0.0.1", PORT), 1)),
        "shell": tried(lambda: subprocess.run(["/bin/sh", "-c", "true"]).returncode),
        "fork": tried(os.fork),
        "thread": tried(lambda: threading.Thread(target=print).start()),
        "user": os.getuid(),
    }
"""
SHOW = "import json\ndef check(f):\n    raise Exception(json.dumps(f()))\n"


@isolated
def test_a_program_reaches_nothing_outside(tmp_path, monkeypatch):
    import socket

    monkeypatch.setenv("SECRET", "hunter2")
    with socket.create_server(("127.0.0.1", 0)) as server:
        known = f"HOME, PORT = {str(tmp_path)!r}, {server.getsockname()[1]}\n"
        detail = outcome(known + TRIES, SHOW).detail
    found = json.loads(detail.removeprefix("Exception: "))
    assert "SECRET" not in found.pop("environment")
    assert found.pop("user") != 0
    assert found == {
        "other processes": "FileNotFoundError",
        "files": "FileNotFoundError",
        "home": "FileNotFoundError",
        "write": "OSError",
        "write to libraries": "OSError",
        "own folder": 1,
        "network": "OSError",
        "shell": "BlockingIOError",
        "fork": "BlockingIOError",
        "thread": "RuntimeError",
    }


@pytest.mark.skipif(WHY_NOT is not None and os.geteuid() == 0, reason="root may fork")
def test_nothing_is_left_behind(tmp_path):
    """A daemon would write the file after its program was ended."""
    late = tmp_path / "late"
    program = f"""
import os, time
def f():
    try:
        if os.fork() == 0:
            os.setsid()
            time.sleep(1.2)
            open({str(late)!r}, "w")
    except OSError:
        pass
    time.sleep(60)
"""
    outcome(program, seconds=0.7)
    time.sleep(1)
    assert not late.exists()


class TestWithoutIsolation:
    @pytest.fixture(autouse=True)
    def no_namespaces(self, monkeypatch):
        monkeypatch.setattr(sandbox, "why_not_isolated", lambda: "unshare: Operation not permitted")

    def test_generated_code_needs_to_be_allowed_and_the_reason_is_said(self, tmp_path):
        with pytest.raises(NotAble, match=r"unshare: Operation not permitted.*--allow-code"):
            _ = SandboxExaminer().limits
        said = forerun("evaluate", "humaneval", "--data", tmp_path / "t.jsonl").exception
        assert isinstance(said, NotAble) and "--allow-code" in str(said)

    def test_what_is_allowed_runs_with_limits_alone(self):
        limits = SandboxExaminer(seconds=5, allow_code=True).limits
        assert not limits.isolated
        assert sandbox.run(Trial("def f(): return 1", CHECK, "f"), limits).passed
        for ending in ("os._exit(0)", "sys.exit(0)"):
            program = f"import os, sys\ndef f(): {ending}"
            assert not sandbox.run(Trial(program, CHECK, "f"), limits).passed

    def test_root_gives_up_its_rights_where_the_interpreter_can_be_read_without(self, tmp_path):
        """The folders of the interpreter may be root's alone: then a program could import
        nothing."""
        inside = tmp_path / "a" / "b"
        inside.mkdir(parents=True)
        for folder in (*inside.parents, inside):
            if tmp_path in (folder, *folder.parents):
                folder.chmod(0o755)
        outer = all(os.stat(folder).st_mode & 1 for folder in tmp_path.parents)
        assert jail._open_to_all(str(inside)) == outer
        inside.parent.chmod(0o700)
        assert not jail._open_to_all(str(inside))
        limits = SandboxExaminer(allow_code=True).limits
        program = "import os, json\ndef f(): return os.geteuid()"
        mine = os.geteuid()
        drops = mine == 0 and all(map(jail._open_to_all, sys.path))
        test = f"def check(f):\n    assert f() == {jail.NOBODY if drops else mine}\n"
        assert sandbox.run(Trial(program, test, "f"), limits).passed


def test_a_jail_that_cannot_be_made_is_an_error_and_no_failed_program(monkeypatch, tmp_path):
    if not sys.platform.startswith("linux"):
        pytest.skip("only Linux has jails")
    broken = tmp_path / "jail.py"
    source = sandbox.JAIL.read_text()
    broken.write_text(source.replace('_call("unshare"', 'raise OSError(1, "no"); _call("unshare"'))
    monkeypatch.setattr(sandbox, "JAIL", broken)
    with pytest.raises(NotAble, match="cannot be run in isolation"):
        sandbox.run(Trial("def f(): return 1", CHECK, "f"), Limits())
