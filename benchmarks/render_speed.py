"""Measure what rendering chat templates in a separate process costs: tokenize the same rows with rendering in this
process and with the worker, alternately, and print the ratio of their speeds.

    python benchmarks/render_speed.py --megabytes 64
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from crosstune.data.chat import render_conversation
from crosstune.data.encode import Encoder, RowPlace, _Pass, encode_source
from crosstune.data.formats import to_conversation
from crosstune.data.sources import Source, open_source
from crosstune.data.store import MemoryFiles, StoreWriter
from crosstune.data.tokenizer import Tokenizer
from crosstune.models.tiny import tiny_model

WORDS = [
    "the",
    "a",
    "model",
    "reads",
    "token",
    "after",
    "that",
    "weights",
    "move",
    "loss",
    "falls",
    "answer",
    "is",
    "written",
    "asked",
    "Größe",
    "日本",
    "42",
    "{x:",
    "1}",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3, help="the best of these counts (default 3)")
    parser.add_argument("--model", type=Path, help="a folder with a tokenizer and a chat template")
    own = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = write_rows(Path(folder) / "chats.jsonl", num_bytes=own.megabytes << 20)
        tokenizer = Tokenizer.from_folder(own.model or tiny_model(Path(folder) / "tiny"))
        encoder = Encoder(tokenizer=tokenizer, form="messages", whole=False)
        source = open_source(str(rows))
        ways = {"in this process": encode_here, "in the worker": encode_apart}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(own.repeats):
            for name, encode in ways.items():
                seconds[name].append(measure(encode, source, encoder))
    best = {name: min(times) for name, times in seconds.items()}
    for name, time_s in best.items():
        print(f"{name:<16} {own.megabytes / time_s:6.2f} MB/s  (best of {own.repeats}: {time_s:.2f} s)")
    here, apart = best.values()
    print(f"ratio            {here / apart:.3f}")
    print(f"on {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")


def write_rows(path: Path, *, num_bytes: int) -> Path:
    """Write conversations of one to four turns of each speaker, always the same."""
    rng = random.Random(0)
    written = 0
    with path.open("w", encoding="utf-8") as file:
        while written < num_bytes:
            turns = []
            for _ in range(rng.choice((1, 1, 1, 2, 4))):
                for role, longest in (("user", 60), ("assistant", 200)):
                    text = " ".join(rng.choices(WORDS, k=rng.randint(5, longest)))
                    turns.append({"role": role, "content": text})
            line = json.dumps({"messages": turns}, ensure_ascii=False) + "\n"
            written += len(line.encode())
            file.write(line)
    return path


def measure(
    encode: Callable[[Source, Encoder, StoreWriter], None], source: Source, encoder: Encoder
) -> float:
    writer = StoreWriter(MemoryFiles().files)
    started = time.perf_counter()
    encode(source, encoder, writer)
    return time.perf_counter() - started


def encode_apart(source: Source, encoder: Encoder, writer: StoreWriter) -> None:
    encode_source(source, encoder, writer, limit=-1, progress=None)


def encode_here(source: Source, encoder: Encoder, writer: StoreWriter) -> None:
    """Tokenize as `encode_source` does, but render in this process and without limits."""
    tokens = encoder.tokenizer.chat_tokens
    with ThreadPoolExecutor(max_workers=1) as thread:
        run = _Pass(writer=writer, encoder=encoder, thread=thread)
        for index, (part, found, done_bytes) in enumerate(source.rows()):
            conversation = to_conversation(found.row, encoder.form)
            assert not isinstance(conversation, str)
            run.take(
                RowPlace(part, found.number, index, done_bytes),
                render_conversation(conversation, tokens, whole=False),
            )
        run.flush()
        run.finish()


if __name__ == "__main__":
    main()
