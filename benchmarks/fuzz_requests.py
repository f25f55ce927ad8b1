"""Run tens of thousands of requests with bad values: none may end in a traceback, hang, or fill the memory.

    make fuzz
    python benchmarks/fuzz_requests.py --cases 20000 --first 100000
    python benchmarks/fuzz_requests.py --replay 4711

A case is a seed. It runs `crosstune plan` with options set by flag, in a YAML file and in the environment, in a process
that is limited to 10 seconds and 2 GB. Each failed case is printed as a line of JSON; the exit code is 1 if a case failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "faults"))

from injection.requests import answer, make_request, problems

LIMIT_S = 10
LIMIT_BYTES = 2 << 30
WARM_UP_S = 180
"""The first request imports torch and probes this machine."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--replay", type=int, help="run one seed, and print its request and its answer")
    own = parser.parse_args()
    if own.replay is not None:
        return _replay(own.replay)
    started, failed, seed = time.monotonic(), 0, own.first
    while seed < own.first + own.cases:
        seed, found = _run_until_failure(seed, own.first + own.cases)
        if found is not None:
            failed += 1
            print(
                json.dumps({"seed": seed - 1, "problem": found, "words": make_request(seed - 1).words}),
                flush=True,
            )
    print(f"{own.cases:,} requests in {time.monotonic() - started:.0f} s: {failed} failed")
    return 1 if failed else 0


def _run_until_failure(seed: int, end: int) -> tuple[int, str | None]:
    """Run the cases from `seed` in a child until one fails; return the next seed and the problem."""
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_run_cases, args=(there, seed, end))
    child.start()
    there.close()
    limit = WARM_UP_S
    try:
        while seed < end:
            if not here.poll(limit):
                if limit == WARM_UP_S:
                    return seed + 1, f"no answer in {limit} s"
                return seed + 1, f"it took more than {limit} s"
            try:
                said = here.recv()
            except EOFError:
                return seed + 1, "the process died"
            if said == "ready":
                limit = LIMIT_S
                continue
            seed += 1
            if said:
                return seed, said
        return seed, None
    finally:
        child.kill()
        child.join()


def _run_cases(there: Connection, seed: int, end: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        warm_up = make_request(0)
        for words in (["plan", "--backend", "cpu"], ["plan", "--backend", "cpu", "--train_type", "qlora"]):
            warm_up.words, warm_up.file, warm_up.environment = words, None, {}
            answer(warm_up, Path(folder))
        _limit_memory()
        there.send("ready")
        for case in range(seed, end):
            request = make_request(case)
            there.send("; ".join(problems(request, answer(request, Path(folder)))))


def _limit_memory() -> None:
    """Allow two gigabytes of address space in addition to the current use; more raises a MemoryError."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _replay(seed: int) -> int:
    request = make_request(seed)
    with tempfile.TemporaryDirectory() as folder:
        said = answer(request, Path(folder))
    print(f"words        {request.words}\nfile         {request.file!r}\nenvironment  {request.environment}")
    print(f"exit code    {said.code}\n{said.error or said.said}")
    found = problems(request, said)
    print(f"problems     {found}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
