"""The cost of open pages: the speed of a training with pages of its run open and without, alternating in one run.

    python benchmarks/page_clients.py --pages 50 --phases 4 --phase_s 30

Each page is what a browser sends: a stream of events, and the requests that follow from it. The server's CPU time is the figure that
other programs on the machine do not change.
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

MOST_S = {"jobs": 5.0, "run": 20.0}
"""Seconds between requests of a page: the number of jobs, and the sections of a run that trains."""
PARTS = ("/api/run?run=r", "/api/charts?run=r&smoothing=1", "/api/page?run=r")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=50)
    parser.add_argument("--phases", type=int, default=4, help="phases with pages, and as many without")
    parser.add_argument("--phase_s", type=float, default=30.0)
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
        measured = asyncio.run(_alternate(own, int(found[1]), found[2], server.pid, training.pid, rows))
    _report(own, measured)


async def _alternate(
    own: argparse.Namespace, port: int, token: str, server: int, training: int, rows: Path
) -> list[dict[str, float]]:
    measured = []
    for phase in range(2 * own.phases):
        pages = own.pages if phase % 2 else 0
        received = [0]
        tasks = [asyncio.create_task(_page(port, token, received)) for _ in range(pages)]
        await asyncio.sleep(5.0)  # the pages open
        before = _state(server, training, rows)
        received[0] = 0
        await asyncio.sleep(own.phase_s)
        after = _state(server, training, rows)
        assert not pages or received[0], "the pages received nothing"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        change = {key: after[key] - before[key] for key in after}
        measured.append(change | {"pages": pages, "events": received[0]})
        row = measured[-1]
        print(f"{pages:3} pages  {row['tokens'] / row['time']:8.0f} tok/s  {row['tokens'] / row['training']:8.0f} tok/CPU s  "
              f"server {100 * row['server'] / row['time']:5.2f} % of a core  {row['events']} events", flush=True)  # fmt: skip
    return measured


def _state(server: int, training: int, rows: Path) -> dict[str, float]:
    cpu = {
        name: sum(psutil.Process(pid).cpu_times()[:2])
        for name, pid in (("server", server), ("training", training))
    }
    found = [json.loads(line) for line in rows.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    return cpu | {
        "time": time.monotonic(),
        "tokens": float(sum(row["tokens"] for row in found)),
        "steps": float(len(found)),
    }


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
    def middle(pages: bool, over: str) -> float:
        return statistics.median(row["tokens"] / row[over] for row in measured if bool(row["pages"]) == pages)

    busy = statistics.median(row["server"] / row["time"] for row in measured if row["pages"])
    cores = os.cpu_count() or 1
    print(f"\n{own.pages} pages against none, {own.phases} phases of {own.phase_s:.0f} s each, {cores} cores")
    print(f"tokens/s              {middle(True, 'time') / middle(False, 'time') - 1:+.1%}")
    print(f"tokens per CPU second {middle(True, 'training') / middle(False, 'training') - 1:+.1%}")
    print(f"server                {busy:.2%} of a core, {busy / cores:.2%} of this machine")


if __name__ == "__main__":
    main()
