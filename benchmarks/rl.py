"""Compare a step of GRPO with LoRA: crosstune with TRL's GRPOTrainer and transformers' generate, on the same prompts.

    python benchmarks/rl.py --device cuda --shape 7b      # 16 prompts x 8 answers of 256 tokens
    python benchmarks/rl.py --smoke                       # the same code with a tiny model on a CPU

Each contender runs in a separate process. A step is generation, a reward function, the training pass and AdamW. Answers have their
full length: no token ends them. The first step is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lora_work import SHAPES, write_model

RANK = 16


def main() -> int:
    asked = read_arguments()
    if asked.worker:
        print("RESULT " + json.dumps(WORKERS[asked.worker](json.loads(asked.job))))
        return 0
    shape = "smoke" if asked.smoke else asked.shape
    dtype = "bfloat16" if asked.device == "cuda" else "float32"
    folder = write_model(Path(asked.models) / f"{shape}-{dtype}", SHAPES[shape], dtype=dtype)
    job = {"folder": str(folder), "device": asked.device, "shape": shape, "steps": asked.steps} | (
        {"prompts": 2, "answers": 2, "prompt": 12, "new": 8}
        if asked.smoke
        else {"prompts": 16, "answers": 8, "prompt": asked.prompt, "new": asked.new}
    )
    found = {name: run_worker(name, job) for name in asked.contenders.split(",")}
    for name, result in found.items():
        seconds = result["seconds"]
        tokens = job["prompts"] * job["answers"] * job["new"] / seconds
        parts = ", ".join(f"{part} {value:.2f} s" for part, value in result["parts"].items())
        print(f"{name:<6} {seconds:8.2f} s a step, {tokens:8.0f} new tokens/s  {parts}")
    if {"ours", "trl"} <= found.keys():
        print(f"ratio  {found['trl']['seconds'] / found['ours']['seconds']:.2f}")
    return 0


def run_worker(name: str, job: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--worker", name, "--job", json.dumps(job)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=dict(os.environ))
    [line] = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return result


def prompt_tokens(job: dict[str, Any]) -> list[list[int]]:
    import numpy as np

    draw = np.random.default_rng(0)
    size = (job["prompts"] * job["steps"], job["prompt"])
    return draw.integers(3, SHAPES[job["shape"]].vocab - 1, size).tolist()


def work_ours(job: dict[str, Any]) -> dict[str, Any]:
    """Return seconds of a step of crosstune, with its parts."""
    import numpy as np

    from crosstune.config.load import make_config
    from crosstune.core.sampling import Sampling
    from crosstune.loop.step import prepare_window, take_step
    from crosstune.models.locate import ModelFolder
    from crosstune.planner.gather import make_plan
    from crosstune.recipes.rl.batch import Rollout, make_batch
    from crosstune.recipes.rl.losses import RlLoss, advantages
    from crosstune.recipes.rl.torch_parts import RlLM
    from crosstune.runs.open_parts import open_session

    config = make_config(
        recipe="rl", model_name=job["folder"], lora_rank=RANK, backend=job["device"], batch_size=4, rl_loss="grpo",
        precision="bf16" if job["device"] == "cuda" else "fp32", max_steps=job["steps"], max_new_tokens=job["new"],
        num_generations=job["answers"],
    )  # fmt: skip
    plan = make_plan(config)
    loss = RlLoss.from_config(plan.config)
    model = ModelFolder(name="benchmark", path=Path(job["folder"]), source="folder")
    session: Any = open_session(plan, model, task=RlLM(loss))
    asked, size, times = prompt_tokens(job), job["prompts"], list[tuple[float, float]]()
    for step in range(job["steps"]):
        prompts = asked[step * size : (step + 1) * size]
        started = time.perf_counter()
        answers = session.sample(
            [prompt for prompt in prompts for _ in range(job["answers"])],
            max_new_tokens=job["new"],
            sampling=Sampling(temperature=1.0, seed=step),
        )
        generated = time.perf_counter()
        flat = [
            Rollout(
                prompt=0, tokens=list(one.tokens), sampler=np.array(one.log_probs, np.float32), stopped=True
            )
            for one in answers
        ]
        groups = [flat[at : at + job["answers"]] for at in range(0, len(flat), job["answers"])]
        rewards = np.array([[sum(one.tokens) % 97 for one in group] for group in groups], np.float64)
        given = advantages(rewards, name="grpo", scale="group")
        window = [
            make_batch(groups[at : at + 4], prompts[at : at + 4], loss=loss, pad_id=0, advantages=given[at : at + 4].reshape(-1))
            for at in range(0, size, 4)
        ]  # fmt: skip
        take_step(session, prepare_window(session, window), lr=1e-5)
        times.append((generated - started, time.perf_counter() - generated))
    generate, train = (float(np.mean([each[part] for each in times[1:]])) for part in (0, 1))
    return {"seconds": generate + train, "parts": {"generate": generate, "train": train}}


def work_trl(job: dict[str, Any]) -> dict[str, Any]:
    """Return seconds of a step of TRL with PEFT and transformers' generate."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    times: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **parts: Any) -> None:
            times.append(-time.perf_counter())

        def on_step_end(self, *args: Any, **parts: Any) -> None:
            times[-1] += time.perf_counter()

    on_gpu = job["device"] == "cuda"
    tokenizer = AutoTokenizer.from_pretrained(job["folder"])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    asked = [tokenizer.decode(prompt) for prompt in prompt_tokens(job)]
    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(
                job["folder"], dtype=torch.bfloat16 if on_gpu else torch.float32
            ),
            reward_funcs=lambda completions, **_: [float(len(text) % 97) for text in completions],
            args=GRPOConfig(
                output_dir=scratch, max_steps=job["steps"], per_device_train_batch_size=4 * job["answers"], loss_type="grpo",
                gradient_accumulation_steps=-(-job["prompts"] // 4), num_generations=job["answers"], report_to=[],
                max_completion_length=job["new"], learning_rate=1e-5, bf16=on_gpu, use_cpu=not on_gpu, save_strategy="no",
                generation_kwargs={"min_new_tokens": job["new"]}, gradient_checkpointing=False,
            ),
            train_dataset=Dataset.from_list([{"prompt": text} for text in asked]),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"),
            callbacks=[Clock()],
        )  # fmt: skip
        trainer.train()
    counted = times[1:] or times
    return {"seconds": sum(counted) / len(counted), "parts": {}}


WORKERS = {"ours": work_ours, "trl": work_trl}


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shape", default="7b", choices=sorted(SHAPES))
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--contenders", default="ours,trl")
    parser.add_argument("--models", default=str(Path(tempfile.gettempdir()) / "benchmark-models"))
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--worker", choices=sorted(WORKERS))
    parser.add_argument("--job", default="{}")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
