"""Run Python programs as forks of a process that has imported torch and crosstune: each starts in milliseconds.

The process is started once per pytest process, at the first use; `python tests/warm.py` is its own program.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT_S = 900.0


@dataclass
class Program:
    """A program that runs, or ran, in a fork."""

    pid: int
    output: Path
    _server: Server
    _code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, less than 0 for a signal; None while it runs."""
        if self._code is None:
            self._code = self._server.ask({"poll": self.pid})
        return self._code

    def said(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")

    def end(self) -> tuple[int, str]:
        """Wait for the end; return the exit code and the output."""
        until = time.monotonic() + LIMIT_S
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                self.kill()
                raise TimeoutError(self.said()[-4000:])
            time.sleep(0.01)
        return code, self.said()

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Server:
    """A process with these environment variables that has imported torch and crosstune; ends with `close`."""

    def __init__(self, environment: Mapping[str, str], *, home: Path | None = None) -> None:
        self._environment = {"OMP_NUM_THREADS": "1", **environment}
        self._outputs = tempfile.mkdtemp(prefix="crosstune-warm-")
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=self._environment,
            cwd=home,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, code: str, *words: str, environment: Mapping[str, str] | None = None) -> Program:
        """Start a program with `sys.argv[1:]`, and its own environment variables if not those of the process."""
        handle, name = tempfile.mkstemp(dir=self._outputs)
        os.close(handle)
        variables = environment or self._environment
        asked = {"code": code, "words": words, "environment": variables, "output": name}
        return Program(pid=self.ask(asked), output=Path(name), _server=self)

    def ask(self, question: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()  # the end of its input ends it
        shutil.rmtree(self._outputs)


def start(code: str, *words: str, variables: Mapping[str, str | None] | None = None) -> Program:
    """Start a program with `sys.argv[1:]` and environment variables beside those of this process; None removes one."""
    asked = {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}
    kept = {key: value for key, value in asked.items() if value is not None}
    return _server().start(code, *words, environment=kept)


MAIN = "import sys\nfrom crosstune.cli.main import main\nsys.exit(main(sys.argv[1:]))"
"""The program `crosstune`."""
IN_FOLDER = "import os, sys\nos.chdir(sys.argv.pop(1))\n"
"""The beginning of a program that runs in the folder of its first argument."""
_COMMAND = """
import os, signal, sys
from crosstune.cli.main import main
os.setsid()
signal.signal(signal.SIGHUP, signal.SIG_IGN)
place = os.open(sys.argv[1], os.O_RDWR if os.path.realpath(sys.argv[1]).startswith("/dev/") else os.O_WRONLY)
for number in (0, 1, 2) if os.isatty(place) else (1, 2):
    os.dup2(place, number)
sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", buffering=1, closefd=False) for number in (1, 2))
os._exit(main(sys.argv[2:]))
"""


def start_command(
    words: Sequence[str], *, place: str, variables: Mapping[str, str | None] | None = None
) -> Program:
    """Start `crosstune` with these words, as under nohup, on the terminal or named pipe at `place`."""
    return start(_COMMAND, place, *words, variables=variables)


def start_ranks(
    code: str, *words: str, size: int, port: int, variables: Mapping[str, str | None] | None = None
) -> list[Program]:
    """Start a program once for each rank, with the variables that torchrun sets."""
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        start(
            code,
            *words,
            variables={"RANK": str(rank), "LOCAL_RANK": str(rank), **shared, **(variables or {})},
        )
        for rank in range(size)
    ]


@functools.lru_cache(maxsize=1)
def _server() -> Server:
    server = Server({**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    atexit.register(server.close)
    return server


def _serve() -> None:
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    import crosstune.cli.commands.train
    import crosstune.cli.main
    import crosstune.recipes.sft
    import crosstune.runs.pipeline
    import crosstune.torch_engine.group
    import crosstune.torch_engine.open
    import crosstune.torch_engine.sharding.shard
    import crosstune.torch_engine.sharding.staged_backend  # noqa: F401

    torch.set_num_threads(1)
    running: set[int] = set()
    for line in sys.stdin:
        question = json.loads(line)
        if (pid := question.get("poll")) is not None:
            found, status = os.waitpid(pid, os.WNOHANG)
            running -= {found}
            answer = os.waitstatus_to_exitcode(status) if found else None
        else:
            answer = _fork(**question)
            running.add(answer)
        print(json.dumps(answer), flush=True)
    for pid in running:  # the tests are over, or were interrupted
        os.kill(pid, signal.SIGKILL)


def _fork(code: str, words: Sequence[str], environment: Mapping[str, str], output: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    ended = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number in (1, 2):
            os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), number)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv[1:] = words
        exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})
        ended = 0
    except SystemExit as error:
        ended = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001  (printed, and the process ends)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended)


if __name__ == "__main__":
    _serve()
