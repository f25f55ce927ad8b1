"""Compare LoRA steps on a CPU: crosstune in each mode with transformers + PEFT, plain and compiled; and `make demo` with
the code of an earlier commit.

    python benchmarks/lora_cpu.py speed                     # SmolLM2-135M's shape, 4 rows of 256 tokens
    python benchmarks/lora_cpu.py speed --contenders ours,peft --threads 2 --rounds 2
    python benchmarks/lora_cpu.py demo --before ../earlier  # a checkout of the code to compare with
    python benchmarks/lora_cpu.py speed --smoke             # the same code with a tiny model

Each contender runs in a separate process, in the order A B C C B A with two rounds, with the same number of threads. The
losses of the first step are compared first. The limit is the rate of matmuls of the model's own shapes, measured in
the same run. On a busy machine, compare the CPU time of a step, with one thread. bf16 is omitted if the CPU lacks fast bf16 matmuls; --all includes it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lora_runs import Results, alternating_order, describe, print_result, start_worker
from lora_work import SHAPES, Shape, write_model

HERE = Path(__file__).resolve()
PRECISIONS = {"fp32": "fp32", "autocast": "bf16_autocast", "bf16": "bf16"}
FARTHEST = {"fp32": 1e-5, "bf16_autocast": 2e-3, "bf16": 2e-3}
"""How far the loss of a first step may be from that of PEFT in the same precision, relative to it."""
DEMO = ("--max_steps", "40", "--lr", "1e-3", "--eval_samples", "48", "--eval_steps", "20")


def main() -> int:
    asked = read_arguments()
    if asked.worker:
        return work(json.loads(asked.worker))
    os.environ["OMP_NUM_THREADS"] = str(asked.threads)
    results = Results(Path(asked.out))
    return compare_demos(results, asked) if asked.part == "demo" else compare_speed(results, asked)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("speed", "demo"), nargs="?", default="speed")
    parser.add_argument("--contenders", default="ours,peft,compile", help="names, or first words of names")
    parser.add_argument("--all", action="store_true", help="bf16 too, however slow")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=30.0, help="time of the timed steps of a contender")
    parser.add_argument("--timeout", type=float, default=600.0, help="limit of one contender's process")
    parser.add_argument("--models", default=str(Path(tempfile.gettempdir()) / "crosstune-bench"))
    parser.add_argument("--before", help="demo: the folder of a checkout of the code to compare with")
    parser.add_argument("--out", default="lora_cpu.json")
    parser.add_argument("--smoke", action="store_true", help="a tiny model")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def work(job: dict[str, Any]) -> int:
    import lora_contenders

    if job["part"] == "limit":
        print_result(lora_contenders.measure_cpu_limit(SHAPES[job["shape"]], seconds=job["seconds"]))
    else:
        print_result(lora_contenders.run(job))
    return 0


def compare_speed(results: Results, asked: argparse.Namespace) -> int:
    shape = "smoke" if asked.smoke else "135m"
    folder = write_model(Path(asked.models) / f"{shape}-fp32", SHAPES[shape], dtype="float32")
    limit = start_worker(
        HERE, {"part": "limit", "shape": shape, "seconds": 0.2 if asked.smoke else 2.0}, timeout=asked.timeout
    )
    results.add("limit", limit)
    print(f"matrix products of the model's shapes: {describe_limit(limit)}", flush=True)
    names = choose_contenders(asked.contenders, bf16=asked.all or has_fast_bf16(limit))
    rows = []
    for name in alternating_order(names, asked.rounds):
        job = {
            "contender": name,
            "part": "speed",
            "shape": shape,
            "folder": str(folder),
            "rank": asked.rank,
            "seconds": 1.0 if asked.smoke else asked.seconds,
            "warmup": 1,
            "device": "cpu",
            "precision": PRECISIONS[name.split()[1]],
        }
        row = job | start_worker(HERE, job, timeout=asked.timeout)
        results.add("speed", row)
        rows.append(row)
        print(describe(row), flush=True)
    good = [row for row in rows if "error" not in row]
    print_table(good, limit, SHAPES[shape], asked)
    return 0 if len(good) == len(rows) and losses_agree(good) else 1


def choose_contenders(asked: str, *, bf16: bool) -> list[str]:
    from lora_contenders import OURS_ON_CPU, PEERS_ON_CPU

    wanted = [word.strip() for word in asked.split(",")]
    has_peft = importlib.util.find_spec("peft") is not None
    return [
        name
        for name in (*OURS_ON_CPU, *PEERS_ON_CPU)
        if (name in wanted or name.split()[0] in wanted)
        and (bf16 or name.split()[1] == "fp32")
        and (name.startswith("ours") or has_peft)
    ]


def has_fast_bf16(limit: dict[str, Any]) -> bool:
    return bool(limit.get("bf16", 0.0) > limit.get("fp32", 0.0))


def describe_limit(limit: dict[str, Any]) -> str:
    if "error" in limit:
        return str(limit["error"])
    return ", ".join(f"{rate / 1e9:.0f} GFLOP/s in {name}" for name, rate in limit.items())


def losses_agree(rows: list[dict[str, Any]]) -> bool:
    """Return whether the first loss of each of our contenders equals PEFT's in the same precision."""
    peers = {row["precision"]: row["first_loss"] for row in rows if row["contender"].startswith("peft")}
    good = True
    for row in rows:
        wanted = peers.get(row["precision"])
        if wanted is None or not row["contender"].startswith("ours"):
            continue
        off = abs(row["first_loss"] - wanted) / wanted
        if off > FARTHEST[row["precision"]]:
            print(f"{row['contender']}: the first loss is off by {off:.1e}: {row['first_loss']} and {wanted}")
            good = False
    return good


def print_table(
    rows: list[dict[str, Any]], limit: dict[str, Any], shape: Shape, asked: argparse.Namespace
) -> None:
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["contender"] not in best or row["tok_s"] > best[row["contender"]]["tok_s"]:
            best[row["contender"]] = row
    rival = max((row["tok_s"] for name, row in best.items() if not name.startswith("ours")), default=None)
    print(
        f"\n{shape.rows} x {shape.context} tokens, rank {asked.rank}, {asked.threads} threads\n"
        f"{'contender':22} {'tok/s':>8} {'peak GiB':>9} {'of limit':>9} {'to the best peer':>17} {'CPU s':>7}"
    )
    for name, row in sorted(best.items(), key=lambda item: -item[1]["tok_s"]):
        rate = limit.get("fp32" if row["precision"] == "fp32" else "bf16")
        share = f"{row['tok_s'] * shape.flops_per_token(rank=asked.rank) / rate:.2f}" if rate else ""
        ratio = f"{row['tok_s'] / rival:.2f}" if rival else ""
        print(
            f"{name:22} {row['tok_s']:8,.1f} {row['peak_gib']:9.2f} {share:>9} {ratio:>17} {row['round_cpu_s']:7.2f}"
        )


def compare_demos(results: Results, asked: argparse.Namespace) -> int:
    """Run the command of `make demo` in turn with this code and with another checkout."""
    if not asked.before:
        print("demo: name the checkout to compare with: --before FOLDER", file=sys.stderr)
        return 2
    sources = {"now": HERE.parents[1] / "src", "before": Path(asked.before).resolve() / "src"}
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    times: dict[str, list[float]] = {name: [] for name in sources}
    for name in alternating_order(list(sources), asked.rounds):
        with tempfile.TemporaryDirectory() as folder:
            words = [sys.executable, "-m", "crosstune", "train", "--name", "demo", *DEMO]
            words += ["--model_name", "tiny-random"] if asked.smoke else []
            started = time.perf_counter()
            done = subprocess.run(
                words,
                cwd=folder,
                env=os.environ | {"PYTHONPATH": os.pathsep.join([str(sources[name]), *paths])},
                capture_output=True,
                text=True,
                check=False,
            )
            took_s = time.perf_counter() - started
        if done.returncode:
            print(f"{name}: exit code {done.returncode}: {(done.stderr or done.stdout)[-1500:]}")
            return 1
        times[name].append(took_s)
        results.add("demo", {"code": name, "seconds": took_s, "said": (done.stderr or done.stdout)[-2000:]})
        print(f"{name}: {took_s:.1f} s", flush=True)
    best = {name: min(found) for name, found in times.items()}
    print(f"best of {asked.rounds}: now {best['now']:.1f} s, before {best['before']:.1f} s: "
          f"{best['now'] / best['before']:.2f} of its time")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
