"""Compare a step of GRPO with LoRA: crosstune with TRL's GRPOTrainer and transformers' generate, on the same prompts.

    python benchmarks/rl.py --device cuda --shape 7b                             # 16 prompts x 8 answers of 256 tokens
    python benchmarks/rl.py --device cuda --contenders ours,"ours nf4",trl
    python benchmarks/rl.py --smoke                                              # the same code with a tiny model on a CPU

Each contender runs in a separate process; one that fails does not end the others. A step is generation, a reward function, the
training pass and AdamW. Answers have their full length: no token ends them. The first step is not counted.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lora_runs import print_result, start_worker
from lora_work import SHAPES, write_model

OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours nf4": {"train_type": "qlora"},
    "ours fp8": {"base_precision": "fp8", "fp8_tolerance": 0},
}
TRL_ROWS = 16
"""Answers in a micro-batch of TRL: it computes each with its prompt."""
OUR_PROMPTS = 4
"""Prompts in a micro-batch of ours, each with all its answers."""

RANK = 16


def main() -> int:
    asked = read_arguments()
    if asked.worker:
        job = json.loads(asked.worker)
        print_result((work_ours if job["contender"] in OURS else work_trl)(job))
        return 0
    shape = "smoke" if asked.smoke else asked.shape
    dtype = "bfloat16" if asked.device == "cuda" else "float32"
    folder = write_model(Path(asked.models) / f"{shape}-{dtype}", SHAPES[shape], dtype=dtype)
    job = {"folder": str(folder), "device": asked.device, "shape": shape, "steps": asked.steps} | (
        {"prompts": 2, "answers": 2, "prompt": 12, "new": 8}
        if asked.smoke
        else {"prompts": 16, "answers": 8, "prompt": asked.prompt, "new": asked.new}
    )
    found = dict[str, dict[str, Any]]()
    for name in asked.contenders.split(","):
        result = start_worker(Path(__file__).resolve(), job | {"contender": name}, timeout=asked.timeout)
        if "error" in result:
            print(f"{name}: {result['error']}", flush=True)
            continue
        found[name], seconds = result, result["seconds"]
        tokens = job["prompts"] * job["answers"] * job["new"] / seconds
        parts = ", ".join(f"{part} {value:.2f} s" for part, value in result["parts"].items())
        print(
            f"{name:<9} {seconds:8.2f} s a step, {tokens:8.0f} new tokens/s, peak {result['peak_gib']:.1f} GiB  {parts}",
            flush=True,
        )
    for name in found.keys() & set(OURS):
        if "trl" in found:
            ratio = found["trl"]["seconds"] / found[name]["seconds"]
            print(
                f"trl / {name}: {ratio:.2f} in time, {found['trl']['peak_gib'] / found[name]['peak_gib']:.2f} in memory"
            )
    return 0 if len(found) == len(asked.contenders.split(",")) else 1


def prompt_tokens(job: dict[str, Any]) -> list[list[int]]:
    import numpy as np

    draw = np.random.default_rng(0)
    size = (job["prompts"] * job["steps"], job["prompt"])
    return draw.integers(3, SHAPES[job["shape"]].vocab - 1, size).tolist()


def work_ours(job: dict[str, Any]) -> dict[str, Any]:
    """Return seconds of a step of crosstune, with its parts."""
    import numpy as np
    from lora_contenders import peak_gib, synchronize

    from crosstune.config.load import make_config
    from crosstune.core.sampling import Sampling
    from crosstune.loop.step import prepare_window, take_step
    from crosstune.models.locate import ModelFolder
    from crosstune.planner.gather import make_plan
    from crosstune.recipes.rl.losses import RlLoss, advantages
    from crosstune.recipes.rl.rollouts import Rollout, make_batch
    from crosstune.recipes.rl.torch_parts import RlLM
    from crosstune.runs.open_parts import open_session

    config = make_config(
        recipe="rl", model_name=job["folder"], lora_rank=RANK, backend=job["device"], batch_size=OUR_PROMPTS, rl_loss="grpo",
        precision="bf16" if job["device"] == "cuda" else "fp32", max_steps=job["steps"], max_new_tokens=job["new"],
        num_generations=job["answers"], use_gradient_checkpointing=False, **OURS[job["contender"]],
    )  # fmt: skip
    plan = make_plan(config)
    loss = RlLoss.from_config(plan.config)
    model = ModelFolder(name="benchmark", path=Path(job["folder"]), source="folder")
    session: Any = open_session(plan, model, task=RlLM(loss))
    asked, size, times = prompt_tokens(job), job["prompts"], list[list[float]]()
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
        rewards = np.array([[reward(one.tokens) for one in group] for group in groups], np.float64)
        scored = time.perf_counter()
        given = advantages(rewards, name="grpo", scale="group")
        window = [
            make_batch(
                groups[at:to], prompts[at:to], loss=loss, pad_id=0, advantages=given[at:to].reshape(-1)
            )
            for at, to in ((start, start + OUR_PROMPTS) for start in range(0, size, OUR_PROMPTS))
        ]
        take_step(session, prepare_window(session, window), lr=1e-5)
        synchronize(job["device"])
        times.append([generated - started, scored - generated, time.perf_counter() - scored])
    return result_of(times, peak_gib(job["device"]))


def reward(tokens: Any) -> float:
    return float(sum(tokens) % 97)


def result_of(times: list[list[float]], peak: float) -> dict[str, Any]:
    """Return the mean seconds of the steps but the first, by phase."""
    counted = times[1:] or times
    parts = {
        name: sum(step[place] for step in counted) / len(counted)
        for place, name in enumerate(("generate", "reward", "train"))
    }
    return {"seconds": sum(parts.values()), "parts": parts, "peak_gib": peak}


def work_trl(job: dict[str, Any]) -> dict[str, Any]:
    """Return seconds of a step of TRL with PEFT and transformers' generate."""
    import torch
    from datasets import Dataset
    from lora_contenders import peak_gib, synchronize
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    times: list[list[float]] = []

    def timed(place: int, call: Callable[..., Any], *args: Any, **parts: Any) -> Any:
        started = time.perf_counter()
        found = call(*args, **parts)
        times[-1][place] += time.perf_counter() - started
        return found

    class Timed(GRPOTrainer):  # type: ignore[misc]
        def _tokenize_prompts(self, prompts: list[str]) -> Any:
            return [json.loads(prompt) for prompt in prompts], None, {}

        def _generate_single_turn(self, *args: Any, **parts: Any) -> Any:
            return timed(0, super()._generate_single_turn, *args, **parts)

        def _calculate_rewards(self, *args: Any, **parts: Any) -> Any:
            return timed(1, super()._calculate_rewards, *args, **parts)

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **parts: Any) -> None:
            times.append([0.0, 0.0, 0.0])
            self.started = time.perf_counter()

        def on_step_end(self, *args: Any, **parts: Any) -> None:
            synchronize(job["device"])
            times[-1][2] = time.perf_counter() - self.started - sum(times[-1])

    on_gpu = job["device"] == "cuda"
    tokenizer = AutoTokenizer.from_pretrained(job["folder"])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    num_answers = job["prompts"] * job["answers"]
    rows = min(TRL_ROWS, num_answers)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Timed(
            model=AutoModelForCausalLM.from_pretrained(
                job["folder"], dtype=torch.bfloat16 if on_gpu else torch.float32
            ),
            reward_funcs=lambda completion_ids, **_: [reward(tokens) for tokens in completion_ids],
            args=GRPOConfig(
                output_dir=scratch, max_steps=job["steps"], per_device_train_batch_size=rows, loss_type="grpo",
                gradient_accumulation_steps=num_answers // rows, num_generations=job["answers"], report_to=[],
                max_completion_length=job["new"], learning_rate=1e-5, bf16=on_gpu, use_cpu=not on_gpu, save_strategy="no",
                generation_kwargs={"min_new_tokens": job["new"]}, gradient_checkpointing=False, disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list([{"prompt": json.dumps(prompt)} for prompt in prompt_tokens(job)]),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"),
            callbacks=[Clock()],
        )  # fmt: skip
        trainer.train()
    return result_of(times, peak_gib(job["device"]))


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shape", default="7b", choices=sorted(SHAPES))
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--contenders", default="ours,trl", help=", ".join([*OURS, "trl"]))
    parser.add_argument("--models", default=str(Path(tempfile.gettempdir()) / "crosstune-bench"))
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--timeout", type=float, default=900.0, help="limit of one contender's process")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
