"""Train the same adapters over a bf16, an fp8 and an NF4 base, and compare the evaluation losses.

    python benchmarks/lora_bases.py --text texts.txt --bases bf16,fp8 --seeds 42,1,2,3,4,5 --out bases.json
    python benchmarks/lora_bases.py --text texts.txt --model tiny-random --backend cpu --precision fp32 --steps 4

The text file has one text per line; the same lines are held out and the same batches trained in the same order over every
base. Rows are packed. The loss is in nats per token; compare its mean distance from the bf16 base over the seeds: a single
seed says little, since runs that round differently end about 0.007 apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import crosstune

BASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"base_precision": "fp8"},
    "nf4": {"train_type": "qlora"},
    "nf4 in fp8": {"train_type": "qlora", "base_precision": "fp8"},
}
FARTHEST = 0.005
"""How far the loss over an fp8 base may be above that over bf16, in nats per token."""
NUM_LINES = 40_000
HELD_OUT = 2_000


def main() -> None:
    own = read_arguments()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        data = write_lines(own.text, Path(folder))
        for seed in own.seeds:
            for base in own.bases:
                results.append({"base": base, "seed": seed, **train(own, base, seed, data, Path(folder))})
                print(results[-1], flush=True)
                if own.out is not None:
                    own.out.write_text(
                        json.dumps({"command": vars(own), "results": results}, default=str, indent=1)
                    )
    print_table(results)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--bases", type=lambda names: names.split(","), default=list(BASES))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=lambda seeds: [int(seed) for seed in seeds.split(",")], default=[42])
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def write_lines(text: Path, folder: Path) -> dict[str, str]:
    """Write the lines to train on and those to evaluate on, without a line that is in both."""
    lines = list(dict.fromkeys(text.read_text(encoding="utf-8").splitlines()))
    step = max(1, len(lines) // NUM_LINES)
    chosen = lines[::step]
    held_out = min(HELD_OUT, len(chosen) // 10)
    parts = {"eval_dataset": chosen[:held_out], "dataset": chosen[held_out:]}
    found = {}
    for name, part in parts.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": line}) + "\n" for line in part), encoding="utf-8")
        found[name] = str(path)
    return found


def train(
    own: argparse.Namespace, base: str, seed: int, data: dict[str, str], folder: Path
) -> dict[str, Any]:
    options = {
        "model_name": own.model,
        "backend": own.backend,
        "precision": own.precision,
        "train_type": "lora",
        "kernels": "fast",
        "lora_rank": 16,
        "lora_target_modules": "all",
        "packing": True,
        "batch_size": 8,
        "context_length": 512,
        "lr": 2e-4,
        "max_steps": own.steps,
        "num_epochs": 0,
        "eval_samples": HELD_OUT,
        "eval_metric": "loss",
        "num_samples": 0,
        "save_model": False,
        "output_dir": str(folder / "runs"),
        "name": f"{base.replace(' ', '-')}-{seed}",
        "seed": seed,
    }
    run = crosstune.train(progress=False, **options | data | BASES[base])
    summary = run.summary
    return {
        "before": summary["eval_before"]["loss"],
        "after": summary["eval_loss"],
        "final_training_loss": summary["final_loss"],
        "seconds": summary["seconds"],
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the mean losses of each base, and their distance from the bf16 base with the same seeds."""
    losses: dict[str, dict[int, float]] = {}
    for row in rows:
        losses.setdefault(row["base"], {})[row["seed"]] = row["after"]
    exact = losses.get("bf16", {})
    print(f"{'base':12} {'seeds':>5} {'before':>9} {'after':>9} {'to bf16':>9}")
    for base, found in losses.items():
        before = statistics.mean(row["before"] for row in rows if row["base"] == base)
        distances = [loss - exact[seed] for seed, loss in found.items() if seed in exact]
        line = f"{base:12} {len(found):5} {before:9.4f} {statistics.mean(found.values()):9.4f}"
        if distances and base != "bf16":
            line += f" {statistics.mean(distances):+9.4f}"
            if len(distances) > 1:
                line += f" +- {statistics.stdev(distances) / len(distances) ** 0.5:.4f}"
            if base == "fp8" and statistics.mean(distances) > FARTHEST:
                line += "  TOO FAR"
        print(line)


if __name__ == "__main__":
    main()
