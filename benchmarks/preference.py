"""Compare steps of DPO with LoRA: crosstune with TRL's DPOTrainer and PEFT, and with Unsloth's, on the same pairs of random
tokens.

    python benchmarks/preference.py                              # SmolLM2-135M's shape on a CPU: 4 pairs, prompt 256, answers 64
    python benchmarks/preference.py --prompt 32 --answer 128     # short prompts: less to share
    python benchmarks/preference.py --contenders ours,"ours precomputed","ours general",trl
    python benchmarks/preference.py --device cuda --shape 7b --prompt 1024 --answer 512 \
        --contenders ours,"ours recompute","ours precomputed",trl,"trl recompute",unsloth,"unsloth recompute"
    python benchmarks/preference.py --smoke                      # the same code with a tiny model

Each contender runs in a separate process, in the order A B B A with two rounds, with the same number of threads. A step is
the loss with its reference, the backward pass, clipping and AdamW. The first loss of all must be ln 2. On a machine with
other work, compare CPU times, with --threads 1. On a GPU, the next contender imports its packages while one is timed, and a
contender that fails does not end the others. `of limit` is the time of the least work at the rate of sustained matmuls on
this machine, divided by the time of a step: each prompt once, and the reference, unless it is precomputed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lora_runs import Results, Worker, alternating_order, print_result
from lora_work import SHAPES, Shape, write_model

OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours fast": {"kernels": "fast"},
    "ours general": {"kernels": "general"},
    "ours separate": {"share_prompts": False},
    "ours precomputed": {"reference": "precomputed"},
    "ours recompute": {"use_gradient_checkpointing": True},
}
PEERS = ("trl", "trl recompute", "unsloth", "unsloth recompute")
IMPORTS = {
    "limit": ("torch",),
    "ours": ("crosstune.runs.open_parts", "crosstune.recipes.preference.torch_parts", "peft", "transformers"),
    "trl": ("trl.trainer.dpo_trainer", "peft", "datasets"),
    "unsloth": ("unsloth", "trl.trainer.dpo_trainer", "datasets"),  # it changes the others, so it comes first
}


def main() -> int:
    asked = read_arguments()
    if asked.worker:
        return work(json.loads(asked.worker))
    os.environ["OMP_NUM_THREADS"] = str(asked.threads)
    shape = "smoke" if asked.smoke else asked.shape
    dtype = "bfloat16" if asked.device == "cuda" else "float32"
    folder = write_model(Path(asked.models) / f"{shape}-{dtype}", SHAPES[shape], dtype=dtype)
    job = {
        "folder": str(folder), "device": asked.device, "shape": shape,
        "rank": asked.rank, "pairs": asked.pairs, "prompt": 12 if asked.smoke else asked.prompt,
        "answer": 8 if asked.smoke else asked.answer, "seconds": 1.0 if asked.smoke else asked.seconds,
    }  # fmt: skip
    on_gpu = asked.device == "cuda"
    names = ["limit"] * on_gpu + alternating_order(
        [word.strip() for word in asked.contenders.split(",")], asked.rounds
    )
    results, rows = Results(Path(asked.out)), list[dict[str, Any]]()
    packages = dict(given.split("=", 1) for given in asked.packages)
    logs = Path(asked.logs or tempfile.mkdtemp())
    logs.mkdir(parents=True, exist_ok=True)

    def open_worker(number: int) -> Worker:
        name = names[number]
        log = logs / f"{number:02d}-{name.replace(' ', '-')}.log"
        front = packages.get(name.split()[0], "")
        return Worker(Path(__file__).resolve(), {**job, "contender": name}, log=log, packages=front)

    until, waiting = time.monotonic() + asked.budget, None
    for number, name in enumerate(names):
        left = until - time.monotonic()
        if left <= 0:
            print(f"no time for {', '.join(names[number:])}")
            break
        worker = waiting or open_worker(number)
        waiting = open_worker(number + 1) if on_gpu and number + 1 < len(names) else None
        row = {**job, "contender": name, **worker.finish(timeout=min(asked.timeout, left))}
        results.add("limit" if name == "limit" else "preference", row)
        if name != "limit":
            rows.append(row)
        print(f"{name}: {row['error'][-600:] if 'error' in row else describe(row)}", flush=True)
    if waiting is not None:
        waiting.stop()
    good = [row for row in rows if "error" not in row]
    print_table(good, asked, dense=results.limit().get("dense"))
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
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds for all; the last are cut")
    parser.add_argument(
        "--packages",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="a folder of packages for the contenders of this first word, such as unsloth=/opt/unsloth",
    )
    parser.add_argument("--logs", help="folder for the output of every contender")
    parser.add_argument("--models", default=str(Path(tempfile.gettempdir()) / "crosstune-bench"))
    parser.add_argument("--out", default="preference.json")
    parser.add_argument("--smoke", action="store_true", help="a tiny model")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def work(job: dict[str, Any]) -> int:
    """Import the packages of a contender, wait for a line, run it, and print its result."""
    for module in IMPORTS[job["contender"].split()[0]]:
        importlib.import_module(module)
    if not sys.stdin.readline():  # the benchmark has ended
        return 1
    if job["contender"] == "limit":
        from lora_contenders import measure_limit

        print_result(measure_limit(job["device"], seconds=min(4.0, job["seconds"])))
    else:
        print_result(run(job))
    return 0


def describe(row: dict[str, Any]) -> str:
    if row["contender"] == "limit":
        return ", ".join(f"{kind} {row[kind] / 1e12:.0f} TFLOP/s" for kind in ("dense", "fp8") if kind in row)
    low, high = row["spread_s"]
    return (
        f"{row['step_s']:.3f} s per step ({low:.3f} to {high:.3f}, {row['steps']} steps), {row['cpu_s']:.3f} s of CPU time, {row['peak_gib']:.2f} GiB, "
        f"loss {row['first_loss']:.4f} -> {row['last_loss']:.4f}, opened in {row['open_s']:.0f} s, first steps {row['warmup_s']:.0f} s{row['about']}"
    )


def print_table(rows: list[dict[str, Any]], asked: argparse.Namespace, *, dense: float | None) -> None:
    """Print the best round of each contender, with its speed to that of the faster way of TRL and of Unsloth."""
    best: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: -row["step_s"]):
        best[row["contender"]] = row
    trl, unsloth = (_fastest(best, peer) for peer in ("trl", "unsloth"))
    print(
        f"\n{'contender':18} {'ms':>8} {'steps/s':>8} {'rounds, ms':>16} {'peak GiB':>9} {'of limit':>9} {'to TRL':>7} {'in CPU time':>12} {'to Unsloth':>11}"
    )
    for name, row in sorted(best.items(), key=lambda item: item[1]["step_s"]):
        found = " ".join(f"{1e3 * each['step_s']:.0f}" for each in rows if each["contender"] == name)
        share = f"{needed_flops(row) / dense / row['step_s']:.2f}" if dense else ""
        ratios = [
            f"{peer[key] / row[key]:.2f}" if peer else ""
            for peer, key in ((trl, "step_s"), (trl, "cpu_s"), (unsloth, "step_s"))
        ]
        print(
            f"{name:18} {1e3 * row['step_s']:8.0f} {1 / row['step_s']:8.3f} {found:>16} {row['peak_gib']:9.2f} {share:>9} "
            f"{ratios[0]:>7} {ratios[1]:>12} {ratios[2]:>11}"
        )
    failed = [name for name in dict.fromkeys(asked.contenders.split(",")) if name.strip() not in best]
    print("\n".join(f"{name.strip():18} no result" for name in failed))


def _fastest(best: dict[str, dict[str, Any]], peer: str) -> dict[str, Any] | None:
    rows = [row for name, row in best.items() if name.split()[0] == peer]
    return min(rows, key=lambda row: float(row["step_s"])) if rows else None


def needed_flops(job: dict[str, Any]) -> float:
    """Return the least work of a step: each prompt once, the head for the answers, no weight gradients, no recomputation."""
    shape: Shape = SHAPES[job["shape"]]
    prompt, answer, pairs = job["prompt"], job["answer"], job["pairs"]
    reference = 0 if job["contender"].endswith("precomputed") else 1
    products = (
        shape.num_linear * pairs * (prompt + 2 * answer) + shape.hidden * shape.vocab * pairs * 2 * answer
    )
    seen = pairs * (prompt**2 / 2 + 2 * (answer * prompt + answer**2 / 2))  # keys of all queries
    attention = 4 * shape.num_heads * shape.head_dim * shape.num_layers * seen
    adapters = shape.adapter_flops_per_token(rank=job["rank"]) * pairs * (prompt + 2 * answer)
    return 2 * products * (2 + reference) + attention * (3.5 + reference) + adapters


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Time the steps of one contender."""
    from lora_contenders import peak_gib, synchronize

    started = time.perf_counter()
    step, about = (open_ours if job["contender"] in OURS else open_peer)(job)
    opened, first, times, loss = time.perf_counter(), step(), list[float](), 0.0
    for _ in range(2 if job["device"] == "cuda" else 0):  # kernels are compiled and tuned
        step()
    synchronize(job["device"])
    warm = time.perf_counter()
    started_cpu, until = time.process_time(), warm + job["seconds"]
    while len(times) < 3 or time.perf_counter() < until:
        synchronize(job["device"])
        begun = time.perf_counter()
        loss = step()
        synchronize(job["device"])
        times.append(time.perf_counter() - begun)
    times.sort()
    return {
        "step_s": times[len(times) // 2],
        "spread_s": [times[len(times) // 10], times[-1 - len(times) // 10]],
        "cpu_s": (time.process_time() - started_cpu) / len(times),
        "steps": len(times),
        "open_s": opened - started,
        "warmup_s": warm - opened,
        "peak_gib": peak_gib(job["device"]),
        "first_loss": first,
        "last_loss": loss,
        "about": about,
    }


def make_pairs(job: dict[str, Any]) -> list[Any]:
    """Return pairs of random tokens, the same for every contender."""
    import numpy as np

    from crosstune.data.batches.token_batch import Example
    from crosstune.recipes.preference.open_pairs import Group

    draw, found, vocab = np.random.default_rng(0), [], SHAPES[job["shape"]].vocab
    marks = np.arange(job["prompt"] + job["answer"]) >= job["prompt"]
    for place in range(job["pairs"]):
        prompt = draw.integers(3, vocab, job["prompt"])
        answers = [draw.integers(3, vocab, job["answer"]) for _ in range(2)]
        answers[1][0] = (answers[0][0] + 1) % vocab
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
    from crosstune.recipes.preference.losses import PreferenceLoss
    from crosstune.recipes.preference.open_pairs import make_batch
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


def open_peer(job: dict[str, Any]) -> tuple[Any, str]:
    """Open TRL's trainer with PEFT or with Unsloth, and step it on the same tokens."""
    is_unsloth, recomputes = job["contender"].startswith("unsloth"), job["contender"].endswith("recompute")
    if is_unsloth:
        import unsloth
    import numpy as np
    import torch
    import trl
    from datasets import Dataset
    from lora_contenders import TARGETS, open_unsloth
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    on_gpu = job["device"] == "cuda"
    if is_unsloth:
        model = open_unsloth(
            job["folder"], rank=job["rank"], context=job["prompt"] + job["answer"], recomputes=recomputes
        )
        about, adapters = f", unsloth {unsloth.__version__}, trl {trl.__version__}", None
    else:
        model = AutoModelForCausalLM.from_pretrained(
            job["folder"], dtype=torch.bfloat16 if on_gpu else torch.float32, device_map=job["device"]
        )
        about = f", trl {trl.__version__}"
        adapters = LoraConfig(r=job["rank"], lora_alpha=32, target_modules=TARGETS, task_type="CAUSAL_LM")
    trainer = trl.DPOTrainer(
        model=model,
        args=trl.DPOConfig(
            output_dir=tempfile.mkdtemp(), use_cpu=not on_gpu, bf16=on_gpu, report_to=[],
            max_length=job["prompt"] + job["answer"], gradient_checkpointing=recomputes,
        ),
        train_dataset=Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}]),
        processing_class=AutoTokenizer.from_pretrained(job["folder"]),
        peft_config=adapters,
    )  # fmt: skip
    if recomputes and not is_unsloth:
        trainer.model.gradient_checkpointing_enable()  # as its own loop does
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

    return step, about


if __name__ == "__main__":
    sys.exit(main())
