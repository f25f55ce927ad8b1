"""A process that has torch imported and runs each program in a fork of itself: a program then starts at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Nothing computes in the parent: threads that a library has started are not in a fork.
_SERVER = """
import json, os, sys, traceback
import crosstune.cli.main
try:
    import transformers.models.llama.modeling_llama
    import crosstune.torch_engine.session.session, crosstune.runs.pipeline
except ModuleNotFoundError:  # without torch, every program says so itself
    pass

def run(kind, program):
    if kind == "command":
        return crosstune.cli.main.main(program)
    exec(compile(program, "program", "exec"), {"__name__": "__main__"})
    return 0

def be_child(kind, program, out):
    code = 1
    try:
        handle = os.open(out, os.O_WRONLY)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin = open(0, encoding="utf-8", closefd=False)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)
        code = run(kind, program)
    except SystemExit as error:
        code = error.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

ended = {}

def wait(pid, options):
    if pid not in ended:
        found, status = os.waitpid(pid, options)
        if not found:
            return None
        ended[pid] = os.waitstatus_to_exitcode(status)
    return ended[pid]

for line in sys.stdin:
    kind, *rest = json.loads(line)
    if kind in ("wait", "poll"):
        print(json.dumps(wait(rest[0], os.WNOHANG if kind == "poll" else 0)), flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        be_child(kind, *rest)
    print(pid, flush=True)
"""


@dataclass(frozen=True)
class Running:
    """A program in a fork; `wait` ends it."""

    pid: int
    out: Path
    warm: WarmProcess

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def is_alive(self) -> bool:
        return self.warm.ask("poll", self.pid) is None

    def wait(self) -> tuple[int, str]:
        """Return its exit code, negative for a signal, and the text that it printed."""
        code = self.warm.ask("wait", self.pid)
        text = self.out.read_text(encoding="utf-8", errors="replace")
        self.out.unlink()
        return code, text


class WarmProcess:
    """A warm process in a folder; ends with `close`."""

    def __init__(self, home: Path, environment: Mapping[str, str]) -> None:
        self._home = home
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            cwd=home,
            env=dict(environment),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def command(self, words: list[str]) -> Running:
        """Start `crosstune` with these words."""
        return self._start("command", words)

    def python(self, code: str) -> Running:
        return self._start("python", code)

    def _start(self, kind: str, program: object) -> Running:
        handle, name = tempfile.mkstemp(prefix=".printed.", dir=self._home)
        os.close(handle)
        return Running(self.ask(kind, program, name), Path(name), self)

    def ask(self, *request: object) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the warm process has ended"
        return json.loads(answer)

    def close(self) -> None:
        self._process.communicate()
