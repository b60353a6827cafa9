"""What runs inside the sandbox: a program that a model wrote, or the tests that question it.

`sandbox` starts this file by its path with `python -I -S`, so it imports the standard library only.
The two roles are two processes, each in a jail of its own, joined by a channel that carries plain
data: the tester asks the program for values and judges them. So a program can say nothing but the
values that its function returns, and whether all assertions held is not its to say.
"""

from __future__ import annotations

import builtins
import ctypes
import io
import json
import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from multiprocessing.connection import Connection
from typing import Any, NoReturn

NOBODY = 65534
FILE_SIZE = 1 << 20
OPEN_FILES = 64
LONGEST_MESSAGE = 64 << 20
BOX = "/box"  # the only folder that can be written to
BOX_SIZE = "16m"

# Where the interpreter and the libraries that it loads are. Nothing else of the disk can be seen.
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/nix/store", "/etc/ld.so.cache")

# From the kernel's headers; the numbers are the same on every architecture.
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
CAPABILITY_VERSION_3 = 0x20080522

Order = dict[str, Any]  # what `sandbox` writes to standard input


def main() -> None:
    order: Order = json.load(sys.stdin)
    report = os.dup(1)
    os.dup2(2, 1)  # standard error leads nowhere
    try:
        if order["isolated"]:
            _enter_namespaces(order["folder"])
            _become_first_process()
            _drop_privileges()
        elif os.geteuid() == 0 and all(map(_open_to_all, sys.path)):
            _drop_privileges()  # the least that root can do without namespaces
        _limit(order["seconds"], order["memory"])
    except OSError as error:
        os.write(report, json.dumps({"jail": error.strerror or str(error)}).encode())
        os._exit(1)
    channel = Connection(order["channel"])
    if order["role"] == "tester":
        _test(order, channel, report)
    os.close(report)
    _answer(order["source"], order["entry_point"], channel)


# --- the jail ---------------------------------------------------------------


def _call(function: str, *arguments: object) -> None:
    """A function of the C library that returns 0 if it succeeded."""
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")


def _enter_namespaces(folder: str) -> None:
    """No network, no other process, and a file system of the interpreter's own files, read-only,
    with one small folder to write to. It is built on `folder`, which is empty."""
    user = os.geteuid()
    group = os.getegid()
    try:
        if user != 0:
            raise PermissionError
        _call("unshare", NAMESPACES)
    except OSError:
        _call("unshare", CLONE_NEWUSER | NAMESPACES)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{NOBODY} {user} 1")
        _write("/proc/self/gid_map", f"{NOBODY} {group} 1")
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
    os.mkdir(folder + BOX)
    for path in _readable():
        _bind(path, folder + path)
    _make_read_only(folder)
    flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
    _mount("tmpfs", folder + BOX, "tmpfs", flags, f"size={BOX_SIZE},mode=777")
    os.chdir(folder)
    _call("pivot_root", b".", b".")
    _call("umount2", b".", MNT_DETACH)
    os.chdir(BOX)


def _readable() -> list[str]:
    """The paths that the interpreter reads, none inside another."""
    own = [*sys.path, os.path.join(sys.base_prefix, "lib")]
    found: list[str] = []
    for path in sorted(path for path in {*own, *LIBRARIES} if os.path.exists(path)):
        if not any(path.startswith(outer + "/") for outer in found):
            found.append(path)
    return found


def _bind(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        _write(target, "", "x")
    _mount(os.path.realpath(source), target, None, MS_BIND | MS_REC)


def _mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    words = [word.encode() if word else None for word in (source, target, kind, data)]
    _call("mount", *words[:3], ctypes.c_ulong(flags), words[3])


def _make_read_only(folder: str) -> None:
    """A mount and all below it."""
    attributes = (ctypes.c_uint64 * 4)(ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    path = folder.encode()
    number = ctypes.c_long(SYS_MOUNT_SETATTR)
    _call("syscall", number, AT_FDCWD, path, AT_RECURSIVE, ctypes.byref(attributes), size)


def _write(file: str, text: str, mode: str = "w") -> None:
    try:
        with open(file, mode) as out:
            out.write(text)
    except OSError as error:
        raise OSError(error.errno, f"{file}: {error.strerror}") from error


def _become_first_process() -> None:
    """Go on as the first process of a new process namespace: when it ends, the kernel ends all
    others there. The process outside stays only to end it when told, or when `sandbox` dies."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        return
    signal.signal(signal.SIGTERM, lambda *_: _kill(child))
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    os.waitpid(child, 0)
    os._exit(0)


def _kill(process: int) -> None:
    """End a process, which may have ended a moment ago."""
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def _drop_privileges() -> None:
    if os.geteuid() == 0:  # the kernel counts no processes of the real root
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    _call("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))
    _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _open_to_all(path: str) -> bool:
    """Can everybody read what is here? Else the interpreter's own files would be out of reach."""
    if not os.path.exists(path):
        return True
    folders = [path]
    while folders[-1] != os.path.dirname(folders[-1]):
        folders.append(os.path.dirname(folders[-1]))
    return all(os.stat(folder).st_mode & 0o001 for folder in folders if os.path.isdir(folder))


def _limit(seconds: float, memory: int) -> None:
    limits = {
        resource.RLIMIT_CPU: int(seconds) + 1,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: FILE_SIZE,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_NPROC: 0,  # neither a process nor a thread more
    }
    for kind, most in limits.items():
        with suppress(ValueError):  # macOS bounds no memory
            resource.setrlimit(kind, (most, most))


# --- plain data between the two ---------------------------------------------


class _Data(pickle.Unpickler):
    """Reads data and nothing else: a message can name no function of the reader's."""

    KINDS = {"complex": complex, "Fraction": Fraction, "Decimal": Decimal, "range": range}

    def find_class(self, module: str, name: str) -> Any:
        if name not in self.KINDS:
            raise pickle.UnpicklingError(f"{module}.{name} is not plain data")
        return self.KINDS[name]


PLAIN: tuple[Any, ...] = (bool, int, float, complex, str, bytes, Fraction, Decimal, range)
COLLECTIONS: tuple[Any, ...] = (list, tuple, set, frozenset)


def _plain(value: Any) -> Any:
    """A value as data, without the classes that were derived from it."""
    if value is None:
        return None
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in value.items()}
    for kind in COLLECTIONS:
        if isinstance(value, kind):
            return kind(map(_plain, value))
    for single in PLAIN:
        if isinstance(value, single):
            return value if type(value) is single else single(value)
    raise TypeError(f"{type(value).__name__} is not plain data")


def _send(channel: Connection, value: Any) -> None:
    channel.send_bytes(pickle.dumps(_plain(value)))


def _receive(channel: Connection) -> Any:
    return _Data(io.BytesIO(channel.recv_bytes(LONGEST_MESSAGE))).load()


# --- the program ------------------------------------------------------------


def _answer(source: str, entry_point: str, channel: Connection) -> NoReturn:
    """Define the program, then call its function as often as the tester asks."""
    names: dict[str, Any] = {"__name__": "program"}

    def define() -> None:
        exec(compile(source, "<program>", "exec"), names)
        names[entry_point]

    _send(channel, _outcome(define))
    while True:
        arguments, named = _receive(channel)
        _send(channel, _outcome(lambda: names[entry_point](*arguments, **named)))  # noqa: B023


def _outcome(function: Callable[[], Any]) -> tuple[str, Any]:
    """("returned", value), or ("raised", name and words of the error). What is no Exception, such
    as SystemExit, ends the program."""
    try:
        return "returned", _plain(function())
    except Exception as error:
        return "raised", (type(error).__name__, _words(error))


def _words(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return ""


# --- the tests --------------------------------------------------------------


def _test(order: Order, channel: Connection, report: int) -> NoReturn:
    """Run the tests to their end. Whatever keeps them from it, they have not passed."""

    def finish(detail: str | None) -> NoReturn:
        verdict = {"passed": detail is None, "detail": detail or ""}
        os.write(report, json.dumps(verdict).encode())
        os._exit(0)

    def receive() -> tuple[str, Any]:
        try:
            how, what = _receive(channel)
            if how == "raised":
                name, words = what
                return how, (str(name), str(words))
            return how, what
        except (EOFError, OSError):
            finish("the program ended before its tests")
        except Exception as error:
            finish(f"the program gave an answer that is not plain data ({_words(error)})")

    def ask(*arguments: Any, **named: Any) -> Any:
        with suppress(BrokenPipeError):
            _send(channel, (arguments, named))
        how, what = receive()
        if how == "raised":
            raise _error(*what)
        return what

    how, what = receive()
    if how == "raised":
        finish(": ".join(what))
    try:
        _run_tests(order, ask)
    except BaseException as error:
        finish(f"{type(error).__name__}: {_words(error)}")
    finish(None)


def _run_tests(order: Order, candidate: Callable[..., Any]) -> None:
    """What the task itself defines can be used by the tests; its function is the program's."""
    names: dict[str, Any] = {"__name__": "tests"}
    with suppress(SyntaxError):  # a task may end in the middle of a line
        exec(compile(order["given"], "<task>", "exec"), names)
    names[order["entry_point"]] = candidate
    exec(compile(order["source"], "<tests>", "exec"), names)
    names["check"](candidate)


def _error(name: str, words: str) -> Exception:
    """The error that the program raised, if it is one that Python has."""
    kind = getattr(builtins, name, None)
    with suppress(Exception):
        if isinstance(kind, type) and issubclass(kind, Exception):
            return kind(words)
    return RuntimeError(f"{name}: {words}")


if __name__ == "__main__":
    main()
