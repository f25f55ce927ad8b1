"""Measure LoRA over an NF4 base on very long rows on one GPU: speed at one length, and the longest row in a budget of memory.

    python benchmarks/long_rows.py speed --tokens 32768             # crosstune before and after, and Unsloth if installed
    python benchmarks/long_rows.py longest --gib 24 80              # two layers, and ballast for the weights of the others
    python benchmarks/long_rows.py all --smoke                      # the same code with a tiny model on the CPU

`before` has neither tiles nor kept attention. With inputs in host memory the device holds no more for 32 layers than for
two, apart from the weights; without, ballast also stands for the kept inputs of the missing layers.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lora_contenders import open_unsloth
from lora_work import SHAPES, pad, write_model

GIB = 2**30
VARIANTS = {
    "before": {"offload": False, "tiles": False, "keeps": False},
    "before, host": {"offload": True, "tiles": False, "keeps": False},
    "tiles": {"offload": False, "tiles": True, "keeps": False},
    "tiles, host": {"offload": True, "tiles": True, "keeps": False},
    "tiles, host, kept attention": {"offload": True, "tiles": True, "keeps": True},
}
NF4_BYTES = 0.5 + 0.127 / 8  # of a weight, with its scales


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("speed", "longest", "all"))
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--gib", type=float, nargs="+", default=[24.0, 80.0])
    parser.add_argument("--variants", default="before, host;tiles, host;tiles, host, kept attention")
    parser.add_argument("--peers", default="unsloth")
    parser.add_argument("--timeout", type=float, default=90.0)
    parser.add_argument("--seconds", type=float, default=25.0, help="limit of the trials of one search")
    parser.add_argument("--models", default=str(Path(tempfile.gettempdir()) / "crosstune-bench"))
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        job = json.loads(asked.worker)
        print("RESULT " + json.dumps((speed if job["part"] == "speed" else longest)(job)), flush=True)
        return 0
    if asked.smoke:
        asked.tokens, asked.gib = 96, [1.0]
    for part in ("speed", "longest") if asked.part == "all" else (asked.part,):
        jobs: list[dict[str, Any]] = [{"contender": "ours", "variants": asked.variants.split(";")}]
        if "unsloth" in asked.peers and importlib.util.find_spec("unsloth") and not asked.smoke:
            jobs.append({"contender": "unsloth", "variants": ["unsloth"]})
        for job in jobs:
            budgets = [None] if part == "speed" else asked.gib
            for gib in budgets:
                run_worker(job | {"part": part, "gib": gib}, asked)
    return 0


def run_worker(job: dict[str, Any], asked: argparse.Namespace) -> None:
    job |= {"smoke": asked.smoke, "tokens": asked.tokens, "models": asked.models, "seconds": asked.seconds}
    words = [sys.executable, __file__, job["part"], "--worker", json.dumps(job)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=asked.timeout, check=False)
        said, errors = done.stdout, done.stderr
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"").decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        errors = "out of time"
    rows = [line for line in said.splitlines() if line.startswith(("ROW ", "RESULT "))]
    print("\n".join(rows) or f"{job['contender']}: {errors[-1500:]}", flush=True)


def speed(job: dict[str, Any]) -> Any:
    """Time a step of one row of `tokens`, and its peak memory."""
    found = []
    model = open_model(job, layers=2 if job["smoke"] else 32, tokens=job["tokens"])
    for name in job["variants"]:
        step = model.step_of(name)
        step()  # compiles kernels and pins memory
        sync()
        started = time.perf_counter()
        _, peak = with_peak(step)
        sync()
        seconds = time.perf_counter() - started
        row = {
            "variant": name,
            "tok_s": round(job["tokens"] / seconds),
            "step_s": round(seconds, 3),
            "gib": round(peak / GIB, 2),
            "loss": model.loss,
            "planned_gib": model.planned_gib(name),
        }
        print("ROW " + json.dumps(row), flush=True)
        found.append(row)
        gc.collect()
    return found


def longest(job: dict[str, Any]) -> Any:
    """Search the longest row in a budget, with two layers and ballast."""
    started, found = time.monotonic(), {}
    cuda = torch.cuda.is_available()
    if cuda:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, job["gib"] * GIB / total))
    each = job["seconds"] / len(job["variants"])
    for name in job["variants"]:
        low, high, until = 0, None, time.monotonic() + each
        tokens, step = (16384, 16384) if not job["smoke"] else (64, 32)
        while high is None or high - low > max(step, low // 16):
            if time.monotonic() > until:
                break
            fits = trial(job, name, tokens)
            print(
                "ROW " + json.dumps({"variant": name, "gib": job["gib"], "tokens": tokens, "fits": fits}),
                flush=True,
            )
            low, high = (tokens, high) if fits else (low, tokens)
            tokens = 2 * low if high is None else (low + high) // 2 // step * step
            if (job["smoke"] and low >= 256) or tokens in (low, high):
                break
        found[name] = low
    return {"gib": job["gib"], "longest": found, "seconds": round(time.monotonic() - started, 1)}


_opened: dict[str, Any] = {}


def trial(job: dict[str, Any], name: str, tokens: int) -> bool:
    if "model" not in _opened:
        _opened["model"] = open_model(job, layers=2, tokens=tokens)
    model = _opened["model"]
    ballast = None
    try:
        model.set_tokens(tokens)
        if torch.cuda.is_available():
            missing = SHAPES["7b"].num_layers - 2
            num_bytes = missing * (SHAPES["7b"].num_linear // SHAPES["7b"].num_layers) * NF4_BYTES
            if not VARIANTS.get(name, {"offload": True})["offload"]:
                num_bytes += missing * tokens * SHAPES["7b"].hidden * 2
            num_bytes += 152.5 * 2**20 * 3  # adapters with Adam's moments
            ballast = torch.empty(int(num_bytes), dtype=torch.uint8, device="cuda")
        model.step_of(name)()
        sync()
        return True
    except Exception as error:  # ours and torch's own
        if "memory" not in str(error).lower() and "OutOfMemory" not in type(error).__name__:
            raise
        return False
    finally:
        del ballast
        model.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def open_model(job: dict[str, Any], *, layers: int, tokens: int) -> Any:
    shape = replace(SHAPES["smoke" if job["smoke"] else "7b"], num_layers=layers, rows=1, context=2**19)
    if layers == 32:  # the weights of the other benchmarks, with positions for longer rows
        source = write_model(Path(job["models"]) / "7b", SHAPES["7b"], dtype="bfloat16")
        folder = Path(job["models"]) / "7b-long"
        folder.mkdir(exist_ok=True)
        for file in source.iterdir():
            if file.name != "config.json" and not (folder / file.name).exists():
                (folder / file.name).symlink_to(file)
        config = json.loads((source / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2**20}))
    else:
        name = f"{'smoke' if job['smoke'] else '7b'}-{layers}-long"
        folder = write_model(
            Path(job["models"]) / name, shape, dtype="float32" if job["smoke"] else "bfloat16"
        )
    return (Ours if job["contender"] == "ours" else Unsloth)(job, folder, replace(shape, context=tokens))


class Ours:
    def __init__(self, job: dict[str, Any], folder: Path, shape: Any) -> None:
        from crosstune.config.load import make_config
        from crosstune.planner.gather import make_plan
        from crosstune.torch_engine.open import open_session

        self.shape, self.loss = shape, 0.0
        options: dict[str, Any] = {
            "backend": "cpu" if job["smoke"] else "cuda",
            "precision": "fp32" if job["smoke"] else "bf16",
            "train_type": "lora" if job["smoke"] else "qlora",
            "model_name": str(folder),
            "kernels": "fast",
            "batch_size": 1,
            "context_length": shape.context,
            "use_gradient_checkpointing": True,
        }
        self._options = options
        self.plan = make_plan(make_config(**options))
        self.session: Any = open_session(self.plan, model_folder=folder)
        self.decoder = self.session.task.decoder
        assert self.decoder is not None
        self.window: Any = None

    def set_tokens(self, tokens: int) -> None:
        self.shape, self.window = replace(self.shape, context=tokens), None

    def step_of(self, name: str) -> Any:
        from crosstune.loop.step import LossScale, prepare_window, take_step

        chosen = VARIANTS[name]
        self.session.plan = replace(
            self.plan, config=replace(self.plan.config, use_activation_cpu_offload=chosen["offload"])
        )
        self.decoder.tile_tokens = (8192 if torch.cuda.is_available() else 16) if chosen["tiles"] else 2**40
        self.decoder.keeps_from = 1 if chosen["keeps"] else None
        if self.window is None:
            self.window = prepare_window(self.session, [pad(draw(self.shape))])

        def step() -> None:
            self.loss = take_step(self.session, self.window, lr=1e-4, scale=LossScale(enabled=False)).loss

        return step

    def planned_gib(self, name: str) -> float | None:
        from crosstune.config.load import make_config
        from crosstune.planner.gather import make_plan

        chosen = VARIANTS[name]
        if not torch.cuda.is_available():
            return None
        plan = make_plan(
            make_config(**self._options, use_activation_cpu_offload=chosen["offload"]),
            machine=self.plan.machine,
        )
        return round(((plan.estimated_bytes or 0) - 512 * 2**20) / GIB, 2)

    def clear(self) -> None:
        self.session.masters.clear_gradients()
        self.window = None


class Unsloth:
    def __init__(self, job: dict[str, Any], folder: Path, shape: Any) -> None:
        self.model = open_unsloth(str(folder), rank=16, context=2**19, nf4=True, recomputes=True)
        self.model.train()
        self.trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4, fused=True)
        self.shape, self.loss = shape, 0.0

    def set_tokens(self, tokens: int) -> None:
        self.shape = replace(self.shape, context=tokens)

    def step_of(self, name: str) -> Any:
        ids = torch.from_numpy(pad(draw(self.shape)).input_ids).long().cuda()

        def step() -> None:
            with torch.autocast("cuda", torch.bfloat16):
                loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.loss = loss.item()

        return step

    def planned_gib(self, name: str) -> None:
        return None

    def clear(self) -> None:
        self.optimizer.zero_grad()


def draw(shape: Any) -> Any:
    from lora_work import draw_rows

    return draw_rows(shape)


def with_peak(step: Any) -> tuple[Any, int]:
    if not torch.cuda.is_available():
        return step(), 0
    torch.cuda.reset_peak_memory_stats()
    out = step()
    return out, torch.cuda.max_memory_allocated()


def sync() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
