"""Compare steps of DPO with LoRA: crosstune with TRL's DPOTrainer and PEFT, on the same pairs of random tokens.

    python benchmarks/preference.py                              # SmolLM2-135M's shape on a CPU: 4 pairs, prompt 256, answers 64
    python benchmarks/preference.py --prompt 32 --answer 128     # short prompts: less to share
    python benchmarks/preference.py --contenders ours,"ours precomputed","ours general",trl
    python benchmarks/preference.py --device cuda --shape 7b --prompt 1024 --answer 512
    python benchmarks/preference.py --smoke                      # the same code with a tiny model

Each contender runs in a process of its own, in the order A B B A with two rounds, with the same number of threads. A step is
the loss with its reference, the backward pass, clipping and AdamW. The first loss of all must be ln 2. On a machine with other
work, compare CPU times, with --threads 1.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lora_runs import Results, in_turn, print_result, start_worker
from lora_work import SHAPES, write_model

OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours fast": {"kernels": "fast"},
    "ours general": {"kernels": "general"},
    "ours separate": {"share_prompts": False},
    "ours precomputed": {"reference": "precomputed"},
    "ours recompute": {"use_gradient_checkpointing": True},
}
PEERS = ("trl", "trl recompute")


def main() -> int:
    asked = read_arguments()
    if asked.worker:
        job = json.loads(asked.worker)
        print_result(run(job))
        return 0
    os.environ["OMP_NUM_THREADS"] = str(asked.threads)
    shape = "smoke" if asked.smoke else asked.shape
    dtype = "bfloat16" if asked.device == "cuda" else "float32"
    folder = write_model(Path(asked.models) / f"{shape}-{dtype}", SHAPES[shape], dtype=dtype)
    results, rows = Results(Path(asked.out)), []
    for name in in_turn([word.strip() for word in asked.contenders.split(",")], asked.rounds):
        job = {
            "contender": name, "folder": str(folder), "device": asked.device, "vocab": SHAPES[shape].vocab,
            "rank": asked.rank, "pairs": asked.pairs, "prompt": 12 if asked.smoke else asked.prompt,
            "answer": 8 if asked.smoke else asked.answer, "seconds": 1.0 if asked.smoke else asked.seconds,
        }  # fmt: skip
        row = job | start_worker(Path(__file__).resolve(), job, timeout=asked.timeout)
        results.add("preference", row)
        rows.append(row)
        print(f"{name}: {row.get('error') or describe(row)}", flush=True)
    good = [row for row in rows if "error" not in row]
    print_table(good, asked)
    wrong = [row["contender"] for row in good if abs(row["first_loss"] - math.log(2)) > 2e-3]
    for name in wrong:
        print(f"{name}: the first loss is not ln 2")
    return 0 if len(good) == len(rows) and not wrong else 1


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contenders", default="ours,trl", help=", ".join([*OURS, *PEERS]))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="135m")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--answer", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=30.0, help="time of the timed steps of a contender")
    parser.add_argument("--timeout", type=float, default=900.0, help="limit of one contender's process")
    parser.add_argument("--models", default=str(Path(tempfile.gettempdir()) / "crosstune-bench"))
    parser.add_argument("--out", default="preference.json")
    parser.add_argument("--smoke", action="store_true", help="a tiny model")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def describe(row: dict[str, Any]) -> str:
    low, high = row["spread_s"]
    return (
        f"{row['step_s']:.3f} s per step ({low:.3f} to {high:.3f}, {row['steps']} steps), {row['cpu_s']:.3f} s of CPU time, {row['peak_gib']:.2f} GiB, "
        f"loss {row['first_loss']:.4f} -> {row['last_loss']:.4f}{row['about']}"
    )


def print_table(rows: list[dict[str, Any]], asked: argparse.Namespace) -> None:
    best: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: -row["step_s"]):
        best[row["contender"]] = row
    peers = [row for name, row in best.items() if name in PEERS]
    print(f"\n{'contender':20} {'pairs/s':>9} {'peak GiB':>9} {'to the best peer':>17} {'in CPU time':>12}")
    for name, row in sorted(best.items(), key=lambda item: item[1]["step_s"]):
        ratios = [
            f"{min(peer[key] for peer in peers) / row[key]:.2f}" if peers else ""
            for key in ("step_s", "cpu_s")
        ]
        print(
            f"{name:20} {asked.pairs / row['step_s']:9.2f} {row['peak_gib']:9.2f} {ratios[0]:>17} {ratios[1]:>12}"
        )


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Time the steps of one contender."""
    from lora_contenders import peak_gib, synchronize

    step, about = (open_ours if job["contender"] in OURS else open_trl)(job)
    first, times, loss = step(), list[float](), 0.0
    started_cpu, until = time.process_time(), time.perf_counter() + job["seconds"]
    while len(times) < 3 or time.perf_counter() < until:
        synchronize(job["device"])
        started = time.perf_counter()
        loss = step()
        synchronize(job["device"])
        times.append(time.perf_counter() - started)
    times.sort()
    return {
        "step_s": times[len(times) // 2],
        "spread_s": [times[len(times) // 10], times[-1 - len(times) // 10]],
        "cpu_s": (time.process_time() - started_cpu) / len(times),
        "steps": len(times),
        "peak_gib": peak_gib(job["device"]),
        "first_loss": first,
        "last_loss": loss,
        "about": about,
    }


def make_pairs(job: dict[str, Any]) -> list[Any]:
    """Return pairs of random tokens, the same for every contender."""
    import numpy as np

    from crosstune.data.batches.token_batch import Example
    from crosstune.recipes.preference.batch import Group

    draw, found = np.random.default_rng(0), []
    marks = np.arange(job["prompt"] + job["answer"]) >= job["prompt"]
    for place in range(job["pairs"]):
        prompt = draw.integers(3, job["vocab"], job["prompt"])
        answers = [draw.integers(3, job["vocab"], job["answer"]) for _ in range(2)]
        answers[1][0] = (answers[0][0] + 1) % job["vocab"]
        rows = [np.append(prompt, answer).astype(np.int32) for answer in answers]
        examples = tuple(Example(tokens=row, supervised=marks, index=place) for row in rows)
        found.append(Group(examples=examples, place=place))
    return found


def open_ours(job: dict[str, Any]) -> tuple[Any, str]:
    """Open crosstune's session as a run does, and step it on a prepared batch."""
    from dataclasses import replace

    import numpy as np

    from crosstune.config.load import make_config
    from crosstune.core.events import Observers
    from crosstune.loop.step import LossScale, prepare_window, take_step
    from crosstune.planner.gather import make_plan
    from crosstune.recipes.preference.batch import make_batch
    from crosstune.recipes.preference.losses import PreferenceLoss
    from crosstune.recipes.preference.torch_parts import PreferenceLM
    from crosstune.runs.open_parts import find_model, open_session

    changed = OURS[job["contender"]]
    asked = {
        "recipe": "preference",
        "dataset": "pairs",
        "backend": job["device"],
        "precision": "bf16" if job["device"] == "cuda" else "fp32",
        "model_name": job["folder"],
        "lora_rank": job["rank"],
        "batch_size": job["pairs"],
        "context_length": job["prompt"] + job["answer"],
        "use_gradient_checkpointing": False,
    }
    config = make_config(**asked | changed)
    task = PreferenceLM(PreferenceLoss(weights={"dpo": 1.0}))
    session: Any = open_session(make_plan(config), find_model(config, Observers()), task=task)
    batch = make_batch(
        [[pair] for pair in make_pairs(job)],
        pad_id=0,
        shares_prompts=config.share_prompts,
        mean_chosen=job["answer"],
    )
    if config.reference == "precomputed":
        [found] = task.answer_log_probs(session, [batch])
        batch = replace(batch, reference=np.asarray(found, np.float32))
    window, scale = prepare_window(session, [batch]), LossScale(enabled=False)
    layers = "fast" if task.decoder is not None else "general"
    return lambda: take_step(session, window, lr=1e-5, scale=scale).loss, f", {layers} layers"


def open_trl(job: dict[str, Any]) -> tuple[Any, str]:
    """Open TRL's trainer with PEFT, and step it on the same tokens."""
    import numpy as np
    import torch
    import trl
    from datasets import Dataset
    from lora_contenders import TARGETS
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    on_gpu = job["device"] == "cuda"
    model = AutoModelForCausalLM.from_pretrained(
        job["folder"], dtype=torch.bfloat16 if on_gpu else torch.float32, device_map=job["device"]
    )
    trainer = trl.DPOTrainer(
        model=model,
        args=trl.DPOConfig(
            output_dir=tempfile.mkdtemp(), use_cpu=not on_gpu, bf16=on_gpu, report_to=[],
            gradient_checkpointing=job["contender"].endswith("recompute"),
        ),
        train_dataset=Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}]),
        processing_class=AutoTokenizer.from_pretrained(job["folder"]),
        peft_config=LoraConfig(
            r=job["rank"], lora_alpha=32, target_modules=TARGETS, task_type="CAUSAL_LM"
        ),
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1  # set by its own loop
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=on_gpu)
    rows = [pair.examples[side] for side in range(2) for pair in make_pairs(job)]  # TRL: all chosen first
    ids = torch.from_numpy(np.stack([row.tokens for row in rows]).astype(np.int64)).to(job["device"])
    marks = torch.from_numpy(np.stack([row.supervised for row in rows]).astype(np.int64)).to(job["device"])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": marks}

    def step() -> float:
        loss = trainer.training_step(trainer.model, dict(inputs))
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step, f", trl {trl.__version__}"


if __name__ == "__main__":
    sys.exit(main())
