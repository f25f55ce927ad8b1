"""Choose --kernels, the fast layers for adapters where they can run, and whether the general ones are compiled."""

from __future__ import annotations

from crosstune.config.conditions import shards_weights
from crosstune.config.draft import Draft
from crosstune.config.fit_precision import BF16_WORTH_IT
from crosstune.core.machine import BackendReport

FAST_BY_DEFAULT = ("cuda", "cpu")
"""The backends on which `auto` may choose the fast layers."""


def fit_kernels(draft: Draft, *, method: str, quantizer: str, world_size: int) -> None:
    """Resolve `auto`, and replace `fast` where it cannot run. The model's classes are checked when it is opened."""
    asked, reason = draft["kernels"], _why_general(draft, method, world_size)
    if asked == "auto":
        _choose(draft, reason, quantizer)
    elif asked == "fast" and draft.report.engine == "torch" and (why := reason or _model_reason(draft)):
        draft.set("kernels", "general", why)
    if draft["base_precision"] == "fp8" and draft["kernels"] == "general" and draft.report.engine == "torch":
        draft.warn(
            "base_precision", "the general layers multiply in --precision; --kernels fast multiplies in fp8"
        )


def _choose(draft: Draft, reason: str | None, quantizer: str) -> None:
    """Choose the fast layers where they are preferred and can run. Stay silent unless the model lacks them."""
    report = draft.report
    preferred = prefers_fast(report, draft["precision"], quantizer=quantizer)
    if not preferred or reason or draft["torch_compile"]:
        draft.values["kernels"] = "general"
    elif missing := _model_reason(draft):
        draft.set("kernels", "general", missing)
    else:
        draft.set("kernels", "fast", f"{report.name} has fused layers for LoRA on a frozen base")


def prefers_fast(report: BackendReport, precision: str, *, quantizer: str) -> bool:
    """Return whether LoRA uses the fast layers by default: where they were measured to be faster.

    That is an NVIDIA GPU in bf16 with flash attention and Triton, and a CPU with fast 16-bit products over weights that
    are not quantized.
    """
    if report.name == "cuda":
        return precision == "bf16" and report.has_flash_attention and report.has_triton
    fast_bf16 = report.bf16_speedup >= BF16_WORTH_IT
    return report.name == "cpu" and precision == "bf16_autocast" and fast_bf16 and quantizer == "none"


def _model_reason(draft: Draft) -> str | None:
    """Return why the model has no fast layers, as far as its configuration is known."""
    return (draft.facts.shape.why_general or None) if draft.facts.shape is not None else None


def fit_compile(draft: Draft, *, world_size: int) -> None:
    """Turn --torch_compile off where it would do nothing or has not been tried."""
    if not draft["torch_compile"] or draft.report.engine != "torch":
        return
    if draft["kernels"] == "fast":
        draft.set("torch_compile", False, "the fast layers have their own kernels")
    elif world_size > 1 and shards_weights(draft["sharding_strategy"]):
        draft.set(
            "torch_compile",
            False,
            "sharded weights are not compiled; --sharding_strategy ddp keeps them whole",
        )


def _why_general(draft: Draft, method: str, world_size: int) -> str | None:
    if draft["recipe"] == "latent_diffusion":
        return "the fast layers are for language models"
    if draft["recipe"] == "judge" and draft["head"] == "scalar":
        return "the fast layers have no scalar head"
    if method != "lora":
        return f"the fast layers are for LoRA, not for {method}"
    if draft["lora_dropout"]:
        return "the fast layers have no dropout on adapters"
    if world_size > 1 and shards_weights(draft["sharding_strategy"]):
        return "the fast layers need whole weights; --sharding_strategy ddp keeps them whole"
    if draft["use_flash_attention"] is False:
        return "the fast layers have no attention that holds its scores"
    return None
