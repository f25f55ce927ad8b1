"""Run an answer's code and its tests in this child process, with restrictions, and report how many tests passed.

This file runs on its own, without importing crosstune. It is not a security boundary: the code runs in the same process as
the tests, and can read all files of the user. docs/guide/rewards.md lists what it prevents.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import signal
import struct
import sys
from pathlib import Path
from typing import Any, NoReturn

_NO_NETWORK = ("socket.",)
_FORBIDDEN = (
    "subprocess.", "os.exec", "os.fork", "os.kill", "os.posix_spawn", "os.spawn", "os.startfile", "os.system",
    "ctypes.call_function", "ctypes.dlopen", "ctypes.dlsym", "os.link", "pty.", "resource.", "signal.",
)  # fmt: skip
"""Prefixes of audit events: processes, native code, limits."""
_CHANGES = (
    "os.chflags", "os.chmod", "os.chown", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.setxattr", "os.symlink",
    "os.truncate", "os.utime",
)  # fmt: skip
"""Audit events that change the path in one of their first two arguments."""
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

# System calls by processor: sockets, new programs, signals to and memory of other processes, io_uring.
_DENIED = {
    "x86_64": (41, 57, 58, 59, 62, 101, 200, 234, 310, 311, 322, 424, 425, 438),
    "aarch64": (117, 129, 130, 131, 198, 221, 270, 271, 281, 424, 425, 438),
}
_MACHINES = {"x86_64": (0xC000003E, 56), "aarch64": (0xC00000B7, 220)}
"""Processor -> its audit number and its system call `clone`."""
_CLONE3, _CLONE_THREAD = 435, 0x10000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _EPERM, _ENOSYS = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2


def deny_system_calls() -> bool:
    """Deny sockets, processes and signals with a seccomp filter; return False where the system has none."""
    machine = platform.machine()
    if not sys.platform.startswith("linux") or machine not in _DENIED:
        return False
    audit, clone = _MACHINES[machine]
    rules: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, audit),
        (_RETURN, 0, 0, _EPERM),  # another processor's calls have other numbers
        (_LOAD, 0, 0, 0),
        (_AT_LEAST, 0, 1, 0x40000000),
        (_RETURN, 0, 0, _EPERM),
    ]
    for number in _DENIED[machine]:
        rules += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _EPERM)]
    rules += [
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _ENOSYS),  # libraries then use clone, whose flags a filter can read
        (_EQUAL, 0, 3, clone),
        (_LOAD, 0, 0, 16),
        (_ANY_BIT, 1, 0, _CLONE_THREAD),
        (_RETURN, 0, 0, _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    program = ctypes.create_string_buffer(struct.pack("HP", len(rules), ctypes.addressof(code)))
    library = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    if library.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero):
        return False
    return not library.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_FILTER), program, zero, zero)


def forbid(folder: str, *events: str) -> None:
    """Raise in Python for processes, native code, changes outside the folder, and audit events with these prefixes."""
    inside, realpath, fspath, join = folder + os.sep, os.path.realpath, os.fspath, os.path.join
    forbidden = (*_FORBIDDEN, *events)

    def check_path(path: Any) -> None:
        if isinstance(path, (str, bytes, os.PathLike)):
            text = fspath(path)
            text = os.fsdecode(text) if isinstance(text, bytes) else text
            if not join(realpath(text), "").startswith(inside):
                raise PermissionError(f"the code may not change {text}")

    def audit(event: str, values: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = values
            if (isinstance(mode, str) and set(mode) & set("wax+")) or (flags or 0) & _WRITE_FLAGS:
                check_path(path)
        elif event in _CHANGES:
            for value in values[:2]:
                check_path(value)
        elif event.startswith(forbidden):
            raise PermissionError(f"the code may not use {event}")

    sys.addaudithook(audit)


def run_tests(code: str, tests: list[str]) -> int:
    """Return the number of tests that pass."""
    namespace: dict[str, Any] = {"__name__": "answer"}
    exec(compile(code, "answer", "exec"), namespace)
    passed = 0
    for test in tests:
        try:
            exec(compile(test, "test", "exec"), namespace)
        except BaseException:  # noqa: BLE001 - a failed test, whatever it raises
            continue
        passed += 1
    return passed


def main() -> NoReturn:
    request = json.loads(sys.stdin.buffer.read())
    result, write, end, encode = os.dup(1), os.write, os._exit, json.dumps
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    signal.alarm(request["seconds"])  # ends the process if its parent is gone
    in_kernel = deny_system_calls()
    # The filter denies sockets of the network, and permits the pair of sockets inside asyncio.
    forbid(os.path.realpath(Path.cwd()), *(() if in_kernel else _NO_NETWORK))
    found: dict[str, Any] = {"token": request["token"], "in_kernel": in_kernel, "passed": 0}
    try:
        found["passed"] = run_tests(request["code"], request["tests"])
    except BaseException as error:  # noqa: BLE001 - of the answer's code
        found["error"] = type(error).__name__
    write(result, encode(found).encode())
    end(0)


if __name__ == "__main__":
    main()
