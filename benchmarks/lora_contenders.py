"""The contenders of lora_gpu.py and lora_cpu.py, each run in a separate process: crosstune, transformers + PEFT, Unsloth."""

from __future__ import annotations

import itertools
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lora_work import SHAPES, Shape, draw_rows, draw_short, pack, pad

GIB = 2**30
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OURS: dict[str, dict[str, Any]] = {
    "ours bf16": {},
    "ours bf16 recompute": {"use_gradient_checkpointing": True},
    "ours bf16 general": {"kernels": "general"},
    "ours nf4": {"train_type": "qlora"},
    "ours nf4 recompute": {"train_type": "qlora", "use_gradient_checkpointing": True},
    "ours nf4 recompute offload": {
        "train_type": "qlora",
        "use_gradient_checkpointing": True,
        "use_activation_cpu_offload": True,
    },
    "ours fp8": {"base_precision": "fp8"},
    "ours nf4 in fp8": {"train_type": "qlora", "base_precision": "fp8"},
    "ours full": {"train_type": "full", "precision": "bf16_autocast"},
}
PEERS = (
    "peft bf16",
    "peft nf4",
    "peft nf4 recompute",
    "liger bf16",
    "liger nf4",
    "compile bf16",
    "unsloth bf16",
    "unsloth nf4",
    "unsloth nf4 recompute",
    "unsloth bf16 packed",
    "peft full",
    "liger full",
)
OURS_ON_CPU: dict[str, dict[str, Any]] = {
    "ours fp32": {"precision": "fp32"},
    "ours fp32 general": {"precision": "fp32", "kernels": "general"},
    "ours autocast": {"precision": "bf16_autocast"},
    "ours autocast general": {"precision": "bf16_autocast", "kernels": "general"},
    "ours bf16": {"precision": "bf16"},
}
PEERS_ON_CPU = ("peft fp32", "peft autocast", "peft bf16", "compile fp32", "compile autocast", "compile bf16")
Step = Callable[[], float]


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Time the steps of one contender."""
    shape, device = SHAPES[job["shape"]], job["device"]
    started = time.perf_counter()
    ours = job["contender"] in OURS | OURS_ON_CPU
    steps, num_tokens, num_supervised = (open_ours if ours else open_peer)(job, shape)
    load_s = time.perf_counter() - started
    started = time.perf_counter()
    first = steps[0]()
    synchronize(device)
    first_s = time.perf_counter() - started
    for index in range(job["warmup"]):
        steps[index % len(steps)]()
    times, cpu_times, loss, until = [], [], first, time.perf_counter() + job["seconds"]
    # A round is all batches once: short examples make batches of very different sizes.
    while len(times) < 3 or time.perf_counter() < until:
        synchronize(device)
        started, cpu_started = time.perf_counter(), time.process_time()
        for step in steps:
            loss = step()
        synchronize(device)
        times.append(time.perf_counter() - started)
        cpu_times.append(time.process_time() - cpu_started)
    times.sort()
    median = times[len(times) // 2]
    return {
        "tok_s": num_tokens / median,
        "supervised_tok_s": num_supervised / median,
        "round_ms": 1e3 * median,
        "round_cpu_s": statistics.median(cpu_times),
        "spread": [1e3 * times[len(times) // 10], 1e3 * times[-1 - len(times) // 10]],
        "rounds": len(times),
        "batches": len(steps),
        "peak_gib": peak_gib(device),
        "load_s": load_s,
        "first_step_s": first_s,
        "first_loss": first,
        "last_loss": loss,
        "launches": count_launches(steps[0], device) if job.get("launches") else None,
    }


def open_ours(job: dict[str, Any], shape: Shape) -> tuple[list[Step], int, int]:
    """Open crosstune's session as a run does, and step it on prepared batches."""
    from crosstune.config.load import make_config
    from crosstune.loop.step import LossScale, prepare_window, take_step
    from crosstune.planner.gather import make_plan
    from crosstune.torch_engine.open import open_session

    asked = {
        "backend": job["device"],
        "precision": job["precision"],
        "model_name": job["folder"],
        "kernels": "fast",
        "lora_rank": job["rank"],
        "batch_size": shape.rows,
        "context_length": shape.context,
        "use_gradient_checkpointing": False,
        "fp8_tolerance": 0,  # random weights do not show which layers of a trained model must stay exact
    }
    plan = make_plan(make_config(**asked | (OURS | OURS_ON_CPU)[job["contender"]]))
    session: Any = open_session(plan, model_folder=Path(job["folder"]))
    if job["part"] == "short":
        batches = pack(draw_short(shape), rows=shape.rows, context=shape.context)
    else:
        batches = [pad(draw_rows(shape))]
    scale = LossScale(enabled=False)
    windows = [prepare_window(session, [batch]) for batch in batches]
    steps: list[Step] = [
        (lambda window=window: take_step(session, window, lr=1e-4, scale=scale).loss) for window in windows
    ]
    print({"notes": session.notes, "decoder": session.task.decoder is not None}, flush=True)
    return steps, sum(b.num_tokens for b in batches), sum(b.weight for b in batches)


def open_peer(job: dict[str, Any], shape: Shape) -> tuple[list[Step], int, int]:
    """Open a model with transformers and PEFT, or Unsloth, and step it on the same tokens."""
    name, device = job["contender"], torch.device(job["device"])
    if name.startswith("unsloth"):
        model = open_unsloth(
            job["folder"],
            rank=job["rank"],
            context=shape.context,
            nf4=" nf4" in name,
            recomputes=name.endswith("recompute"),
        )
    else:
        model = _peft(name, job)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=device.type == "cuda")
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=job["precision"] != "fp32")
    short = draw_short(shape) if job["part"] == "short" else []
    if name.endswith("packed"):
        batches = pack(short or draw_rows(shape), rows=shape.rows, context=shape.context)
    elif short:
        batches = [pad(short[start : start + 8]) for start in range(0, len(short), 8)]
    else:
        batches = [pad(draw_rows(shape))]

    def make(batch: Any) -> Step:
        ids = torch.from_numpy(batch.input_ids).long().to(device)
        real = torch.from_numpy(batch.segments > 0).to(device)
        if name.endswith("packed"):
            ids, labels, options = _one_row(batch, device)
        else:
            options = {"attention_mask": real.long()} if not bool(real.all()) else {}
            labels = torch.where(real, ids, -100)

        def step() -> float:
            with autocast:
                loss = model(input_ids=ids, labels=labels, use_cache=False, **options).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        return step

    return [make(b) for b in batches], sum(b.num_tokens for b in batches), sum(b.weight for b in batches)


def _one_row(batch: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return all documents of packed rows in one row, as Unsloth expects, without a loss across their bounds."""
    real = batch.segments.reshape(-1) > 0
    ids = torch.from_numpy(batch.input_ids.reshape(-1)[real]).long()
    places = torch.from_numpy(batch.positions.reshape(-1)[real]).long()
    starts = (places == 0).nonzero().flatten()
    lengths = torch.diff(starts, append=torch.tensor([len(ids)])).to(torch.int32)
    labels = torch.where(places == 0, -100, ids)
    options = {"position_ids": places[None].to(device), "packed_seq_lengths": lengths.to(device)}
    return ids[None].to(device), labels[None].to(device), options


def _peft(name: str, job: dict[str, Any]) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    if name.startswith("liger"):
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    whole = name.endswith("full")  # fp32 weights, computed in bf16
    dtype = torch.bfloat16 if job["precision"] == "bf16" and not whole else torch.float32
    quantized = None
    if " nf4" in name:
        quantized = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    model = AutoModelForCausalLM.from_pretrained(
        job["folder"], dtype=dtype, quantization_config=quantized, device_map=job["device"]
    )
    if name.endswith("recompute"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if whole:
        return model
    model = get_peft_model(
        model, LoraConfig(r=job["rank"], lora_alpha=32, target_modules=TARGETS, task_type="CAUSAL_LM")
    )
    return torch.compile(model) if name.startswith("compile") else model


def open_unsloth(folder: str, *, rank: int, context: int, nf4: bool = False, recomputes: bool = False) -> Any:
    """Open a model with adapters in Unsloth."""
    from unsloth import FastLanguageModel

    model, _ = FastLanguageModel.from_pretrained(
        model_name=folder, max_seq_length=context, dtype=torch.bfloat16, load_in_4bit=nf4
    )
    return FastLanguageModel.get_peft_model(
        model,
        r=rank,
        target_modules=TARGETS,
        lora_alpha=32,
        lora_dropout=0,
        bias="none",
        use_gradient_checkpointing="unsloth" if recomputes else False,
    )


def measure_limit(device: str, *, seconds: float) -> dict[str, Any]:
    """Measure the sustained rate of matmuls of Gaussian numbers, in FLOP/s."""
    size = (8192, 4096, 11008) if device == "cuda" else (256, 256, 256)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    a = torch.randn(size[0], size[1], device=device).to(dtype)
    b = torch.randn(size[2], size[1], device=device).to(dtype)
    found = {"dense": _rate(lambda: a @ b.t(), size, device, seconds)}
    if device == "cuda" and torch.cuda.get_device_capability() >= (9, 0):
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        ones = torch.ones(size[0], 1, device=device), torch.ones(1, size[2], device=device)
        found["fp8"] = _rate(
            lambda: torch._scaled_mm(
                a8, b8.t(), scale_a=ones[0], scale_b=ones[1], out_dtype=dtype, use_fast_accum=True
            ),
            size,
            device,
            seconds,
        )
    return found


def measure_cpu_limit(shape: Shape, *, seconds: float) -> dict[str, float]:
    """Measure the rate of the forward matmuls of a layer and the head, weighted as in a step, in FLOP/s."""
    width, inner, tokens = shape.hidden, shape.intermediate, shape.rows * shape.context
    qkv = shape.head_dim * (shape.num_heads + 2 * shape.num_kv_heads)
    layer = [(width, qkv), (width, width), (width, 2 * inner), (inner, width)]
    products = [(size, shape.num_layers) for size in layer] + [((width, shape.vocab), 1)]
    found = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        if dtype is not torch.float32 and not _is_quick(dtype):
            continue
        flops = needed_s = 0.0
        for (inputs, outputs), count in products:
            x, w = torch.randn(tokens, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
            work = 2.0 * tokens * inputs * outputs
            rate = _rate(lambda x=x, w=w: x @ w.t(), (tokens, inputs, outputs), "cpu", seconds, at_once=1)
            flops, needed_s = flops + count * work, needed_s + count * work / rate
        found[name] = flops / needed_s
    return found


def _is_quick(dtype: torch.dtype) -> bool:
    """Return whether a small matmul in `dtype` needs less than ten times the time of fp32: some CPUs emulate it."""
    times = []
    for one in (torch.float32, dtype):
        a = torch.randn(128, 128).to(one)
        started = time.perf_counter()
        for _ in range(4):
            a @ a
        times.append(time.perf_counter() - started)
    return times[1] < 10 * times[0]


def _rate(
    product: Callable[[], Any],
    size: tuple[int, int, int],
    device: str,
    seconds: float,
    *,
    at_once: int = 20,
) -> float:
    product()
    synchronize(device)
    count, started = 0, time.perf_counter()
    while time.perf_counter() < started + seconds:
        for _ in range(at_once):
            product()
        synchronize(device)
        count += at_once
    return 2.0 * size[0] * size[1] * size[2] * count / (time.perf_counter() - started)


def count_launches(step: Step, device: str) -> dict[str, Any] | None:
    """Profile one step: the number of kernels, and where the device's time goes."""
    if device != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    started = time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
        wall_ms = 1e3 * (time.perf_counter() - started)
    rows = [(row.self_device_time_total / 1e3, row.count, row.key[:90]) for row in profiler.key_averages()]
    rows = [row for row in rows if row[0] > 0]  # without the calls that start the kernels
    ran = sorted(
        (event.time_range.start, event.time_range.end, event.name[:60])
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    idle = [(b[0] - a[1], a[2], b[2]) for a, b in itertools.pairwise(ran) if b[0] > a[1]]
    return {
        "kernels": sum(row[1] for row in rows),
        "busy_ms": sum(row[0] for row in rows),
        "wall_ms": wall_ms,
        "busiest": sorted(rows, reverse=True)[:40],
        "idle_us": sum(row[0] for row in idle),
        "longest_idle": sorted(idle, reverse=True)[:12],
    }


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def peak_gib(device: str) -> float:
    """Return the peak memory of the device; on a CPU that of this process, with the code it has loaded."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
