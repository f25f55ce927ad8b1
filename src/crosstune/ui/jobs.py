"""Start crosstune commands as processes that outlive the page, and follow them through their files."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from crosstune.core.errors import UserError
from crosstune.core.safe_text import printable
from crosstune.files.json_files import parse_json, read_json, write_json
from crosstune.files.plain_files import is_file_name
from crosstune.files.run_lock import LOCKS
from crosstune.files.run_record import read_log

FOLDER = ".ui"
"""Folder for the jobs and the token of the page, in the runs folder."""
_MOST_JOBS = 60
_TAIL_BYTES = 1 << 14
_OUTPUT_BYTES = 16 << 20
_COMMAND_S, _IDLE_S = 600.0, 300.0
_WORKER = """
import contextlib, io, json, os, sys, threading
answers = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")
os.dup2(2, 1)  # what libraries print is no answer
from crosstune.cli.main import main
while True:
    idle = threading.Timer(float(sys.argv[1]), os._exit, [0])
    idle.daemon = True
    idle.start()
    line = sys.stdin.readline()
    idle.cancel()
    if not line:
        os._exit(0)
    output, messages = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(messages):
        code = main(json.loads(line))
    print(json.dumps([code, output.getvalue(), messages.getvalue()]), file=answers, flush=True)
"""
_SAME_START_S = 1.0
_READY = re.compile(rb"^ready +http://127\.0\.0\.1:(\d+)/v1 ", re.MULTILINE)


class Jobs:
    """The commands started for the page. Each has a folder with its command, its output and its messages."""

    def __init__(self, parent: Path) -> None:
        self.parent = parent.absolute()
        self.folder = self.parent / FOLDER
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, kind: str, words: Sequence[str], *, target: str) -> dict[str, Any]:
        """Start a command in its own session."""
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        folder = self.folder / name
        folder.mkdir(parents=True)
        job = {"kind": kind, "command": command_line(words), "target": target, "started": time.time()}
        with (folder / "output").open("wb") as output, (folder / "messages").open("wb") as messages:
            child = subprocess.Popen(
                [sys.executable, "-m", "crosstune", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=messages,
                start_new_session=True,
            )
        self._children[name] = child
        job |= {"pid": child.pid, "created": _created(child.pid)}
        write_json(folder / "job.json", job)
        self._remove_old()
        return self.read(name)

    def listing(self) -> list[dict[str, Any]]:
        """Return the jobs, the newest first, without damaged ones."""
        found = []
        for name in sorted(self._names(), reverse=True):
            with contextlib.suppress(UserError):
                found.append(self.read(name))
        return found

    def read(self, name: str) -> dict[str, Any]:
        """Return a job with its state: running, ready (a server), done or failed."""
        folder = self._find(name)
        job = read_json(folder / "job.json")
        if (child := self._children.get(name)) is not None and child.poll() is not None:
            del self._children[name]  # reaped
        alive = is_alive(job)
        output = _tail(folder / "output", _OUTPUT_BYTES)
        result = None if alive else _result(output)
        state = "running" if alive else "done" if result is not None else "failed"
        ready = None
        if alive and job.get("kind") == "serve" and (ready := _READY.search(output)):
            state = "ready"
        if not alive and job.get("stopped"):
            state = "stopped"
        messages = printable(_tail(folder / "messages", _TAIL_BYTES).decode("utf-8", errors="replace"))
        target = Path(str(job.get("target", "")))
        return {
            "id": name,
            "run": target.relative_to(self.parent).as_posix() if target.is_relative_to(self.parent) else None,
            "seconds": time.time() - job["created"] if alive else None,
            **{key: job.get(key) for key in ("kind", "command", "target", "started")},
            "state": state,
            "messages": messages,
            "result": result,
            "port": int(ready[1]) if ready else None,
        }

    def stop(self, name: str) -> None:
        """Ask a job to end; a training run saves a checkpoint first."""
        folder = self._find(name)
        job = read_json(folder / "job.json")
        if is_alive(job):
            write_json(folder / "job.json", job | {"stopped": True})
            os.kill(job["pid"], signal.SIGTERM)

    def stop_run(self, folder: Path) -> None:
        """Ask the process that trains a run to save a checkpoint and end, started by this page or not."""
        for name in self._names():
            job = read_log(self.folder / name / "job.json")
            if job.get("target") == str(folder) and job.get("kind") == "train" and is_alive(job):
                self.stop(name)
                return
        holder = _holder(folder.resolve().parent / LOCKS / f"{folder.resolve().name}.lock")
        if holder is None:
            raise UserError(
                f"The process that trains {folder.name} was not found.",
                why="it runs on another machine or as another user, or it has ended.",
                do="stop it where it was started, with Ctrl-C",
            )
        os.kill(holder, signal.SIGTERM)

    def _find(self, name: str) -> Path:
        folder = self.folder / name
        if not is_file_name(name) or name.startswith(".") or not (folder / "job.json").is_file():
            raise UserError("There is no such job.", do="open one from the list")
        return folder

    def _names(self) -> list[str]:
        return [path.parent.name for path in self.folder.glob("*/job.json")]

    def _remove_old(self) -> None:
        for name in sorted(self._names())[:-_MOST_JOBS]:
            if not is_alive(read_log(self.folder / name / "job.json")):
                shutil.rmtree(self.folder / name, ignore_errors=True)


class CommandWorker:
    """A process that runs `plan` and `data`, which print their result at once. It keeps its libraries loaded, since a form
    asks at every change, and ends after some minutes without a request, or with the server."""

    def __init__(self) -> None:
        self._busy = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def run(self, words: Sequence[str]) -> dict[str, Any]:
        """Run a command with --json and return its result, and the error it printed."""
        with self._busy:
            answer = self._send([*words, "--json"]) or self._send([*words, "--json"])
        if answer is None:
            raise UserError(
                f"`crosstune {words[0]}` ended without a result.", do="run the command in a terminal"
            )
        code, output, messages = answer
        result = _result(output.encode("utf-8", errors="replace"))
        return {"result": result, "error": printable(messages).strip() if code else ""}

    def _send(self, words: Sequence[str]) -> Any:
        """Return the exit code and the output of a command; None if the process ended, as when it was idle."""
        if self._child is None or self._child.poll() is not None:
            self._child = subprocess.Popen(
                [sys.executable, "-c", _WORKER, str(_IDLE_S)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        child = self._child
        assert child.stdin is not None and child.stdout is not None
        limit = threading.Timer(_COMMAND_S, child.kill)
        limit.start()
        try:
            child.stdin.write(json.dumps(words).encode() + b"\n")
            child.stdin.flush()
            line = child.stdout.readline()
        except BrokenPipeError:
            return None
        finally:
            limit.cancel()
        return json.loads(line) if line.endswith(b"\n") else None


def command_line(words: Sequence[str]) -> str:
    return shlex.join(["crosstune", *words])


def is_alive(job: dict[str, Any]) -> bool:
    """Return True if the process of a job runs; another process may have its number by now."""
    pid, created = job.get("pid"), job.get("created")
    if not isinstance(pid, int) or pid <= 0 or not isinstance(created, (int, float)):
        return False
    found = _created(pid)
    return found is not None and abs(found - created) < _SAME_START_S


def _created(pid: int) -> float | None:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE:
            return process.create_time()
    return None


def _holder(lock: Path) -> int | None:
    """Return the process of this user that has a lock file open."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and any(file.path == str(lock) for file in process.open_files()):
                return int(process.pid)
    return None


def _result(output: bytes) -> dict[str, Any] | None:
    """Return the JSON object that a finished command printed."""
    try:
        found = parse_json(output)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _tail(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
            return file.read(limit)
    except OSError:  # removed by hand
        return b""
