"""Compare text generation with a LoRA adapter: crosstune with transformers' generate and PEFT, on the same random prompts.

    python benchmarks/generation.py                          # SmolLM2-135M's shape on a CPU: 1 and 16 rows, 64 + 64 tokens
    python benchmarks/generation.py --device cuda --shape 7b --rows 64,256 --prompt 256 --new 256
    python benchmarks/generation.py --contenders ours,"ours nf4","ours fp8","ours general",transformers
    python benchmarks/generation.py --smoke                  # the same code with a tiny model

Each contender runs in a process of its own with the same number of threads: greedy, without a stop token, first with few tokens
to warm up, then once per round. The limit is the time to read weights and cache once per step at the measured speed of a copy.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lora_runs import Results, print_result, start_worker
from lora_work import SHAPES, write_model

OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours nf4": {"train_type": "qlora"},
    "ours fp8": {"base_precision": "fp8"},
    "ours general": {"kernels": "general"},
}


def main() -> int:
    asked = read_arguments()
    if asked.worker:
        import json

        print_result(run(json.loads(asked.worker)))
        return 0
    os.environ["OMP_NUM_THREADS"] = str(asked.threads)
    shape = "smoke" if asked.smoke else asked.shape
    dtype = "bfloat16" if asked.device == "cuda" else "float32"
    folder = write_model(Path(asked.models) / f"{shape}-{dtype}", SHAPES[shape], dtype=dtype)
    results, rows = Results(Path(asked.out)), []
    for name in [word.strip() for word in asked.contenders.split(",")]:
        job = {
            "contender": name, "folder": str(folder), "device": asked.device, "vocab": SHAPES[shape].vocab,
            "rank": asked.rank, "rows": [2] if asked.smoke else [int(each) for each in asked.rows.split(",")],
            "prompt": 12 if asked.smoke else asked.prompt, "new": 8 if asked.smoke else asked.new,
            "rounds": asked.rounds,
        }  # fmt: skip
        found = start_worker(Path(__file__).resolve(), job, timeout=asked.timeout)
        if "error" in found:
            print(f"{name}: {found['error']}", flush=True)
        for row in found.get("runs", [job | found]):
            results.add("generation", row)
            rows.append(row)
            if "error" not in row:
                print(f"{name}, {row['num_rows']} rows: {row['tok_s']:,.0f} tok/s", flush=True)
    good = [row for row in rows if "error" not in row]
    print_table(good)
    return 0 if len(good) == len(rows) else 1


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contenders", default="ours,transformers", help=", ".join([*OURS, "transformers"]))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="135m")
    parser.add_argument("--rows", default="1,16", help="answers generated together, one measurement for each")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=900.0, help="limit of one contender's process")
    parser.add_argument("--models", default=str(Path(tempfile.gettempdir()) / "crosstune-bench"))
    parser.add_argument("--out", default="generation.json")
    parser.add_argument("--smoke", action="store_true", help="a tiny model")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def print_table(rows: list[dict[str, Any]]) -> None:
    theirs = {row["num_rows"]: row for row in rows if row["contender"] == "transformers"}
    print(
        f"\n{'contender':14} {'rows':>5} {'tok/s':>8} {'ms/step':>8} {'of the limit':>13} {'CPU s':>8} {'peak GiB':>9} "
        f"{'x transformers':>15} {'in CPU time':>12}"
    )
    for row in rows:
        peer = theirs.get(row["num_rows"])
        ratios = [
            f"{row['tok_s'] / peer['tok_s']:.2f}" if peer else "",
            f"{peer['cpu_s'] / row['cpu_s']:.2f}" if peer else "",
        ]
        print(
            f"{row['contender']:14} {row['num_rows']:5} {row['tok_s']:8,.0f} {row['step_ms']:8.2f} "
            f"{row['limit_ms'] / row['step_ms']:13.2f} {row['cpu_s']:8.2f} {row['peak_gib']:9.2f} {ratios[0]:>15} {ratios[1]:>12}"
        )


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Measure one contender with each number of rows."""
    import numpy as np
    import torch
    from lora_contenders import peak_gib, synchronize

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    generate, weight_bytes, column_bytes = (open_ours if job["contender"] in OURS else open_peer)(job)
    bandwidth = copy_speed(job["device"])
    draw, runs = np.random.default_rng(0), []

    def timed(prompts: list[list[int]], new: int) -> tuple[float, float]:
        synchronize(job["device"])
        started, cpu = time.perf_counter(), time.process_time()
        answers = generate(prompts, new)
        synchronize(job["device"])
        assert all(len(answer) == new for answer in answers) and len(answers) == len(prompts)
        return time.perf_counter() - started, time.process_time() - cpu

    for count in job["rows"]:
        prompts = draw.integers(3, job["vocab"], (count, job["prompt"])).tolist()
        timed(prompts, min(job["new"], 16))
        whole_s, cpu_s = min(timed(prompts, job["new"]) for _ in range(job["rounds"]))
        first_s = min(timed(prompts, 1) for _ in range(job["rounds"]))[0]
        columns = count * (job["prompt"] + job["new"] / 2)
        runs.append(
            {key: job[key] for key in ("contender", "device", "prompt", "new")}
            | {
                "num_rows": count,
                "tok_s": count * job["new"] / whole_s,
                "step_ms": 1e3 * (whole_s - first_s) / (job["new"] - 1),
                "prompt_ms": 1e3 * first_s,
                "limit_ms": 1e3 * (weight_bytes + columns * column_bytes) / bandwidth,
                "copy_bytes_per_s": bandwidth,
                "cpu_s": cpu_s,
                "peak_gib": peak_gib(job["device"]),
            }
        )
    return {"runs": runs}


def copy_speed(device: str) -> float:
    """Return the bytes per second read and written by a copy of a large tensor."""
    import torch
    from lora_contenders import synchronize

    source = torch.ones(2**32 if device == "cuda" else 2**28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(4):
        synchronize(device)
        started = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        times.append(time.perf_counter() - started)
    return 2 * source.numel() / min(times)


def model_bytes(model: Any) -> float:
    """Return the bytes of the weights that a step reads: all but the input embeddings, unless the head shares them."""
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    apart = 0 if tied else model.get_input_embeddings().weight
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers()) if each is not apart}
    return float(sum(each.numel() * each.element_size() for each in tensors.values()))


def cache_bytes(model: Any) -> int:
    """Return the bytes of a token in the cache."""
    config = model.config
    return int(
        2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    )


def open_ours(job: dict[str, Any]) -> tuple[Any, float, int]:
    """Open crosstune's session as a run does."""
    import torch

    from crosstune.config.load import make_config
    from crosstune.core.events import Observers
    from crosstune.planner.gather import make_plan
    from crosstune.runs.open_parts import find_model, open_session

    asked = {
        "backend": job["device"],
        "precision": "bf16" if job["device"] == "cuda" else "fp32",
        "model_name": job["folder"],
        "lora_rank": job["rank"],
    }
    config = make_config(**asked | OURS[job["contender"]])
    session: Any = open_session(make_plan(config), find_model(config, Observers()))
    with torch.no_grad():
        for name, parameter in session.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.01)

    def generate(prompts: list[list[int]], new: int) -> Any:
        return session.generate(prompts, max_new_tokens=new)

    return generate, model_bytes(session.model), cache_bytes(session.model)


def open_peer(job: dict[str, Any]) -> tuple[Any, float, int]:
    """Open the model with PEFT's adapters, in the dtype of its base, for transformers' generate."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(job["folder"], dtype="auto").to(job["device"])
    options = LoraConfig(r=job["rank"], target_modules="all-linear", init_lora_weights=False)
    model: Any = get_peft_model(loaded, options, autocast_adapter_dtype=False).eval()

    def generate(prompts: list[list[int]], new: int) -> Any:
        ids = torch.tensor(prompts, device=job["device"])
        with torch.inference_mode():
            found = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
            )
        return found[:, ids.shape[1] :].tolist()

    return generate, model_bytes(loaded), cache_bytes(loaded)


if __name__ == "__main__":
    sys.exit(main())
