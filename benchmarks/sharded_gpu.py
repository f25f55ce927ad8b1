"""Compare QLoRA of a 7B model shape in FSDP2 over NCCL with the plain training of one process, on one GPU.

    python benchmarks/sharded_gpu.py [--layers 32] [--steps 8] [--offload]

The weights are random, written once in bf16. Each side runs in a separate process and prints tokens/s and the peak of the
GPU's memory; the losses of both must be the same. `--offload` adds FSDP2 with parameters and activations on the host.
"""

from __future__ import annotations

import argparse
import json
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from crosstune.files.json_files import read_json, read_jsonl, write_json
from crosstune.models.llama_layout import Llama
from crosstune.models.tiny import TINY, tiny_model

GIB = 2**30
ROWS, CONTEXT = 4, 2048
SHAPE = {"vocab": 32000, "hidden": 4096, "intermediate": 11008, "num_heads": 32, "num_kv_heads": 32}


def write_model(folder: Path, layers: int) -> Path:
    """Write a model folder with random bf16 weights; all tensors are slices of one block of random numbers."""
    tiny_model(folder)
    llama: Llama = replace(TINY, **SHAPE, num_layers=layers, head_dim=128, dtype="bfloat16", max_context=4096)
    write_json(folder / "config.json", llama.config())
    shapes = llama.tensor_shapes()
    largest = max(int(np.prod(shape)) for shape in shapes.values())
    drawn = np.random.default_rng(0).standard_normal(2**22, dtype=np.float32) * np.float32(0.02)
    block = np.resize((drawn.view(np.uint32) >> 16).astype(np.uint16), largest + 2**16)
    entries: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * int(np.prod(shape))
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for number, (name, shape) in enumerate(shapes.items()):
            count = int(np.prod(shape))
            ones = np.full(count, 0x3F80, np.uint16)  # 1.0
            first = 37 * number % 2**16
            file.write((ones if name.endswith("norm.weight") else block[first : first + count]).tobytes())
    return folder


def options(folder: Path, name: str, steps: int, more: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "backend": "cuda",
        "model_name": str(folder / "model"),
        "dataset": str(folder / "rows.jsonl"),
        "output_dir": str(folder),
        "name": name,
        "precision": "bf16",
        "train_type": "qlora",
        "quantization_backend": "bnb",
        "batch_size": ROWS,
        "context_length": CONTEXT,
        "truncation": "split",
        "use_gradient_checkpointing": True,
        "max_steps": steps,
        "skip_eval": True,
        "save_model": False,
        "save_minutes": 0,
    } | dict(more)


def train_here(asked: Mapping[str, Any], *, sharded: bool) -> None:
    from crosstune.config.load import make_config
    from crosstune.process.ranks import Limits, Ranks
    from crosstune.runs.pipeline import train
    from crosstune.torch_engine.group import connect

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = Ranks(engine="torch", master_addr="127.0.0.1", master_port=port, serves_store=True)
    train(make_config(**asked), group=connect(ranks, Limits()) if sharded else None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--folder", type=Path, help="keep the model and the runs there")
    parser.add_argument("--run", help="options of one run as JSON (used by the program itself)")
    parser.add_argument("--sharded", action="store_true")
    asked = parser.parse_args()
    if asked.run is not None:
        train_here(json.loads(asked.run), sharded=asked.sharded)
        return
    with tempfile.TemporaryDirectory() as place:
        folder = asked.folder or Path(place)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "model").exists():
            write_model(folder / "model", asked.layers)
        text = " ".join(f"{n} and {n + 1} make {2 * n + 1}." for n in range(40000))
        (folder / "rows.jsonl").write_text(json.dumps({"text": text}) + "\n")
        offloading = {"use_cpu_offload": True, "use_activation_cpu_offload": True}
        sides: dict[str, tuple[bool, dict[str, Any]]] = {"plain": (False, {}), "fsdp2": (True, {})}
        sides |= {"fsdp2-offloaded": (True, offloading)} if asked.offload else {}
        for name, (sharded, more) in sides.items():
            run = json.dumps(options(folder, name, asked.steps, more))
            words = [sys.executable, __file__, "--run", run, *(["--sharded"] if sharded else [])]
            subprocess.run(words, check=True)
            summary = read_json(folder / name / "summary.json")
            losses = [row["loss"] for row in read_jsonl(folder / name / "metrics.jsonl")]
            print(
                f"{name:<16} {summary['tokens_per_s']:>9,.0f} tokens/s  "
                f"{summary['peak_memory_bytes'] / GIB:>6.1f} GiB  losses {losses[0]:.6f} ... {losses[-1]:.6f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
