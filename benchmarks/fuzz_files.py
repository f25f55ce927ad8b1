"""Run thousands of damaged files of every format through the commands that read them, with limits on time and memory.

    make fuzz
    python benchmarks/fuzz_files.py --cases 3000 --seed 1
    python benchmarks/fuzz_files.py --cases 500 --only preference
    python benchmarks/fuzz_files.py --cases 500 --only pictures
    python benchmarks/fuzz_files.py --cases 5000 --jobs 8 --seconds 400
    python benchmarks/fuzz_files.py --cases 1 --seed 4711      # one case again, with its files kept

A case passes if its command ends in time with exit code 0 or 2, and the error mentions the file. Each failed case is printed
as a line of JSON with its seed. The exit code is 1 if a case failed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import queue
import resource
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS / "faults"), str(TESTS)]

SECONDS = 120.0
"""For one case, with the children it starts."""
MEMORY_BYTES = 1 << 30
"""The largest growth of the process's memory in one case."""
ADDRESS_BYTES = 24 << 30


def work(home: Path, seeds: range, only: str | None) -> None:
    """Run cases in this process; print a line of JSON before and after each."""
    from injection.hostile_files import make_case, run_case
    from injection.intact_files import Workshop

    out = os.fdopen(os.dup(1), "w")  # children and native code may write to standard output
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    with contextlib.redirect_stdout(io.StringIO()):
        shop = Workshop(home)
        shop.import_libraries()
    print(json.dumps({"seed": seeds.start - 1, "problem": None, "kind": "start"}), file=out, flush=True)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES, ADDRESS_BYTES))
    for seed in seeds:
        print(json.dumps({"seed": seed}), file=out, flush=True)
        said, problem, case = io.StringIO(), None, None
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            case = make_case(shop, seed, only=only)
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                problem = run_case(case, out=said.getvalue)
        except BaseException as error:  # noqa: BLE001 (a failure of the case, whatever it is)
            problem = "".join(traceback.format_exception(error)[-3:])
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        if problem is None and grown > MEMORY_BYTES:
            problem = f"the memory grew by {grown >> 20:,} MiB"
        kind = case.kind if case is not None else "?"
        print(json.dumps({"seed": seed, "kind": kind, "problem": problem}), file=out, flush=True)


def watch(
    home: Path, seeds: range, only: str | None, *, ends_at: float
) -> tuple[Counter[str], list[dict[str, Any]]]:
    """Run cases in child processes until `ends_at`; kill a child whose case is too slow, and continue with the next case.
    Return the numbers of cases and the failures."""
    failures: list[dict[str, Any]] = []
    counts = Counter[str]()
    next_seed, is_late = seeds.start, False
    while next_seed < seeds.stop and not is_late:
        command = [sys.executable, __file__, "--worker", str(home), "--seed", str(next_seed)]
        variables = {**os.environ, "CROSSTUNE_CACHE": str(home / "cache"), "TMPDIR": str(home)}
        command += ["--cases", str(seeds.stop - next_seed), *(["--only", only] if only else [])]
        # The errors of libraries go nowhere; those of commands are part of the answer.
        child = subprocess.Popen(
            command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        done: dict[str, Any] = {}
        lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=_read_lines, args=(child, lines), daemon=True).start()
        while line := _next_line(lines, SECONDS if done else 600.0):
            done = json.loads(line)
            next_seed = done["seed"] + 1
            if "problem" in done and done["kind"] != "start":
                counts[done["kind"].split()[0]] += 1
                if done["problem"]:
                    failures.append(done)
                    print(json.dumps(done), flush=True)
                if is_late := time.monotonic() > ends_at:
                    break
        child.kill()
        child.wait()
        if "problem" not in done:
            failures.append({**done, "problem": f"it took more than {SECONDS:g} s, or the process died"})
            print(json.dumps(failures[-1]), flush=True)
            if not done:
                break
    return counts, failures


def _read_lines(child: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        lines.put(line)
    lines.put("")


def _next_line(lines: queue.Queue[str], seconds: float) -> str:
    """Return the next line; an empty line at the end, or if none arrives in time."""
    try:
        return lines.get(timeout=seconds)
    except queue.Empty:
        return ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="one kind of file, as in --only preference or --only gguf")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with files of its own")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after this time")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    own = parser.parse_args()
    seeds = range(own.seed, own.seed + own.cases)
    if own.worker is not None:
        work(own.worker, seeds, own.only)
        return 0
    home = Path(tempfile.mkdtemp(prefix="fuzz-files-"))
    started, counts, failures = time.monotonic(), Counter[str](), list[dict[str, Any]]()

    def watch_part(part: int) -> tuple[Counter[str], list[dict[str, Any]]]:
        place = home / str(part)
        place.mkdir()
        return watch(
            place,
            seeds[len(seeds) * part // own.jobs : len(seeds) * (part + 1) // own.jobs],
            own.only,
            ends_at=started + own.seconds,
        )

    with ThreadPoolExecutor(own.jobs) as pool:
        for counted, failed in pool.map(watch_part, range(own.jobs)):
            counts += counted
            failures += failed
    print(f"{counts.total():,} cases: {dict(counts)}; {len(failures)} failures")
    print(f"{time.monotonic() - started:.0f} s; the last files are in {home}/0/work")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
