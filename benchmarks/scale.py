"""Rehearse a step of 8 to 1,024 GPUs without them, and print what is counted and computed beside what others measured.

    python benchmarks/scale.py table
    python benchmarks/scale.py published

Each row is one `crosstune plan --rehearse` (about a minute); --shapes, --gpus and --strategies choose rows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

MODELS = {
    "8b": "meta-llama/Llama-3.1-8B",
    "70b": "meta-llama/Llama-3.1-70B",
    "405b": "meta-llama/Llama-3.1-405B",
}
COMMON: Mapping[str, Any] = {
    "train_type": "full", "precision": "bf16", "kernels": "general", "context_length": 8192, "max_steps": 100,
}  # fmt: skip
GIB = 2**30
PUBLISHED: Sequence[tuple[str, str, int, str, Mapping[str, Any], int, float | None]] = (
    ("H100, selective recomputation", "8b", 8, "h100-x8", {"batch_size": 2}, 5762, 82.4),
    ("H100, selective recomputation", "8b", 128, "h100-x8", {"batch_size": 2}, 5605, 67.0),
    ("A100, selective recomputation", "8b", 64, "a100-80gb-x8", {"batch_size": 1}, 2973, None),
    (
        "A100, full recomputation", "70b", 64, "a100-80gb-x8",
        {"batch_size": 1, "use_gradient_checkpointing": True}, 331, None,
    ),
)  # fmt: skip
"""torchtitan's FSDP2 without compilation and fp8: conditions, shape, GPUs, our machine, options, tok/s on each GPU and GiB."""


def rehearse(shape: str, gpus: int, machine: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON of the command."""
    words = ["plan", "--rehearse", "--json", "--machine", machine, "--nnodes", str(gpus // 8)]
    for name, value in {"model_name": MODELS[shape], **COMMON, **options}.items():
        words += [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    done = subprocess.run([sys.executable, "-m", "crosstune", *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def sent(counted: Mapping[str, Any], *, across: bool) -> float:
    """Return the GiB of the collectives of a step, as gathered or reduced."""
    found = [each for each in counted["collectives"] if each["across_nodes"] == across]
    return float(sum(each["num_bytes"] * each["times"] for each in found)) / GIB


def table(shapes: Sequence[str], sizes: Sequence[int], strategies: Sequence[str]) -> None:
    print(
        "| shape | GPUs | strategy | memory GiB | collectives | GiB in / across hosts | tok/s a GPU | limit | exposed |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for shape in shapes:
        for strategy in strategies:
            for gpus in sizes:
                options = {
                    "sharding_strategy": strategy, "batch_size": 1, "use_gradient_checkpointing": True
                }  # fmt: skip
                found = rehearse(shape, gpus, "h100-x8", options)
                counted, computed = found["rehearsal"]["counted"], found["rehearsal"]["computed"]
                times = sum(each["times"] for each in counted["collectives"])
                fits = "" if counted["peak"] <= found["usable_bytes"] else " (too much)"
                exposed = computed["exposed_communication_s"] / computed["step_s"]
                print(
                    f"| {shape} | {gpus:,} | {strategy} | {counted['peak'] / GIB:.1f}{fits} | {times} | "
                    f"{sent(counted, across=False):.1f} / {sent(counted, across=True):.1f} | "
                    f"{computed['tokens_per_s'] / gpus:,.0f} | {computed['limited_by']} | {100 * exposed:.0f} % |",
                    flush=True,
                )


def published() -> None:
    print(
        "| | shape | GPUs | measured tok/s a GPU | computed | measured GiB | counted | recomputation here |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for title, shape, gpus, machine, options, speed, memory in PUBLISHED:
        for recompute in (True,) if options.get("use_gradient_checkpointing") else (False, True):
            more = {"sharding_strategy": "full_shard", "use_gradient_checkpointing": recompute}
            found = rehearse(shape, gpus, machine, {**options, **more})
            counted, computed = found["rehearsal"]["counted"], found["rehearsal"]["computed"]
            print(
                f"| {title} | {shape} | {gpus} | {speed:,} | {computed['tokens_per_s'] / gpus:,.0f} | {memory or '-'} | "
                f"{counted['peak'] / GIB:.1f} | {'full' if found['options']['use_gradient_checkpointing'] else 'none'} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("table", "published"))
    parser.add_argument("--shapes", default="8b,70b,405b")
    parser.add_argument("--gpus", default="8,64,256,1024")
    parser.add_argument("--strategies", default="full_shard,hybrid_full_shard")
    asked = parser.parse_args()
    if asked.what == "published":
        published()
    else:
        sizes = [int(each) for each in asked.gpus.split(",")]
        table(asked.shapes.split(","), sizes, asked.strategies.split(","))


if __name__ == "__main__":
    main()
