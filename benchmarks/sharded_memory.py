"""Measure the peak memory of each process of a full fine-tune, sharded over 1, 2 and 4 processes on this CPU.

    python benchmarks/sharded_memory.py [--hidden 512] [--layers 12] [--worlds 1,2,4] [--train_type full]

Every rank is a separate process. Its peak is the kernel's VmHWM, minus VmHWM of the same program with a model of a few
thousand parameters (Python, torch and the libraries). Loading and training are measured separately, since VmHWM can be reset.
World 1 is the plain training of one process, without FSDP2.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MIB = 2**20
STEPS = 3


def peak_bytes(*, reset: bool = False) -> int:
    """Return the peak resident memory of this process, and start a new measurement if `reset`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("VmHWM:")]
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return int(line.split()[1]) * 1024


def train_rank(folder: Path, model: Path, rank: int, size: int, port: int, train_type: str) -> None:
    """Train as one rank and write down its peaks. Hooks the session's opening, since only rank 0 has observers."""
    from crosstune.config.load import make_config
    from crosstune.process.ranks import Limits, Ranks
    from crosstune.runs import execute
    from crosstune.runs.pipeline import train
    from crosstune.torch_engine.group import connect

    found: dict[str, int] = {}

    class Measured(execute.Execution):
        def _load(self) -> Any:
            peak_bytes(reset=True)
            session = super()._load()
            found["loading"] = peak_bytes(reset=True)
            return session

    import crosstune.runs.pipeline as runs

    runs.Execution = Measured  # type: ignore[misc]
    ranks = Ranks(
        engine="torch",
        rank=rank,
        size=size,
        local_rank=rank,
        local_size=size,
        master_addr="127.0.0.1",
        master_port=port,
        serves_store=rank == 0,
    )
    group = connect(ranks, Limits(connect_s=120)) if size > 1 else None
    config = make_config(
        backend="cpu",
        precision="fp32",
        model_name=str(model),
        dataset=str(folder / "rows.jsonl"),
        train_type=train_type,
        batch_size=1,
        gradient_accumulation_steps=4 // size,
        world_size=size,
        max_steps=STEPS,
        context_length=32,
        skip_eval=True,
        save_model=False,
        save_minutes=0,
        output_dir=str(folder),
        name=f"{model.name}-{train_type}-{size}",
    )
    train(config, group=group)
    found["training"] = peak_bytes()
    (folder / f"{model.name}-{size}-{rank}.json").write_text(json.dumps(found))


def measure(folder: Path, model: Path, size: int, train_type: str) -> dict[str, int]:
    """Return the largest peaks of the ranks of a run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # One arena, so that freed memory goes back: with many, glibc keeps what other threads have freed.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    words = [sys.executable, __file__, "--rank", "", "--folder", str(folder), "--model", str(model)]
    words += ["--size", str(size), "--port", str(port), "--train_type", train_type]
    processes = []
    for rank in range(size):
        words[3] = str(rank)
        processes.append(subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL))
    codes = [process.wait() for process in processes]
    assert not any(codes), f"ranks ended with {codes}"
    found = [json.loads((folder / f"{model.name}-{size}-{rank}.json").read_text()) for rank in range(size)]
    return {phase: max(peaks[phase] for peaks in found) for phase in ("loading", "training")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--worlds", default="1,2,4")
    parser.add_argument("--train_type", default="full")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--size", type=int)
    parser.add_argument("--port", type=int)
    asked = parser.parse_args()
    if asked.rank is not None:
        train_rank(asked.folder, asked.model, asked.rank, asked.size, asked.port, asked.train_type)
        return
    from crosstune.models.tiny import tiny_model

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        rows = [{"prompt": f"{n} + {n}?", "completion": f" {2 * n}"} for n in range(64)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        shape = {"hidden": asked.hidden, "intermediate": 4 * asked.hidden, "num_layers": asked.layers}
        model = tiny_model(folder / "model", num_heads=8, num_kv_heads=8, **shape)
        baseline = tiny_model(folder / "baseline", hidden=16, intermediate=16, num_heads=2, num_kv_heads=2)
        size_bytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
        print(
            f"{size_bytes / 4 / 1e6:.1f}M parameters, {size_bytes / MIB:.0f} MiB in fp32; {asked.train_type}, {STEPS} steps"
        )
        print(f"{'world':>5} {'loading MiB':>12} {'training MiB':>13} {'of world 1':>22}")
        first: dict[str, float] = {}
        for size in map(int, asked.worlds.split(",")):
            base = measure(folder, baseline, size, asked.train_type)
            peaks = measure(folder, model, size, asked.train_type)
            own = {phase: (peaks[phase] - base[phase]) / MIB for phase in peaks}
            first = first or own
            # Against the peak of the whole run in one process: transformers maps the files there, so loading shows little.
            shares = ", ".join(f"{phase} {own[phase] / max(first.values()):.2f}x" for phase in own)
            print(f"{size:>5} {own['loading']:>12.0f} {own['training']:>13.0f}   {shares}", flush=True)


if __name__ == "__main__":
    main()
