"""Define the conditions for options to have an effect, and parse the options that conditions read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from crosstune.core.names import did_you_mean, plugin_names
from crosstune.core.quantization import Quantizer
from crosstune.core.schedule import SCHEDULES_WITH_FLOOR

TRACKERS_PACKAGE = "crosstune.tracking.trackers"
SCREENS = ("tqdm", "stdout")
NONE = "none"
"""No tracker; the value in other trainers."""


def targets_in(value: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in value.split(",") if part.strip()))


def trackers_in(value: str) -> list[str]:
    """Return the trackers in a value of --log_to."""
    return [name for name in targets_in(value) if name not in (*SCREENS, NONE)]


def screen_in(value: str) -> str:
    """Return the progress display; a bar if only trackers are listed."""
    return next((name for name in targets_in(value) if name in SCREENS), SCREENS[0])


def check_targets(value: str) -> str | None:
    """Return the accepted values of --log_to if a value is invalid."""
    names, known = targets_in(value), [*SCREENS, *plugin_names(TRACKERS_PACKAGE), NONE]
    accepted = f"one or more of {', '.join(known)}, separated by commas"
    for name in names:
        if name not in known:
            return f"{accepted}; {did_you_mean(name, known)}".rstrip("; ")
    if set(SCREENS) <= set(names):
        return "either tqdm or stdout, and any trackers"
    if NONE in names and trackers_in(value):
        return f"either {NONE} or trackers"
    return None if names else accepted


TRAIN_TYPE_PARTS: Mapping[str, tuple[str, str]] = {
    "full": ("full", "none"),
    "lora": ("lora", "none"),
    "qlora": ("lora", "auto"),
    "dora": ("dora", "none"),
    "llama_pro": ("llama_pro", "none"),
    "custom_lora": ("lora", "none"),
    "custom_qlora": ("lora", "auto"),
    "hqq_lora": ("lora", "hqq"),
    "hqq_dora": ("dora", "hqq"),
    "bnb_dora": ("dora", "bnb"),
    "bnb_llama_pro": ("llama_pro", "bnb"),
    "hqq_llama_pro": ("llama_pro", "hqq"),
}
"""Train type -> (method, quantizer)."""


ADAPTER_METHODS = ("lora", "dora")
REPLICATED = ("ddp", "no_shard")
"""Values of --sharding_strategy that replicate the model in every process."""


@dataclass(frozen=True, kw_only=True)
class ResolvedOptions:
    """A plan's resolved options and decisions."""

    options: Mapping[str, Any]
    engine: str
    method: str
    quantizer: Quantizer | None
    n_bits: int
    world_size: int

    def values(self) -> dict[str, Any]:
        """Return the values for placeholders in messages."""
        quantizer = self.quantizer.name if self.quantizer is not None else "none"
        decisions = {"engine": self.engine, "method": self.method, "world_size": self.world_size}
        return {**self.options, **decisions, "quantizer": quantizer, "n_bits": self.n_bits}


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A condition for an option to have an effect."""

    summary: str
    """Text after "only with" in the options page; empty if the option's help text says it."""
    holds: Callable[[ResolvedOptions], bool]
    otherwise: str = ""
    """Reason for no effect, a template for `ResolvedOptions.values`; by default made from the summary."""
    recipe: str = ""
    """The recipe that the option belongs to, if only one."""

    def reason(self, resolved: ResolvedOptions) -> str:
        plain = self.summary.replace("`", "")
        return self.otherwise.format(**resolved.values()) or f"has no effect without {plain}"


def shards_weights(strategy: str) -> bool:
    """Return whether a value of --sharding_strategy shards the weights."""
    return strategy not in REPLICATED


def idle_reason(needs: Sequence[Condition], resolved: ResolvedOptions) -> str | None:
    """Return the reason of the first unmet condition, or None."""
    failing = next((condition for condition in needs if not condition.holds(resolved)), None)
    return failing.reason(resolved) if failing is not None else None


def _with_trackers(*names: str) -> Condition:
    """Require one of these trackers in --log_to."""
    flags = [f"--log_to {name}" for name in names]
    return Condition(
        summary=" or ".join(f"`{flag}`" for flag in flags),
        holds=lambda now: bool({*names} & {*trackers_in(now.options["log_to"])}),
    )


def _with_recipe(name: str) -> Condition:
    return Condition(
        summary=f"`--recipe {name}`",
        holds=lambda now: now.options["recipe"] == name,
        otherwise="has no effect with the {recipe} recipe",
        recipe=name,
    )


def _with_option(*names: str) -> Condition:
    """Require one of these options to be neither 0 nor false."""
    return Condition(
        summary=" or ".join(f"`--{name}`" for name in names),
        holds=lambda now: any(now.options[name] for name in names),
    )


ADAPTERS = Condition(
    summary="lora or dora",
    holds=lambda now: now.method in ADAPTER_METHODS,
    otherwise="has no effect with method {method}",
)
LLAMA_PRO = Condition(
    summary="llama_pro",
    holds=lambda now: now.method == "llama_pro",
    otherwise="has no effect without a llama_pro train type",
)
BLOCKS_TO_ADD = Condition(
    summary="",
    holds=lambda now: not now.options["llama_pro_path"],
    otherwise="has no effect with --llama_pro_path: its model is already expanded",
)
QUANTIZED_BASE = Condition(
    summary="a quantized base",
    holds=lambda now: now.quantizer is not None,
)
QUANTIZING_TRAIN_TYPE = Condition(
    summary="a train type that quantizes",
    holds=lambda now: TRAIN_TYPE_PARTS[now.options["train_type"]][1] != "none",
    otherwise="has no effect with train_type {train_type}",
)
SCALES_BY_GROUP = Condition(
    summary="",
    holds=lambda now: now.quantizer is not None and now.n_bits not in now.quantizer.bits_by_row,
    otherwise="has no effect with {quantizer} and {n_bits} bits: they use one scale per row",
)
DOUBLE_QUANT = Condition(
    summary="",
    holds=lambda now: now.quantizer is not None and now.n_bits in now.quantizer.bits_with_double_quant,
    otherwise="has no effect with {quantizer} and {n_bits} bits",
)
STREAMED_LOADING = Condition(
    summary="a quantized base or llama_pro",
    holds=lambda now: now.quantizer is not None or now.method == "llama_pro",
)
TORCH_ENGINE = Condition(
    summary="the torch engine",
    holds=lambda now: now.engine == "torch",
    otherwise="has no effect on the MLX engine",
)
MLX_ENGINE = Condition(
    summary="",
    holds=lambda now: now.engine == "mlx",
    otherwise="its memory limits and `compile` have no effect outside the MLX engine; its other settings have",
)
LATENT_DIFFUSION = _with_recipe("latent_diffusion")
SEVERAL_DEVICES = Condition(
    summary="several devices",
    holds=lambda now: now.world_size > 1,
    otherwise="has no effect with one device",
)
SHARDED_MODEL = Condition(
    summary="",
    holds=lambda now: now.engine != "mlx",
    otherwise="has no effect on MLX, which replicates the model",
)
SHARDED_WEIGHTS = Condition(
    summary="a strategy that shards",
    holds=lambda now: shards_weights(now.options["sharding_strategy"]),
    otherwise="has no effect with --sharding_strategy {sharding_strategy}, which replicates the model",
)
DEVICE_MEMORY = Condition(
    summary="a device with dedicated memory",
    holds=lambda now: now.options["backend"] != "cpu",
    otherwise="has no effect on a CPU: activations are already in host memory",
)
RECOMPUTATION = _with_option("use_gradient_checkpointing")
CLIPPING = _with_option("apply_gradient_clipping")
SCHEDULE_WITH_FLOOR = Condition(
    summary=f"{', '.join(SCHEDULES_WITH_FLOOR)}",
    holds=lambda now: now.options["lr_scheduler"] in SCHEDULES_WITH_FLOOR,
    otherwise="has no effect with lr_scheduler {lr_scheduler}",
)
EVALUATION = Condition(
    summary="evaluation",
    holds=lambda now: not now.options["skip_eval"] and now.options["eval_samples"] > 0,
)
NO_SKIP_EVAL = Condition(
    summary="evaluation",
    holds=lambda now: not now.options["skip_eval"],
)
SAVING = _with_option("save_steps", "save_minutes")
EVALUATIONS = _with_option("eval_steps")
RESUMING = Condition(
    summary="`--resume`",
    holds=lambda now: now.options["resume"] != "none",
)
PROJECTS = _with_trackers("wandb", "weave", "trackio")
TRACKER_GROUPS = _with_trackers("wandb", "trackio")
TRACKER_OWNERS = _with_trackers("wandb", "weave")
JUDGE = _with_recipe("judge")
PROFILE = _with_option("profile", "profile_memory")
