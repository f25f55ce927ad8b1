"""Measure the latent-diffusion model at its full size: samples/s, memory and the fraction of the hardware's limit.

    python benchmarks/latent_size.py                  hidden 1024, 24 blocks (0.95 B parameters), about a minute on a GPU
    python benchmarks/latent_size.py --profile        and the time of a step by groups of kernels
    python benchmarks/latent_size.py --small          to see that it runs, on any machine

Each combination of layers (the general blocks, the same compiled, the fused blocks) and recomputation is a run of --runs.

Rows are full: --tokens tokens each, of random ids, with one vector; the mode is l2t. The step is the one of
`crosstune train`: the engine's session computes the gradients of a window, clips and updates, with fp32 weights and bf16
compute. The limit is the rate of large bf16 matmuls, sustained for some seconds in the same run. Recomputation is not
counted as work.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from crosstune.config.load import make_config
from crosstune.planner.gather import make_plan
from crosstune.recipes.latent_diffusion.batch import PairBatch, draw, make_batch
from crosstune.recipes.latent_diffusion.pair_folder import Pairs
from crosstune.recipes.latent_diffusion.settings import ModelSettings
from crosstune.recipes.latent_diffusion.torch_parts import LatentDiffusionTask
from crosstune.runs.open_parts import open_session

WARM_STEPS = 3


def make_pairs(settings: ModelSettings, rows: int) -> Pairs:
    random = np.random.default_rng(0)
    latents = random.normal(size=(rows, settings.latent_dim)).astype(np.float32)
    return Pairs(
        tokens=random.integers(3, settings.vocabulary, (rows, settings.max_tokens)).astype(np.uint16),
        lengths=np.full(rows, settings.max_tokens, np.int32),
        latents=latents / np.linalg.norm(latents, axis=1, keepdims=True),
        text_file=None,  # type: ignore[arg-type]  # nothing is decoded
    )


def make_window(pairs: Pairs, settings: ModelSettings, step: int) -> PairBatch:
    drawn = draw(
        np.asarray(pairs.lengths),
        max_tokens=settings.max_tokens,
        dim=settings.latent_dim,
        shares={"l2t": 1.0},
        dropped=0.1,
        key=(0, step),
    )
    return make_batch(pairs, np.arange(len(pairs)), drawn)


def step_flops(settings: ModelSettings, rows: int) -> float:
    """Return the floating-point operations of a step: twice the multiplications forward, twice that backward."""
    h, c, k, s = settings.hidden_size, settings.cond_dim, settings.latent_tokens, settings.max_tokens
    block = 12 * h * h * (s + k) + 2 * 6 * h * c + 2 * (s + k) ** 2 * h
    unused = 9 * h * h * k  # the last block ends with the latent's keys and values
    head = 0.5 * s * h * settings.vocabulary  # about half of the tokens are masked
    latent = settings.latent_dim * k * h + k * h * h + h * s
    return 6.0 * rows * (settings.n_blocks * block - unused + head + latent)


def measure_limit(device: torch.device, *, seconds: float, size: int) -> float:
    """Return the sustained operations per second of large matmuls of Gaussian numbers in bf16."""
    dtype = torch.bfloat16 if device.type != "cpu" else torch.float32
    one, other = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    synchronize(device)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for _ in range(20 if device.type != "cpu" else 1):
            torch.mm(one, other)
            count += 1
        synchronize(device)
    return 2.0 * size**3 * count / (time.perf_counter() - began)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def step_once(session: Any, window: Any) -> float:
    loss: float = session.backward([window]).loss
    session.update(lr=1e-4)
    return loss


GROUPS = {
    "matmuls": ("gemm", "nvjet", "cutlass", "sm90_xmma", "splitk", "_mm"),
    "attention": ("fmha", "flash", "attention", "cudnn"),
    "optimizer, clipping": ("adam", "multi_tensor", "foreach", "lpnorm"),
    "fused passes": ("_modulate", "_sum_chunks", "_normalize_heads", "_gelu", "cross_entropy", "triton"),
    "norms": ("norm",),
    "softmax, loss": ("softmax", "nll"),
    "sums": ("reduce",),
    "gather, scatter": ("index", "gather", "scatter", "embedding", "sort", "cat"),
    "copies, casts": ("memcpy", "memset", "copy", "fill"),
    "elementwise": ("elementwise",),
}


def print_kernels(step: Callable[[], Any], *, step_s: float) -> None:
    """Print the device time of a step by groups of kernels, and the slowest kernels."""
    activity = torch.profiler.ProfilerActivity
    kinds = [activity.CPU] + [activity.CUDA] * torch.cuda.is_available()
    with torch.profiler.profile(activities=kinds) as profile:
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    on_gpu = torch.cuda.is_available()
    times: dict[str, tuple[float, int]] = {}
    for event in profile.key_averages():
        spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        is_kernel = event.device_type == torch.autograd.DeviceType.CUDA if on_gpu else True
        if spent > 0 and is_kernel:
            times[event.key] = (spent / 1000, event.count)
    groups: dict[str, float] = dict.fromkeys([*GROUPS, "other"], 0.0)
    for name, (spent, _) in times.items():
        low = name.lower()
        groups[
            next((group for group, words in GROUPS.items() if any(map(low.__contains__, words))), "other")
        ] += spent
    total = sum(groups.values())
    print(
        f"  kernels {total:.1f} ms in {sum(n for _, n in times.values()):,} launches; the step {1000 * step_s:.1f} ms"
    )
    print_idle(profile, on_gpu=on_gpu)
    for group, spent in sorted(groups.items(), key=lambda one: -one[1]):
        print(f"  {spent:8.2f} ms  {group}")
    for name, (spent, count) in sorted(times.items(), key=lambda one: -one[1][0])[:30]:
        print(f"    {spent:8.2f} ms {count:5} x  {name[:110]}", flush=True)


def print_idle(profile: Any, *, on_gpu: bool) -> None:
    """Print the time in which no kernel ran, and the longest gaps with the kernels around them."""
    kind = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    ran = sorted(
        (e.time_range.start, e.time_range.end, e.name) for e in profile.events() if e.device_type == kind
    )
    gaps, until, last = [], ran[0][1], ran[0][2]
    for start, end, name in ran:
        if start > until:
            gaps.append((start - until, last, name))
        if end > until:
            until, last = end, name
    long = [gap for gap in gaps if gap[0] > 100]
    print(
        f"  idle {sum(gap[0] for gap in gaps) / 1000:.1f} ms in {len(gaps):,} gaps, of which "
        f"{sum(gap[0] for gap in long) / 1000:.1f} ms in {len(long)} gaps of more than 0.1 ms"
    )
    for gap, before, after in sorted(gaps, reverse=True)[:12]:
        print(f"    {gap / 1000:8.2f} ms  {before[:60]} -> {after[:60]}")


def measure(
    settings: ModelSettings,
    *,
    layers: str,
    rows: int,
    steps: int,
    recompute: bool,
    backend: str,
    precision: str,
    profile: bool,
) -> dict[str, Any]:
    config = make_config(
        recipe="latent_diffusion",
        train_type="full",
        backend=backend,
        precision=precision,
        batch_size=rows,
        optimizer="fused_adamw",
        use_gradient_checkpointing=recompute,
        kernels="fast" if layers == "fused" else "general",
        torch_compile=layers == "compiled",
        max_steps=steps,
    )
    session = open_session(make_plan(config), None, task=LatentDiffusionTask(settings, modes={"l2t"}))
    device = session.device  # type: ignore[attr-defined]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    pairs = make_pairs(settings, rows)
    windows = [session.prepare(make_window(pairs, settings, step)) for step in range(4)]
    losses, began = [], 0.0
    for step in range(WARM_STEPS + steps):
        if step == WARM_STEPS:
            synchronize(device)
            began = time.perf_counter()
        losses.append(step_once(session, windows[step % len(windows)]))
    synchronize(device)
    step_s = (time.perf_counter() - began) / steps
    trained, whole = session.num_parameters()
    if profile:
        print_kernels(lambda: step_once(session, windows[0]), step_s=step_s)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else session.memory().peak_bytes
    return {
        "layers": layers,
        "checkpointing": recompute,
        "parameters": whole,
        "trained_parameters": trained,
        "rows": rows,
        "step_ms": 1000 * step_s,
        "samples_per_s": rows / step_s,
        "tokens_per_s": rows * settings.max_tokens / step_s,
        "flops_per_s": step_flops(settings, rows) / step_s,
        "peak_memory_gib": peak / 2**30,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--profile", action="store_true", help="also the device time by groups of kernels")
    parser.add_argument("--runs", default="general,fused,general+recompute,fused+recompute")
    own = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    settings = ModelSettings(
        vocabulary=300 if own.small else 30_525,
        max_tokens=16 if own.small else own.tokens,
        latent_dim=32,
        hidden_size=64 if own.small else 1024,
        n_blocks=2 if own.small else 24,
        n_heads=2 if own.small else 16,
        cond_dim=64 if own.small else 1024,
        latent_tokens=1,
    )
    device = torch.device("cuda" if on_gpu else "cpu")
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "settings": vars(settings),
        "runs": [],
    }
    for run in own.runs.split(","):
        layers, _, recompute = run.partition("+")
        found = measure(
            settings,
            layers=layers,
            rows=4 if own.small else own.rows,
            steps=2 if own.small else own.steps,
            recompute=bool(recompute),
            profile=own.profile,
            backend="cuda" if on_gpu else "cpu",
            precision="bf16_autocast" if on_gpu else "fp32",
        )
        limit = measure_limit(device, seconds=0.2 if own.small else 4.0, size=256 if own.small else 8192)
        result["runs"].append(
            found | {"limit_flops_per_s": limit, "share_of_limit": found["flops_per_s"] / limit}
        )
        print(json.dumps(result["runs"][-1]), flush=True)
        if on_gpu:
            torch.cuda.empty_cache()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
