"""Run every method on every kind of base with the bundled model: loss, speed and memory in one table.

    python benchmarks/methods.py --backend cpu --steps 12

Each row is a fresh process of `crosstune train`, so that its peak memory is measured separately. The loss is the training
loss of the last step; all rows use the same data in the same order.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROWS: list[tuple[str, dict[str, Any]]] = [
    ("full", {"train_type": "full", "lr": 5e-5}),
    ("LoRA", {"train_type": "lora"}),
    ("DoRA", {"train_type": "dora"}),
    ("Llama-Pro, 3 new blocks", {"train_type": "llama_pro", "num_new_blocks": 3, "lr": 2e-4}),
    ("LoRA, bnb NF4", {"train_type": "qlora", "quantization_backend": "bnb"}),
    ("LoRA, bnb FP4", {"train_type": "qlora", "quantization_backend": "bnb", "quant_type": "fp4"}),
    ("LoRA, bnb int8", {"train_type": "qlora", "quantization_backend": "bnb", "n_bits": 8}),
    ("LoRA, HQQ 8", {"train_type": "hqq_lora", "n_bits": 8}),
    ("LoRA, HQQ 4", {"train_type": "hqq_lora", "n_bits": 4}),
    ("LoRA, HQQ 3", {"train_type": "hqq_lora", "n_bits": 3}),
    ("LoRA, HQQ 2", {"train_type": "hqq_lora", "n_bits": 2}),
    ("LoRA, HQQ 1", {"train_type": "hqq_lora", "n_bits": 1}),
    ("LoRA, quanto int8", {"train_type": "qlora", "quantization_backend": "quanto", "n_bits": 8}),
    (
        "LoRA, quanto float8",
        {"train_type": "qlora", "quantization_backend": "quanto", "n_bits": 8, "quant_type": "float8"},
    ),
    ("LoRA, quanto int4", {"train_type": "qlora", "quantization_backend": "quanto", "n_bits": 4}),
    ("LoRA, quanto int2", {"train_type": "qlora", "quantization_backend": "quanto", "n_bits": 2}),
    ("DoRA, bnb NF4", {"train_type": "bnb_dora"}),
    ("DoRA, HQQ 4", {"train_type": "hqq_dora"}),
    ("Llama-Pro, bnb NF4", {"train_type": "bnb_llama_pro", "num_new_blocks": 3, "lr": 2e-4}),
    ("Llama-Pro, HQQ 4", {"train_type": "hqq_llama_pro", "num_new_blocks": 3, "lr": 2e-4}),
]


def run_row(options: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        asked = (
            {"lr": 1e-3, "lr_scheduler": "constant"}
            | shared
            | options
            | {"output_dir": folder, "name": "row"}
        )
        words = [f"--{name}={value}" for name, value in asked.items()]
        command = [
            sys.executable,
            "-m",
            "crosstune",
            "train",
            *words,
            "--skip_eval",
            "--save_model=false",
            "--json",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)}\n{done.stderr}")
        plan = json.loads((Path(folder) / "row" / "plan.json").read_text())
        return json.loads(done.stdout) | {"precision": plan["precision"], "machine": plan["machine"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--model_name", default="smollm2-135m")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    own = parser.parse_args()
    shared = {"backend": own.backend, "model_name": own.model_name, "max_steps": own.steps}
    print(
        "| method and base | precision | first loss | last loss | tok/s | peak memory GiB |\n|---|---|---|---|---|---|"
    )
    for name, options in ROWS:
        if own.only.lower() not in name.lower():
            continue
        row = run_row(options, shared)
        print(
            f"| {name} | {row['precision']} | {row['first_loss']:.3f} | {row['final_loss']:.3f} "
            f"| {row['tokens_per_s']:,.0f} | {row['peak_memory_bytes'] / 2**30:.2f} |",
            flush=True,
        )
    machine = row["machine"]
    device = machine["backends"][row["backend"]]["devices"][0]["name"]
    print(f"\n{device}; " + ", ".join(f"{name} {version}" for name, version in machine["versions"].items()))


if __name__ == "__main__":
    main()
