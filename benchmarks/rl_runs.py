"""Train the bundled example of reinforcement learning with several seeds: rewards on held-out prompts before and after.

    python benchmarks/rl_runs.py --seeds 0,1,2 --together 3                 # examples/rl.yaml on a GPU
    python benchmarks/rl_runs.py --seeds 0 -- --max_steps 20 --num_samples 0
    python benchmarks/rl_runs.py --smoke                                    # the same code with a tiny model on a CPU

Options after `--` are passed to `crosstune train`. The interval of a run is that of its mean over the held-out prompts; the last line
has the mean of the seeds and the interval from their spread. `sampler` is the largest of the steps' mean differences between
the log probabilities of the generator and those of the training pass.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""Number of seeds -> factor of a 95 % interval of Student's t distribution."""
SMOKE = (
    "--model_name",
    "tiny-random",
    "--backend",
    "cpu",
    "--max_steps",
    "2",
    "--batch_size",
    "2",
    "--eval_samples",
    "4",
)
PHASES = ("generate", "reward", "train")


def main() -> int:
    asked = read_arguments()
    seeds = [int(word) for word in asked.seeds.split(",")]
    options = [*(SMOKE if asked.smoke else ()), *asked.options]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(asked.together) as pool:
        home = asked.runs or Path(scratch)
        rows = list(pool.map(lambda seed: run(asked.config, seed, home, options), seeds))
    print(
        f"{'seed':>4} {'before':>22} {'after':>22} {'training':>16} {'entropy':>16} {'sampler':>9} {'seconds':>8}  by phase"
    )
    for row in rows:
        print(row["error"] if "error" in row else line_of(row))
    if asked.out is not None:
        asked.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    good = [row for row in rows if "error" not in row]
    if len(good) > 1:
        print(
            f"{'all':>4} {over_seeds([row['before'][0] for row in good]):>22} {over_seeds([row['after'][0] for row in good]):>22}"
        )
    return 0 if len(good) == len(rows) else 1


def run(config: str, seed: int, home: Path, options: list[str]) -> dict[str, Any]:
    """Train in a process of its own, and return its rewards."""
    folder = home / f"seed-{seed}"
    command = [
        sys.executable, "-m", "crosstune", "train", "--config", config, "--seed", str(seed), "--output_dir", str(home),
        "--name", folder.name, "--log_to", "stdout", *options,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"seed": seed, "error": f"seed {seed}: {(done.stderr or done.stdout).strip()[-1500:]}"}
    steps, events = (
        [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]
        for name in ("metrics.jsonl", "events.jsonl")
    )
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    evaluations = [event for event in events if event["kind"] == "evaluation"]
    first, last = evaluations[0], evaluations[-1]
    return {
        "seed": seed,
        "steps": len(steps),
        "before": reward_of(first),
        "after": reward_of(last),
        "training": (steps[0]["reward"], statistics.fmean(step["reward"] for step in steps[-5:])),
        "rewards": [step["reward"] for step in steps],
        "evaluations": [(event["step"], *reward_of(event)) for event in evaluations],
        "entropy": (steps[0]["entropy"], steps[-1]["entropy"]),
        "sampler": max(step["sampling/sampling_logp_difference/mean"] for step in steps),
        "seconds": summary["seconds"],
        "phases": {name: sum(step[f"time/{name}_s"] for step in steps) for name in PHASES},
        "samples": [(each["prompt"], each["answer"]) for each in (last.get("samples") or [])[:3]],
        "warnings": [event["message"] for event in events if event["kind"] == "warning"],
    }


def reward_of(event: dict[str, Any]) -> tuple[float, float, float]:
    """Return the mean reward of an evaluation with its interval."""
    low, high = (event.get("intervals") or {}).get("reward", (math.nan, math.nan))
    return event["metrics"]["reward"], low, high


def line_of(row: dict[str, Any]) -> str:
    before, after = ("{:.3f} [{:.3f}, {:.3f}]".format(*row[name]) for name in ("before", "after"))
    training, entropy = ("{:.3f} -> {:.3f}".format(*row[name]) for name in ("training", "entropy"))
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in row["phases"].items())
    return f"{row['seed']:>4} {before:>22} {after:>22} {training:>16} {entropy:>16} {row['sampler']:9.2e} {row['seconds']:8.1f}  {phases}"


def over_seeds(values: list[float]) -> str:
    mean = statistics.fmean(values)
    half = T95.get(len(values), 1.96) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:.3f} [{mean - half:.3f}, {mean + half:.3f}]"


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="examples/rl.yaml")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--together", type=int, default=1, help="runs at the same time")
    parser.add_argument("--runs", type=Path, help="folder that keeps the runs")
    parser.add_argument("--out", type=Path, help="JSON file with the rewards of every step")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, two steps")
    parser.add_argument("options", nargs="*", help="of crosstune train, after --")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
