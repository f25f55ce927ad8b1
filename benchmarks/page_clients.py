"""The cost of open pages: the speed of a training with pages of its run open and without, in short phases that alternate.

    python benchmarks/page_clients.py --pages 50 --pairs 12 --phase_s 8

Each page is what a browser sends: a stream of events, and the requests that follow from it. The CPU time of a step and of the server
change little with other programs on the machine; tokens/s do.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

MOST_S = {"jobs": 5.0, "run": 10.0}
"""Seconds between requests of a page: the number of jobs, and the sections of a run that trains."""
PARTS = ("/api/run?run=r", "/api/charts?run=r&smoothing=1", "/api/page?run=r")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=50)
    parser.add_argument("--pairs", type=int, default=12, help="pairs of a phase with pages and one without")
    parser.add_argument("--phase_s", type=float, default=8.0)
    parser.add_argument("--settle_s", type=float, default=4.0, help="seconds before each phase")
    own = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        runs, environment = Path(folder, "runs"), {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "crosstune"]
        train = "train --model_name tiny-random --max_steps 1000000 --skip_eval --name r --backend cpu --num_epochs 100000"
        words = [*command, *train.split(), "--output_dir", str(runs)]
        training = subprocess.Popen(
            words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        stack.callback(training.kill)
        rows = runs / "r" / "metrics.jsonl"
        while not rows.exists() or rows.stat().st_size < 20_000:
            assert training.poll() is None, "the training ended"
            time.sleep(0.5)
        words = [*command, "ui", "--output_dir", str(runs), "--port", "0", "--no_browser"]
        server = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
        stack.callback(server.kill)
        assert server.stdout is not None
        found = re.search(r":(\d+)/\?token=(\S+)", server.stdout.readline())
        assert found is not None
        measured = asyncio.run(_alternate(own, int(found[1]), found[2], server.pid, rows))
    _report(own, measured)


async def _alternate(
    own: argparse.Namespace, port: int, token: str, server: int, rows: Path
) -> list[dict[str, float]]:
    """Measure pairs of phases, without pages and with them, every other pair in the reverse order: a change of the machine's
    load over time then counts on both sides."""
    measured = []
    for number in range(own.pairs):
        order = (0, own.pages) if number % 2 == 0 else (own.pages, 0)
        for pages in order:
            received = [0]
            tasks = [asyncio.create_task(_page(port, token, received)) for _ in range(pages)]
            await asyncio.sleep(own.settle_s)  # the pages open
            assert not pages or received[0], "the pages received nothing"
            found = await _measure(own.phase_s, server, rows)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            measured.append(found | {"pages": pages, "pair": number})
            print(f"{pages:3} pages  {found['tokens_per_s']:8.0f} tok/s  {1e3 * found['cpu_s']:8.3f} CPU ms a step  "
                  f"server {100 * found['server']:5.2f} % of a core", flush=True)  # fmt: skip
    return measured


async def _measure(seconds: float, server: int, rows: Path) -> dict[str, float]:
    """Return the speed of the training, the median CPU time of its steps, and the server's share of a core."""
    size, began, used = rows.stat().st_size, time.monotonic(), _cpu_s(server)
    await asyncio.sleep(seconds)
    passed, used = time.monotonic() - began, _cpu_s(server) - used
    with rows.open("rb") as file:
        file.seek(size)
        lines = file.read().split(b"\n")[1:-1]  # the first and the last may be parts
    found = [json.loads(line) for line in lines]
    return {
        "tokens_per_s": sum(row["tokens"] for row in found) / passed,
        "cpu_s": statistics.median(row["cpu_s"] for row in found),
        "server": used / passed,
    }


def _cpu_s(process: int) -> float:
    return sum(psutil.Process(process).cpu_times()[:2])


async def _page(port: int, token: str, received: list[int]) -> None:
    import hashlib

    cookie = f"crosstune_{hashlib.sha256(token.encode()).hexdigest()[:8]}={token}"
    head = f"Host: 127.0.0.1:{port}\r\nCookie: {cookie}\r\n"
    position = json.loads(await _get(port, head, PARTS[1], {}))["position"]

    async def stream() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        try:
            writer.write(f"GET /api/events?run=r&after={position} HTTP/1.1\r\n{head}\r\n".encode())
            while line := await reader.readline():
                received[0] += line.startswith(b"data:")
        finally:
            writer.close()

    async def ask(paths: tuple[str, ...], every_s: float) -> None:
        tags: dict[str, str] = {}
        while True:
            for path in paths:
                await _get(port, head, path, tags)
            await asyncio.sleep(every_s)

    await asyncio.gather(stream(), ask(("/api/jobs",), MOST_S["jobs"]), ask(PARTS, MOST_S["run"]))


async def _get(port: int, head: str, path: str, tags: dict[str, str]) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        tag = f"If-None-Match: {tags[path]}\r\n" if path in tags else ""
        writer.write(f"GET {path} HTTP/1.1\r\n{head}{tag}Connection: close\r\n\r\n".encode())
        answer = await reader.read()
    finally:
        writer.close()
    header, _, body = answer.partition(b"\r\n\r\n")
    if found := re.search(rb"(?i)etag: (\S+)", header):
        tags[path] = found[1].decode()
    return body


def _report(own: argparse.Namespace, measured: list[dict[str, float]]) -> None:
    print(
        f"\n{own.pages} pages against none, {own.pairs} pairs of phases of {own.phase_s:.0f} s, {os.cpu_count()} cores"
    )
    for key, title in (("tokens_per_s", "tokens/s"), ("cpu_s", "CPU time of a step")):
        pairs = [[row for row in measured if row["pair"] == number] for number in range(own.pairs)]
        changes = sorted(
            next(row[key] for row in pair if row["pages"])
            / next(row[key] for row in pair if not row["pages"])
            - 1
            for pair in pairs
        )
        quarter = len(changes) // 4
        print(
            f"{title:<20} {statistics.median(changes):+.1%}, the middle half of the pairs {changes[quarter]:+.1%} to {changes[-1 - quarter]:+.1%}"
        )
    busy = statistics.median(row["server"] for row in measured if row["pages"])
    print(f"{'server':<20} {busy:.2%} of a core")


if __name__ == "__main__":
    main()
