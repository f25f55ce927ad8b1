"""Choose --kernels, the fast layers for adapters where they can run, and whether the general ones are compiled."""

from __future__ import annotations

from crosstune.config.conditions import shards_weights
from crosstune.config.draft import Draft


def fit_kernels(draft: Draft, *, method: str, world_size: int) -> None:
    """Replace `auto`, and `fast` where no model can use it; what depends on the model is checked with it."""
    asked, reason = draft["kernels"], _why_general(draft, method, world_size)
    if asked == "auto":
        draft.values["kernels"] = "general"  # until the fast layers have been measured on a GPU
    elif asked == "fast" and reason is not None and draft.report.engine == "torch":
        draft.set("kernels", "general", reason)
    if draft["base_precision"] == "fp8" and draft["kernels"] == "general" and draft.report.engine == "torch":
        draft.warn(
            "base_precision", "the general layers multiply in --precision; --kernels fast multiplies in fp8"
        )


def fit_compile(draft: Draft, *, world_size: int) -> None:
    """Turn --torch_compile off where it would do nothing or has not been tried."""
    if not draft["torch_compile"] or draft.report.engine != "torch":
        return
    if draft["kernels"] == "fast":
        draft.set("torch_compile", False, "the fast layers have kernels of their own")
    elif world_size > 1 and shards_weights(draft["sharding_strategy"]):
        draft.set(
            "torch_compile",
            False,
            "sharded weights are not compiled; --sharding_strategy ddp keeps them whole",
        )


def _why_general(draft: Draft, method: str, world_size: int) -> str | None:
    if draft["recipe"] == "latent_diffusion":
        return "the fast layers are those of language models"
    if method != "lora":
        return f"the fast layers are for LoRA, not for {method}"
    if draft["lora_dropout"]:
        return "the fast layers have no dropout on adapters"
    if world_size > 1 and shards_weights(draft["sharding_strategy"]):
        return "the fast layers need whole weights; --sharding_strategy ddp keeps them whole"
    if draft["use_flash_attention"] is False:
        return "the fast layers have no attention that holds its scores"
    return None
