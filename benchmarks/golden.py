"""Record the numbers of small training runs, or compare them bit for bit with an earlier record.

Use it to check a refactoring that must not change the numbers: record at the commit before, compare after.

    python benchmarks/golden.py record golden.json
    python benchmarks/golden.py compare golden.json            # exits 1 when one bit differs

Each case is the command `crosstune train` on a tiny model: losses, gradient norms and learning rates of every step,
evaluation losses and the bytes of the result. The numbers are valid for one machine and one set of libraries.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

COMMON = "--max_steps 6 --batch_size 2 --lr 1e-3 --eval_samples 4 --num_samples 1 --max_new_tokens 8 --save_steps 3 --lora_rank 4"
TORCH = f"{COMMON} --backend cpu"
MLX = f"{COMMON} --backend mlx --precision fp32"
CASES = {
    "torch-lora": f"{TORCH} --precision fp32",
    "torch-lora-bf16_autocast": f"{TORCH} --precision bf16_autocast",
    "torch-lora-bf16": f"{TORCH} --precision bf16",
    "torch-dora": f"{TORCH} --precision fp32 --train_type dora",
    "torch-qlora": f"{TORCH} --precision fp32 --train_type qlora --quantization_backend bnb",
    "torch-qlora-bf16_autocast": f"{TORCH} --precision bf16_autocast --train_type qlora --quantization_backend bnb",
    "torch-hqq": f"{TORCH} --precision fp32 --train_type hqq_lora",
    "torch-quanto": f"{TORCH} --precision fp32 --train_type qlora --quantization_backend quanto",
    "torch-full": f"{TORCH} --precision fp32 --train_type full",
    "torch-full-bf16_autocast": f"{TORCH} --precision bf16_autocast --train_type full",
    "torch-llama_pro": f"{TORCH} --precision fp32 --train_type llama_pro",
    "torch-packed": f"{TORCH} --precision fp32 --packing --context_length 256",
    "torch-dropout": f"{TORCH} --precision fp32 --lora_dropout 0.2",
    "torch-accumulation": f"{TORCH} --precision fp32 --gradient_accumulation_steps 3",
    "torch-checkpointing": f"{TORCH} --precision fp32 --use_gradient_checkpointing --lora_dropout 0.1",
    "torch-8bit": f"{TORCH} --precision fp32 --optimizer adamw_8bit",
    "mlx-lora": MLX,
    "mlx-full": f"{MLX} --train_type full",
    "mlx-qlora": f"{MLX} --train_type qlora --group_size 32",
    "mlx-packed": f"{MLX} --packing --context_length 256",
    "mlx-dropout": f"{MLX} --lora_dropout 0.2 --gradient_accumulation_steps 2",
    "mlx-two-processes": f"{MLX} --world_size 2",
}
CUDA_CASES = {
    "cuda-lora-bf16": f"{COMMON} --backend cuda --precision bf16",
    "cuda-qlora-bf16": f"{COMMON} --backend cuda --precision bf16 --train_type qlora --quantization_backend bnb",
    "cuda-fp8": f"{COMMON} --backend cuda --precision bf16 --kernels fast --base_precision fp8 --fp8_tolerance 0",
}
NUMBERS = ("step", "loss", "grad_norm", "lr", "tokens", "supervised_tokens")


def crosstune(arguments: str, *, home: Path) -> None:
    environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "crosstune", *arguments.split()]
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def read_run(folder: Path) -> dict[str, Any]:
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    result = Path(summary["result"])
    tensors = sorted(result.rglob("*.safetensors"))
    return {
        "steps": [{name: row[name] for name in NUMBERS} for row in steps],
        "eval": [(summary["eval_before"] or {}).get("loss"), (summary["eval_after"] or {}).get("loss")],
        "result": {str(path.relative_to(result)): hash_tensors(path) for path in tensors},
    }


def hash_tensors(path: Path) -> str:
    """Hash names, dtypes and values, independent of the order in the file and of its metadata."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header, digest = json.loads(raw[8 : 8 + size]), hashlib.sha256()
    for name in sorted(set(header) - {"__metadata__"}):
        entry = header[name]
        start, end = entry["data_offsets"]
        digest.update(f"{name} {entry['dtype']} {entry['shape']}".encode())
        digest.update(raw[8 + size + start : 8 + size + end])
    return digest.hexdigest()


def run_case(name: str, arguments: str, *, model: Path, home: Path) -> dict[str, Any]:
    crosstune(f"train --model_name {model} --output_dir {home} --name {name} {arguments}", home=home)
    return read_run(home / name)


def resume_case(name: str, arguments: str, *, model: Path, home: Path, then: str = "") -> dict[str, Any]:
    """Take three steps in one process and the others in a second process, possibly on a different backend."""
    first = f"train --model_name {model} --output_dir {home} --name {name} {arguments} --time_limit 0"
    crosstune(first.replace(" --time_limit 0", ""), home=home)
    (home / name / "checkpoints" / "latest").unlink()
    step = home / name / "checkpoints" / "step-00000003"
    crosstune(f"train --resume {step} --output_dir {home} --name {name}-resumed {then}", home=home)
    return read_run(home / f"{name}-resumed")


def record(cases: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        model = home / "models" / "tiny"
        make = "import sys; from pathlib import Path; from crosstune.models.tiny import tiny_model; tiny_model(Path(sys.argv[1]))"
        subprocess.run([sys.executable, "-c", make, str(model)], check=True)
        everything = CASES | CUDA_CASES
        for name in cases:
            print(name, flush=True)
            if name in RESUMES:
                arguments, then = RESUMES[name]
                found[name] = resume_case(name, arguments, model=model, home=home, then=then)
            else:
                found[name] = run_case(name, everything[name], model=model, home=home)
    return found


RESUMES = {
    "torch-resume": (f"{TORCH} --precision fp32 --lora_dropout 0.1", ""),
    "torch-resume-full": (f"{TORCH} --precision fp32 --train_type full", ""),
    "mlx-resume": (f"{MLX} --lora_dropout 0.1", ""),
    "torch-to-mlx": (f"{TORCH} --precision fp32", "--backend mlx"),
    "mlx-to-torch": (MLX, "--backend cpu"),
}


def differences(was: dict[str, Any], now: dict[str, Any]) -> list[str]:
    found = []
    for part in was:
        if was[part] != now[part]:
            found.append(f"{part}: {was[part]} -> {now[part]}"[:300])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", help="cases whose name begins so; cuda for those of a GPU", default="")
    options = parser.parse_args()
    known = [*CASES, *RESUMES] if not options.only.startswith("cuda") else list(CUDA_CASES)
    if options.mode == "record":
        options.file.write_text(
            json.dumps(record([n for n in known if n.startswith(options.only)]), indent=1)
        )
        return 0
    wanted = json.loads(options.file.read_text())
    cases = [name for name in wanted if name.startswith(options.only)]
    found, failed = record(cases), 0
    for name in cases:
        different = differences(wanted[name], found[name])
        failed += bool(different)
        print(f"{'DIFFERS' if different else 'same bits':10} {name}", *different, sep="\n    ")
    print(f"{len(cases) - failed} of {len(cases)} cases have the same bits")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
