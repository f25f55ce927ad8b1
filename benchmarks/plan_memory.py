"""Compare the memory that `crosstune plan` predicts with the memory that training uses.

    python benchmarks/plan_memory.py --backend cpu                 15 small configurations, fp32
    python benchmarks/plan_memory.py --backend cuda                28 configurations: 135M, 1.2B and 7B Llama shapes
    python benchmarks/plan_memory.py --backend cuda --limit_s 480  start no new configuration after eight minutes

Weights are random. Each configuration trains two steps on full rows in a separate process; the second step counts, since it
has the optimizer's state. On a GPU, torch's allocator reports the peak (the reserved memory is printed too); on a CPU it is
the resident memory, and the memory of the libraries is measured before the model is opened instead of predicted. The table
can be pasted into docs/internals/results-history.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import struct
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from crosstune.files.json_files import write_json
from crosstune.models.llama_layout import Llama
from crosstune.models.tiny import TINY, tiny_model

MIB = 2**20
SHAPES: dict[str, dict[str, int]] = {
    # name: the fields of a Llama configuration
    "20M": {
        "vocab": 8000,
        "hidden": 512,
        "intermediate": 1408,
        "num_layers": 6,
        "num_heads": 8,
        "num_kv_heads": 4,
    },
    "135M": {
        "vocab": 49152,
        "hidden": 576,
        "intermediate": 1536,
        "num_layers": 30,
        "num_heads": 9,
        "num_kv_heads": 3,
    },
    "1.2B": {
        "vocab": 32000,
        "hidden": 2048,
        "intermediate": 8192,
        "num_layers": 16,
        "num_heads": 32,
        "num_kv_heads": 8,
    },
    "7B": {
        "vocab": 32000,
        "hidden": 4096,
        "intermediate": 11008,
        "num_layers": 32,
        "num_heads": 32,
        "num_kv_heads": 32,
    },
}
LORA = {"train_type": "lora"}
GENERAL = {"kernels": "general"}
QLORA = {"train_type": "qlora", "quantization_backend": "bnb"}
HQQ = {"train_type": "qlora", "quantization_backend": "hqq"}
CHECKPOINTING = {"use_gradient_checkpointing": True}


@dataclass(frozen=True)
class Case:
    shape: str
    batch: int
    length: int
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        words = [f"{name}={value}" for name, value in self.options.items()]
        return " ".join([self.shape, f"{self.batch} x {self.length}", *words])


CPU_CASES = (
    Case("20M", 4, 256, LORA),
    Case("20M", 8, 128, LORA),
    Case("20M", 4, 256, {**LORA, "kernels": "fast"}),
    Case("20M", 8, 256, {**LORA, "kernels": "fast"}),
    Case("20M", 8, 256, {**LORA, "kernels": "fast", **CHECKPOINTING}),
    Case("20M", 8, 256, LORA),
    Case("20M", 8, 256, {**LORA, **CHECKPOINTING}),
    Case("20M", 4, 256, {**LORA, "lora_dropout": 0.1}),
    Case("20M", 4, 256, {**LORA, "lora_target_modules": "default"}),
    Case("20M", 2, 512, {"train_type": "dora"}),
    Case("20M", 4, 256, {"train_type": "full"}),
    Case("20M", 8, 256, {"train_type": "full", **CHECKPOINTING}),
    Case("20M", 4, 256, {"train_type": "full", "optimizer": "sgd"}),
    Case("20M", 4, 256, QLORA),
    Case("20M", 4, 256, HQQ),
)
CUDA_CASES = (
    # LoRA in bf16 uses the fast layers unless set otherwise.
    Case("135M", 8, 512, LORA),
    Case("135M", 8, 512, {**LORA, **GENERAL}),
    Case("135M", 8, 512, {"train_type": "full"}),
    Case("135M", 8, 512, {"train_type": "full", "optimizer": "adamw_8bit"}),
    Case("135M", 8, 2048, {**LORA, **CHECKPOINTING}),
    Case("135M", 8, 512, {**LORA, "precision": "bf16_autocast"}),
    Case("135M", 8, 512, {**LORA, "precision": "bf16_autocast", "kernels": "fast"}),
    Case("135M", 8, 512, {**LORA, "precision": "fp32"}),
    Case("1.2B", 4, 2048, LORA),
    Case("1.2B", 4, 2048, {**LORA, **GENERAL}),
    Case("1.2B", 16, 2048, LORA),
    Case("1.2B", 4, 2048, {**LORA, **CHECKPOINTING}),
    Case("1.2B", 4, 2048, {**LORA, "lora_rank": 128}),
    Case("1.2B", 4, 2048, {**LORA, "lora_dropout": 0.1}),
    Case("1.2B", 4, 2048, {**LORA, "lora_target_modules": "attention"}),
    Case("1.2B", 4, 2048, {"train_type": "dora"}),
    Case("1.2B", 4, 2048, {"train_type": "full"}),
    Case("1.2B", 4, 2048, {"train_type": "full", "optimizer": "sgd", **CHECKPOINTING}),
    Case("1.2B", 4, 2048, QLORA),
    Case("1.2B", 4, 2048, {**QLORA, **GENERAL}),
    Case("1.2B", 4, 2048, {**HQQ, **CHECKPOINTING}),
    Case(
        "1.2B", 4, 2048, {"train_type": "qlora", "quantization_backend": "quanto", **GENERAL, **CHECKPOINTING}
    ),
    Case("7B", 4, 2048, LORA),
    Case("7B", 4, 2048, {**LORA, **GENERAL}),
    Case("7B", 4, 2048, {**LORA, "base_precision": "fp8"}),
    Case("7B", 4, 2048, QLORA),
    Case("7B", 4, 2048, {**QLORA, **CHECKPOINTING}),
    Case("7B", 8, 2048, {**QLORA, **GENERAL, **CHECKPOINTING}),
)


def write_model(folder: Path, sizes: Mapping[str, int]) -> Path:
    """Write a model folder with random bf16 weights; all tensors are slices of one block of random numbers."""
    tiny_model(folder)
    head_dim = sizes["hidden"] // sizes["num_heads"]
    llama: Llama = replace(TINY, **sizes, head_dim=head_dim, dtype="bfloat16", max_context=4096, tied=False)  # type: ignore[arg-type]
    write_json(folder / "config.json", llama.config())
    drawn = np.random.default_rng(0).standard_normal(2**22, dtype=np.float32) * np.float32(0.02)
    block = (drawn.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    entries: dict[str, Any] = {}
    end = 0
    for name, shape in llama.tensor_shapes().items():
        start, end = end, end + 2 * int(np.prod(shape))
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        left = end
        while left:
            left -= file.write(block[: min(left, len(block))])
    return folder


def measure(case: Case, model: Path, backend: str, answer: Connection) -> None:
    """Train two steps of a case in this process and send the predicted and the measured bytes."""
    import psutil

    from crosstune.config.load import make_config
    from crosstune.data.batches.token_batch import TokenBatch
    from crosstune.loop.step import prepare_window, take_step
    from crosstune.models.locate import locate
    from crosstune.planner.gather import make_plan
    from crosstune.runs.open_parts import open_session

    asked = {
        "backend": backend,
        "model_name": str(model),
        "batch_size": case.batch,
        "context_length": case.length,
        "precision": "bf16" if backend == "cuda" else "fp32",
        "use_gradient_checkpointing": False,
    }
    config = make_config(**asked | dict(case.options))
    plan = make_plan(config, longest_row=case.length)
    assert plan.fitted is not None
    parts = plan.fitted.parts
    before = psutil.Process().memory_info().rss
    session = open_session(plan, locate(str(model)))
    vocab = plan.fitted.shape.vocab
    ids = np.random.default_rng(1).integers(5, vocab - 5, (case.batch, case.length), dtype=np.int32)
    positions = np.broadcast_to(np.arange(case.length, dtype=np.int32), ids.shape).copy()
    batch = TokenBatch(
        input_ids=ids, targets=np.roll(ids, -1, axis=1), segments=np.ones_like(ids), positions=positions
    )
    window = prepare_window(session, [batch])
    take_step(session, window, lr=1e-4)
    session.reset_peak()
    take_step(session, window, lr=1e-4)
    found = {"parts": parts.to_json(), "measured": session.memory().peak_bytes, "reserved": 0}
    found["predicted"] = parts.total - parts.overhead + (before if backend == "cpu" else 0)
    found["overhead"] = before if backend == "cpu" else 0
    if backend == "cuda":
        import torch

        found["reserved"] = torch.cuda.max_memory_reserved()
    answer.send(found)


def run_case(case: Case, model: Path, backend: str, *, limit_s: float) -> dict[str, Any] | str:
    """Return the measurement of a child, or the reason why there is none."""
    # Spawn on a GPU: a fork of a process in which a library has touched the GPU cannot use it.
    context: Any = multiprocessing.get_context("fork" if backend == "cpu" else "spawn")
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(target=measure, args=(case, model, backend, sending))
    child.start()
    sending.close()
    found: dict[str, Any] | str = f"ended after {limit_s:g} s; see --case_limit_s"
    if receiving.poll(limit_s):
        try:
            found = receiving.recv()
        except EOFError:
            found = "failed, as printed above"
    child.join(5)
    if child.is_alive():
        child.kill()
        child.join()
    return found


def warm_up() -> None:
    """Import what every child needs, without touching the device."""
    import bitsandbytes  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    import crosstune.runs.pipeline
    import crosstune.torch_engine.open  # noqa: F401


def rows(asked: argparse.Namespace, home: Path) -> Iterator[tuple[Case, dict[str, Any]]]:
    started, models = time.monotonic(), dict[str, Path]()
    for case in CPU_CASES if asked.backend == "cpu" else CUDA_CASES:
        if asked.only and asked.only not in case.title:
            continue
        if time.monotonic() - started > asked.limit_s:
            print(f"not started, time is up: {case.title}", file=sys.stderr)
            continue
        if case.shape not in models:
            for old in models.values():  # one model at a time: the 7B model has 13 GB
                (old / "model.safetensors").unlink()
            models = {case.shape: write_model(home / case.shape, SHAPES[case.shape])}
        found = run_case(case, models[case.shape], asked.backend, limit_s=asked.case_limit_s)
        if isinstance(found, str):
            print(f"{case.title}: {found}", file=sys.stderr)
            continue
        yield case, found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", help="only the configurations whose title contains this")
    parser.add_argument(
        "--limit_s", type=float, default=480.0, help="start no configuration after so many seconds"
    )
    parser.add_argument(
        "--case_limit_s",
        type=float,
        default=600.0,
        help="end a configuration after so many seconds; fitting HQQ's groups takes minutes on a busy CPU (default 600)",
    )
    parser.add_argument(
        "--folder", type=Path, help="where the models are written; by default a temporary folder"
    )
    parser.add_argument("--json", type=Path, help="also write everything that was measured here")
    asked = parser.parse_args()
    if asked.backend == "cpu":
        warm_up()
    errors, kept = [], list[dict[str, Any]]()
    print(
        "| configuration | predicted MiB | measured MiB | error | reserved MiB |\n|---|---|---|---|---|",
        flush=True,
    )
    with tempfile.TemporaryDirectory(dir=asked.folder) as place:
        for case, found in rows(asked, Path(place)):
            errors.append(found["predicted"] / found["measured"] - 1)
            kept.append({"case": case.title, **found})
            reserved = f"{found['reserved'] / MIB:,.0f}" if found["reserved"] else ""
            print(
                f"| {case.title} | {found['predicted'] / MIB:,.0f} | {found['measured'] / MIB:,.0f} | "
                f"{errors[-1]:+.1%} | {reserved} |",
                flush=True,
            )
    if errors:
        largest = max(errors, key=abs)
        mean = sum(map(abs, errors)) / len(errors)
        print(f"\n{len(errors)} configurations: mean error {mean:.1%}, largest {largest:+.1%}")
    if asked.json is not None:
        write_json(asked.json, {"backend": asked.backend, "cases": kept})


if __name__ == "__main__":
    main()
