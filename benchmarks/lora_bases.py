"""Train the same adapters over a bf16, an fp8 and an NF4 base, and compare the evaluation losses.

    python benchmarks/lora_bases.py --text texts.txt --backend cuda --out bases.json
    python benchmarks/lora_bases.py --text texts.txt --bases fp8,nf4 --out bases.json
    python benchmarks/lora_bases.py --text texts.txt --model tiny-random --backend cpu --precision fp32 --steps 4

The text file has one text per line; the same lines are held out and the same batches trained in the same order over every
base. Rows are packed. The loss is in nats per token; what counts is its distance from that over the bf16 base.
"""

from __future__ import annotations

import argparse
import json
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
        for base in own.bases.split(","):
            results.append({"base": base, **train(own, base, data, Path(folder))})
            print(results[-1], flush=True)
            if own.out is not None:
                own.out.write_text(
                    json.dumps({"command": vars(own), "results": results}, default=str, indent=1)
                )
    print_table({row["base"]: row for row in results})


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--bases", default=",".join(BASES))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--seed", type=int, help="losses of equal runs differ by about 0.005: compare several seeds"
    )
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


def train(own: argparse.Namespace, base: str, data: dict[str, str], folder: Path) -> dict[str, Any]:
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
        "name": base.replace(" ", "-"),
    }
    if own.seed is not None:
        options["seed"] = own.seed
    run = crosstune.train(progress=False, **options | data | BASES[base])
    summary = run.summary
    return {
        "before": summary["eval_before"]["loss"],
        "after": summary["eval_loss"],
        "final_training_loss": summary["final_loss"],
        "seconds": summary["seconds"],
    }


def print_table(rows: dict[str, dict[str, Any]]) -> None:
    exact = rows.get("bf16")
    print(f"{'base':12} {'before':>9} {'after':>9} {'to bf16':>9}")
    for base, row in rows.items():
        far = row["after"] - exact["after"] if exact is not None else float("nan")
        note = "  TOO FAR" if "fp8" in base and "nf4" not in base and far > FARTHEST else ""
        print(f"{base:12} {row['before']:9.4f} {row['after']:9.4f} {far:+9.4f}{note}")


if __name__ == "__main__":
    main()
