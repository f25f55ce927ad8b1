"""Resolve --precision, --kernels and --torch_compile for the backend."""

from __future__ import annotations

import importlib.util
import os
import shutil

from crosstune.config.conditions import shards_weights
from crosstune.config.resolve.plan import Draft, Plan
from crosstune.core.errors import UserError
from crosstune.estimate.machine import BackendReport

BF16_WORTH_IT = 1.3
"""On a CPU, `auto` chooses bf16 if its matmuls are at least this much faster than fp32."""


def fit_precision(draft: Draft) -> None:
    asked, report = draft["precision"], draft.report
    if asked == "auto":
        used, reason = best_precision(report)
        draft.set("precision", used, reason, kind="choice")
        return
    dtype = asked.split("_")[0]
    if dtype in report.dtypes:
        if report.engine == "mlx" and dtype != asked:
            draft.set("precision", dtype, "MLX does not support autocast; trained weights are kept in fp32")
        return
    title = report.name.upper()
    full_name = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[dtype]
    for other in ("fp16", "bf16", "fp32"):
        if other in report.dtypes:
            keeps = asked.endswith("_autocast") and other != "fp32" and report.engine != "mlx"
            suffix = "_autocast" if keeps else ""
            draft.set(
                "precision",
                other + suffix,
                f"{title} backend doesn't support {full_name} here",
                kind="change",
            )
            return
    draft.problems.append(UserError(f"No supported precision for {report.name}.", do="see: crosstune doctor"))


def best_precision(report: BackendReport) -> tuple[str, str]:
    """Return the precision that `auto` chooses on a backend, with the reason."""
    if report.device == "cpu":
        if "bf16" in report.dtypes and report.bf16_speedup >= BF16_WORTH_IT:
            reason = f"bf16 matmuls are {report.bf16_speedup:.1f}x as fast as fp32"
            return "bf16_autocast", reason
        return "fp32", "bf16 is not faster on this CPU"
    if "bf16" in report.dtypes:
        return "bf16", "bf16 is supported; trained weights are kept in fp32"
    if "fp16" in report.dtypes and report.name != "mps":
        short = "fp16" if report.engine == "mlx" else "fp16_autocast"
        return short, "bf16 is not supported; fp16 with loss scaling"
    overflows = "bf16 is not supported, and fp16 is prone to overflow"
    return "fp32", overflows if "fp16" in report.dtypes else "no 16-bit dtype is supported"


FAST_BY_DEFAULT = ("cuda", "cpu")
"""Backends on which `auto` may choose the fast layers."""


def fit_kernels(draft: Draft, *, method: str, quantizer: str, world_size: int) -> None:
    """Resolve --kernels auto, and replace fast where it cannot run. Opening the model checks its classes."""
    asked, reason = draft["kernels"], _why_general(draft, method, world_size)
    if asked == "auto":
        _choose(draft, reason, quantizer)
    elif asked == "fast" and draft.report.engine == "torch" and (why := reason or _model_reason(draft)):
        draft.set("kernels", "general", why)
    if draft["base_precision"] == "fp8" and draft["kernels"] == "general" and draft.report.engine == "torch":
        draft.warn(
            "base_precision", "only --kernels fast supports fp8 matmuls; general layers use --precision"
        )


def _choose(draft: Draft, reason: str | None, quantizer: str) -> None:
    """Choose the fast layers where they are preferred and supported; record a reason only if the model lacks them."""
    report = draft.report
    preferred = prefers_fast(report, draft["precision"], quantizer=quantizer)
    if not preferred or reason or draft["torch_compile"]:
        draft.values["kernels"] = "general"
    elif missing := _model_reason(draft):
        draft.set("kernels", "general", missing)
    else:
        draft.set("kernels", "fast", f"{report.name} has fused layers for LoRA on a frozen base")


def prefers_fast(report: BackendReport, precision: str, *, quantizer: str) -> bool:
    """Return whether LoRA uses the fast layers by default, because they were measured to be faster.

    These are NVIDIA GPUs in bf16 with flash attention and Triton, and CPUs with fast bf16 and an unquantized base.
    """
    if report.name == "cuda":
        return precision == "bf16" and report.has_flash_attention and report.has_triton
    fast_bf16 = report.bf16_speedup >= BF16_WORTH_IT
    return report.name == "cpu" and precision == "bf16_autocast" and fast_bf16 and quantizer == "none"


def _model_reason(draft: Draft) -> str | None:
    """Return why the model has no fast layers, or None if it has them or is unknown."""
    return (draft.facts.shape.why_general or None) if draft.facts.shape is not None else None


def fit_compile(draft: Draft, *, world_size: int) -> None:
    """Turn off --torch_compile where it has no effect or is untested."""
    if not draft["torch_compile"] or draft.report.engine != "torch":
        return
    if draft["kernels"] == "fast":
        draft.set("torch_compile", False, "the fast layers have their own kernels")
    elif world_size > 1 and shards_weights(draft["sharding_strategy"]):
        draft.set(
            "torch_compile",
            False,
            "sharded weights are not compiled; --sharding_strategy ddp replicates them",
        )


def _why_general(draft: Draft, method: str, world_size: int) -> str | None:
    if draft["recipe"] == "latent_diffusion":
        return "the fast layers are for language models"
    if draft["recipe"] == "judge" and draft["head"] == "scalar":
        return "the fast layers do not support a scalar head"
    if method != "lora":
        return f"the fast layers are for LoRA, not for {method}"
    if draft["lora_dropout"]:
        return "the fast layers do not support adapter dropout"
    if world_size > 1 and shards_weights(draft["sharding_strategy"]):
        return "the fast layers need unsharded weights; --sharding_strategy ddp replicates them"
    if draft["use_flash_attention"] is False:
        return "the fast layers need flash attention"
    return None


_CPP_COMPILERS = ("g++", "c++", "clang++", "cl")
_WITH_TRITON = ("cuda", "rocm", "xpu")


def check_compiler(plan: Plan) -> None:
    """Raise a UserError if --torch_compile is set but cannot work on this machine."""
    missing = missing_compiler(plan.backend.name) if plan.config.torch_compile else None
    if missing is not None:
        raise UserError(
            f"--torch_compile on {plan.backend.name} needs {missing}.",
            do=f"install {missing}, or remove --torch_compile",
        )


def missing_compiler(backend: str) -> str | None:
    """Return the compiler that torch.compile needs on a backend and this machine lacks."""
    if backend == "cpu" and not any(map(shutil.which, (os.environ.get("CXX") or "", *_CPP_COMPILERS))):
        return "a C++ compiler such as g++"
    if backend in _WITH_TRITON and importlib.util.find_spec("triton") is None:
        return "Triton"
    return None
