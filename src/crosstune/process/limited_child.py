"""Run a module of crosstune in a child process with limits on CPU time and memory."""

from __future__ import annotations

import json
import subprocess
import sys

from crosstune.core.errors import UserError

_WAIT_PER_CPU_SECOND = 10.0
"""Seconds of wall time allowed per second of CPU time, since the machine may be busy."""
# The limits are set before anything is imported. Windows has none; there, only the parent's timeout applies.
_START = """
import json, runpy, sys
sys.path[:], cpu, memory, module = json.loads(sys.argv[1])
try:
    import resource
except ImportError:
    pass
else:
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
runpy.run_module(module, run_name="__main__")
"""


class OverLimit(UserError):
    """The child exceeded its limit of time or memory, or failed."""


def run_limited(
    module: str, data: bytes, *, what: str, do: str, cpu_seconds: int, memory_bytes: int
) -> bytes:
    """Run `module` as the main program with `data` as its standard input; return its standard output. Raise OverLimit with
    the message `what` and the advice `do` when it exceeds a limit or fails."""
    limits = json.dumps([sys.path, cpu_seconds, memory_bytes, module])
    try:
        child = subprocess.run(
            [sys.executable, "-I", "-c", _START, limits],
            input=data,
            capture_output=True,
            timeout=cpu_seconds * _WAIT_PER_CPU_SECOND,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise OverLimit(
            what, why=f"it does not finish within {cpu_seconds} seconds of CPU time.", do=do
        ) from error
    if child.returncode:
        lines = child.stderr.decode(errors="replace").strip().splitlines()
        limit = (
            f"it needs more than {cpu_seconds} seconds of CPU time or {memory_bytes >> 20:,} MiB of memory."
        )
        raise OverLimit(what, why=lines[-1][:300] if lines and child.returncode > 0 else limit, do=do)
    return child.stdout
