"""Compare LoRA steps on one GPU: crosstune in each mode, transformers + PEFT (plain, Liger, compiled), Unsloth if installed.

    python benchmarks/lora_gpu.py parity                 # the gate: gradients of each family against PEFT, about 2 minutes
    python benchmarks/lora_gpu.py limit                  # the sustained rate of matrix products
    python benchmarks/lora_gpu.py speed --shape 7b --contenders ours,unsloth --budget 480
    python benchmarks/lora_gpu.py short --shape 7b       # examples of 250 tokens on average: packed against padded
    python benchmarks/lora_gpu.py profile --contenders 'ours bf16'
    python benchmarks/lora_gpu.py speed --shape 1.2b --contenders 'ours full,peft full,liger full'   # all weights
    python benchmarks/lora_gpu.py all --smoke            # the same code with a tiny model on the CPU

Each contender runs in a separate process, in the order A B C C B A with two rounds. No contender starts after --budget
seconds, and each result is written to --out immediately, so that an interrupted run loses nothing. Model
folders with random weights are written once below --models.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lora_runs import Results, alternating_order, describe, print_result, start_worker
from lora_work import SHAPES, write_model

HERE = Path(__file__).resolve()
NEEDS = {"peft": "peft", "liger": "liger_kernel", "compile": "peft", "unsloth": "unsloth"}
PARTS = ("parity", "limit", "speed", "short", "profile", "all")


def main() -> int:
    asked = read_arguments()
    if asked.worker:
        return work(json.loads(asked.worker))
    started = time.monotonic()
    results = Results(Path(asked.out))
    good = True
    parts = PARTS[:-1] if asked.part == "all" else (asked.part,)
    for part in parts:
        if part == "parity":
            good &= show_parity(results, asked)
        elif part == "limit":
            show_limit(results, asked)
        else:
            compare(part, results, asked, started)
    return 0 if good else 1


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS, nargs="?", default="all")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="7b")
    parser.add_argument(
        "--contenders", default="ours,peft,liger,compile,unsloth", help="names, or first words of names"
    )
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8.0, help="time of the timed steps of a contender")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=180.0, help="limit of one contender's process")
    parser.add_argument(
        "--budget", type=float, default=480.0, help="start no contender after this many seconds"
    )
    parser.add_argument("--models", default=str(Path(tempfile.gettempdir()) / "crosstune-bench"))
    parser.add_argument("--out", default="lora_gpu.json")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def compare(part: str, results: Results, asked: argparse.Namespace, started: float) -> None:
    """Run the contenders of a part in turn and print their table."""
    shape = "smoke" if asked.smoke else asked.shape
    folder = write_model(
        Path(asked.models) / shape, SHAPES[shape], dtype="float32" if asked.smoke else "bfloat16"
    )
    names = choose_contenders(asked.contenders, smoke=asked.smoke)
    rows: list[dict[str, Any]] = []
    for name in alternating_order(names, asked.rounds) if part != "profile" else names:
        if time.monotonic() - started > asked.budget:
            print(f"{name}: not started, the budget of {asked.budget:.0f} s is used up")
            continue
        job = {
            "contender": name,
            "part": part,
            "shape": shape,
            "folder": str(folder),
            "rank": asked.rank,
            "seconds": asked.seconds if part != "profile" else 1.0,
            "warmup": asked.warmup,
            "device": "cpu" if asked.smoke else "cuda",
            "precision": "fp32" if asked.smoke else "bf16",
            "launches": part == "profile",
        }
        row = job | start_worker(HERE, job, timeout=asked.timeout)
        results.add(part, row)
        rows.append(row)
        print(describe(row), flush=True)
    print_table(part, rows, results.limit(), asked.rank)


def choose_contenders(asked: str, *, smoke: bool) -> list[str]:
    from lora_contenders import OURS, PEERS

    wanted = [word.strip() for word in asked.split(",")]
    found = [
        name
        for name in (*OURS, *PEERS)
        if any(name == word or name.split()[0] == word for word in wanted)
        and (name.split()[0] not in NEEDS or importlib.util.find_spec(NEEDS[name.split()[0]]))
    ]
    without_gpu = ("liger", "compile", "unsloth")
    return [name for name in found if not (smoke and name.startswith(without_gpu))]


def work(job: dict[str, Any]) -> int:
    if job["part"] == "parity":
        import lora_parity

        print_result({"rows": lora_parity.run(job["device"], smoke=job["smoke"])})
        return 0
    import lora_contenders

    if job["part"] == "limit":
        found = lora_contenders.measure_limit(job["device"], seconds=job["seconds"])
    else:
        found = lora_contenders.run(job)
    print_result(found)
    return 0


def show_parity(results: Results, asked: argparse.Namespace) -> bool:
    job = {"part": "parity", "device": "cpu" if asked.smoke else "cuda", "smoke": asked.smoke}
    found = start_worker(HERE, job, timeout=2 * asked.timeout)
    if "error" in found:
        print(f"parity: {found['error']}")
        return False
    print(
        f"{'family':10} {'base':12} {'rows':8} {'worst cosine':>13} {'PEFT own':>10} {'loss off':>10} {'PEFT own':>10}"
    )
    for row in found["rows"]:
        results.add("parity", row)
        print(
            f"{row['family']:10} {row['base']:12} {'packed' if row['packed'] else 'whole':8} "
            f"{row['worst_cosine']:13.6f} {row['peft_worst_cosine']:10.6f} {row['loss_off']:10.1e} "
            f"{row['peft_loss_off']:10.1e} {'' if row['ok'] else '  TOO FAR'}"
        )
    return all(row["ok"] for row in found["rows"])


def show_limit(results: Results, asked: argparse.Namespace) -> None:
    seconds = 0.2 if asked.smoke else 4.0
    job = {"part": "limit", "device": "cpu" if asked.smoke else "cuda", "seconds": seconds}
    found = start_worker(HERE, job, timeout=asked.timeout)
    results.add("limit", found)
    rates = {name: f"{rate / 1e12:.3g} TFLOP/s" for name, rate in found.items() if name != "error"}
    print(f"sustained: {rates or found}")


def print_table(part: str, rows: list[dict[str, Any]], limit: dict[str, float], rank: int) -> None:
    good = [row for row in rows if "error" not in row]
    best = {
        name: max(r["tok_s"] for r in good if r["contender"] == name)
        for name in {r["contender"] for r in good}
    }
    if not best:
        return
    rival = max((speed for name, speed in best.items() if name.startswith("unsloth")), default=None)
    print(
        f"\n{part}, rank {rank}: {'contender':22} {'tok/s':>9} {'peak GiB':>9} {'of limit':>9} {'to Unsloth':>11} kernels"
    )
    for name, speed in sorted(best.items(), key=lambda item: -item[1]):
        row = next(r for r in good if r["contender"] == name and r["tok_s"] == speed)
        share = ""
        if limit.get("dense"):
            shape = SHAPES[row["shape"]]
            flops = (
                shape.full_flops_per_token() if name.endswith("full") else shape.flops_per_token(rank=rank)
            )
            share = f"{speed * flops / limit['dense']:.2f}"
        peak = f"{row['peak_gib']:.1f}" if row["peak_gib"] is not None else ""
        ratio = f"{speed / rival:.2f}" if rival else ""
        kernels = (row["launches"] or {}).get("kernels", "")
        print(
            f"{'':{len(part) + 8 + len(str(rank))}} {name:22} {speed:9,.0f} {peak:>9} {share:>9} {ratio:>11} {kernels}"
        )


if __name__ == "__main__":
    sys.exit(main())
