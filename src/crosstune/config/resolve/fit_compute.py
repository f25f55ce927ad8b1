"""Resolve --precision, --kernels and --torch_compile for the backend."""

from __future__ import annotations

import importlib.util
import os
import shutil

from crosstune.config.resolve.plan import Draft, Plan
from crosstune.core.errors import UserError
from crosstune.estimate.machine import BackendReport

BF16_WORTH_IT = 1.3
"""On a CPU, `auto` chooses bf16 if its matmuls are at least this much faster than fp32."""
NARROWEST_IN_FP32 = 512
"""In fp32 on a CPU, `auto` chooses the fast layers from this hidden size on; measured with 576."""


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
    full_name = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[dtype]
    other = next((other for other in ("fp16", "bf16", "fp32") if other in report.dtypes), None)
    if other is None:
        draft.refuse(f"No supported precision for {report.name}.", do="see: crosstune doctor")
        return
    keeps = asked.endswith("_autocast") and other != "fp32" and report.engine != "mlx"
    reason = f"{report.name.upper()} backend doesn't support {full_name} here"
    draft.set("precision", other + "_autocast" * keeps, reason, kind="change")


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


def fit_kernels(draft: Draft) -> None:
    """Resolve --kernels auto, and replace fast if it cannot run. Opening the model checks its classes."""
    asked, report, shape = draft["kernels"], draft.report, draft.facts.shape
    reason, missing = _why_general(draft), shape.why_general if shape is not None else ""
    if asked == "auto":
        is_diffusion = draft["recipe"] == "latent_diffusion"
        preferred = not is_diffusion and prefers_fast(
            report, draft["precision"], quantizer=draft.quantizer, hidden=shape.hidden if shape else 0
        )
        if not preferred or reason or draft["torch_compile"]:
            draft.values["kernels"] = "general"
        elif missing:
            draft.set("kernels", "general", missing)
        else:
            draft.set("kernels", "fast", f"{report.name} has fused layers for LoRA on a frozen base")
    elif asked == "fast" and report.engine == "torch" and (reason or missing):
        draft.set("kernels", "general", reason or missing)
    if draft["base_precision"] == "fp8" and draft["kernels"] == "general" and report.engine == "torch":
        reason = "only --kernels fast supports fp8 matmuls; general layers use --precision"
        stored = draft.quantizer == "fp8"
        draft.warn("base_precision", reason if stored else f"has no effect with --kernels general: {reason}")


def prefers_fast(report: BackendReport, precision: str, *, quantizer: str, hidden: int) -> bool:
    """True if the fast layers were measured to be faster: NVIDIA GPUs in bf16 with flash attention and Triton, and CPUs
    with an unquantized base, in autocast if their bf16 is fast, otherwise in fp32 with layers of this width."""
    if report.name == "cuda":
        return precision == "bf16" and report.has_flash_attention and report.has_triton
    if report.name != "cpu" or quantizer != "none":
        return False
    if report.bf16_speedup >= BF16_WORTH_IT:
        return precision == "bf16_autocast"
    return precision == "fp32" and hidden >= NARROWEST_IN_FP32


def fit_compile(draft: Draft) -> None:
    """Turn off --torch_compile if it has no effect or is untested."""
    if not draft["torch_compile"] or draft.report.engine != "torch":
        return
    if draft["kernels"] == "fast":
        draft.set("torch_compile", False, "the fast layers have their own kernels")
    elif draft.num_shards > 1:
        reason = "sharded weights are not compiled; --sharding_strategy ddp replicates them"
        draft.set("torch_compile", False, reason)


def _why_general(draft: Draft) -> str | None:
    if draft["recipe"] == "latent_diffusion":
        if draft["dropout"]:
            return "the fused blocks do not support dropout"
        if draft.num_shards > 1:
            return "the fused blocks need unsharded weights; --sharding_strategy ddp replicates them"
        return "the fused blocks need flash attention" if draft["use_flash_attention"] is False else None
    if draft["context_parallel"] > 1 and draft.world_size > 1:
        return "the fast layers attend to whole rows, not to rows divided by --context_parallel"
    if draft["recipe"] == "judge" and draft["head"] == "scalar":
        return "the fast layers do not support a scalar head"
    if draft.method != "lora":
        return f"the fast layers are for LoRA, not for {draft.method}"
    if draft["lora_dropout"]:
        return "the fast layers do not support adapter dropout"
    for option in ("modules_to_save", "add_tokens"):
        if draft[option]:
            return f"the fast layers train adapters only, not --{option}"
    if draft.num_shards > 1:
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
