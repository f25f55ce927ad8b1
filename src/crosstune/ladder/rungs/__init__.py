"""The rungs of the ladder: a table of crosstune's own; any other rung is a file in this folder, found by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from crosstune.config.conditions import shards_weights
from crosstune.config.resolve.fit_compute import missing_compiler
from crosstune.config.time_limits import LONGEST_S, SHORTEST_S, limits_of
from crosstune.core.errors import UserError
from crosstune.core.names import load_plugin, plugin_names
from crosstune.ladder.rung import (
    AsGood,
    Change,
    Gain,
    LossPromise,
    NotApplicable,
    Rung,
    SameBits,
    Situation,
    Within,
)

_CLOSE = Within(bound=1e-5)
_COSINE = AsGood(bound=0.02, metric="latent_cosine", higher_is_better=True)
_TIMEOUTS = {"collective_timeout": "30m", "heartbeat_timeout": "30m"}
_CHECKPOINTING, _OFFLOAD = "use_gradient_checkpointing", {"use_activation_cpu_offload": True}
_DDP = {"sharding_strategy": "ddp", "use_cpu_offload": False}

FUSED = {"adamw": "fused_adamw", "adam": "fused_adam"}
MAX_DOUBLINGS = 4
ROUNDED_TO = 64
FULL_ENOUGH = 0.8
"""The ratio of mean to longest length above which packing gains nothing."""
WORTHWHILE = 1.1
"""Minimum speed of bf16 relative to fp32 matmuls that is worth a trial."""
CORES_EACH = 2
"""CPU cores per process."""


def _fused_optimizer(now: Situation) -> list[Change]:
    """Update all weights in one kernel."""
    if now.plan.engine != "torch":
        raise NotApplicable("MLX has one form of each optimizer")
    if now.config.optimizer not in FUSED:
        raise NotApplicable(f"{now.config.optimizer} has no fused version")
    if now.config.optimizer == "adamw" and now.plan.backend.device == "cuda":
        raise NotApplicable("adamw is fused on a GPU already")
    return [{"optimizer": FUSED[now.config.optimizer]}]


def _larger_batch(now: Situation) -> list[Change]:
    """Use larger micro-batches with the same rows per step."""
    batch, micro_batches = now.config.batch_size, now.config.gradient_accumulation_steps
    if now.config.rows_per_step:
        raise NotApplicable("--rows_per_step sets how a step is divided")
    changes: list[Change] = []
    while micro_batches % 2 == 0 and len(changes) < MAX_DOUBLINGS:
        batch, micro_batches = batch * 2, micro_batches // 2
        changes.append({"batch_size": batch, "gradient_accumulation_steps": micro_batches})
    if not changes:
        raise NotApplicable(
            "a step has an odd number of micro-batches" if micro_batches > 1 else "a step is one micro-batch"
        )
    return changes


def _packing(now: Situation) -> list[Change]:
    """Pack examples into full rows, with about the same number of examples per step."""
    config = now.config
    if config.recipe != "sft":
        raise NotApplicable("only rows of the sft recipe are packed by the ladder")
    if config.packing:
        raise NotApplicable("rows are packed already")
    if not now.mean_tokens or now.mean_tokens > FULL_ENOUGH * now.longest_tokens:
        raise NotApplicable("all examples have about the same length")
    rows = config.batch_size * config.gradient_accumulation_steps
    wanted = max(now.longest_tokens, round(rows * now.mean_tokens))
    length = min(config.context_length, -(-wanted // ROUNDED_TO) * ROUNDED_TO)
    per_step = max(1, round(rows * now.mean_tokens / length))
    return [
        {
            "packing": True,
            "context_length": length,
            "batch_size": min(config.batch_size, per_step),
            "gradient_accumulation_steps": max(1, per_step // min(config.batch_size, per_step)),
        }
    ]


def _precision(now: Situation) -> list[Change]:
    """Compute in 16 bits if the device is faster with them."""
    backend = now.plan.backend
    if now.plan.precision != "fp32":
        raise NotApplicable(f"the precision is {now.plan.precision} already")
    if "bfloat16" in backend.dtypes and (backend.device != "cpu" or backend.bf16_speedup >= WORTHWHILE):
        return [{"precision": "bf16_autocast"}, {"precision": "bf16"}]
    if "float16" in backend.dtypes and backend.device != "cpu":
        return [{"precision": "fp16_autocast"}]
    raise NotApplicable(f"16-bit matmuls are not faster than fp32 on this {backend.name}")


def _processes(now: Situation) -> list[Change]:
    """Divide a step across several processes."""
    plan, config = now.plan, now.config
    if plan.world_size > 1:
        raise NotApplicable(f"{plan.world_size} processes are used already")
    if plan.engine != "torch":
        raise NotApplicable("MLX uses one process on one device")
    rows = config.batch_size * config.gradient_accumulation_steps
    on_cpu = plan.backend.device == "cpu"
    number = plan.machine.num_cores // CORES_EACH if on_cpu else len(plan.backend.devices)
    number = max((n for n in range(1, number + 1) if rows % n == 0), default=1)
    if number < 2:
        raise NotApplicable(
            f"{plan.machine.num_cores} cores are best used by one process"
            if on_cpu
            else "there is one device"
        )
    batch = min(config.batch_size, rows // number)
    if rows % (batch * number):
        raise NotApplicable(f"{rows} rows per step cannot be divided among {number} processes")
    return [
        {
            "world_size": number,
            "sharding_strategy": "ddp",
            "batch_size": batch,
            "gradient_accumulation_steps": rows // (batch * number),
        }
    ]


# Name -> order, title, gain, promise, and the options to set, or the function that proposes them.
_RUNGS: Mapping[str, tuple[int, str, Gain, LossPromise, Change | Callable[[Situation], list[Change]]]] = {
    "time_limits": (10, "timeouts that abort a hang", "safety", SameBits(), _TIMEOUTS),
    "data_loading": (20, "data loading", "speed", SameBits(), {}),
    "attention": (30, "fused attention", "speed", Within(bound=1e-2), {"use_flash_attention": True}),
    "precision": (40, "16-bit arithmetic", "speed", AsGood(bound=0.02), _precision),
    "fast_layers": (45, "fast layers", "speed", Within(bound=1e-2), {"kernels": "fast"}),
    "compile": (47, "compiled blocks", "speed", Within(bound=1e-2), {"torch_compile": True}),
    "fp8_base": (47, "fp8 base", "speed", AsGood(bound=0.02), {"base_precision": "fp8"}),
    "fused_optimizer": (50, "fused optimizer", "speed", Within(bound=1e-3), _fused_optimizer),
    "recomputation_off": (60, "no gradient checkpointing", "speed", _CLOSE, {_CHECKPOINTING: False}),
    "packing": (70, "packing", "speed", AsGood(bound=0.1), _packing),
    "larger_batch": (80, "larger micro-batches", "speed", Within(bound=1e-3), _larger_batch),
    "gradient_checkpointing": (90, "gradient checkpointing", "memory", _CLOSE, {_CHECKPOINTING: True}),
    "activation_offload": (100, "activations in host memory", "memory", SameBits(), _OFFLOAD),
    "optimizer_8bit": (110, "8-bit optimizer", "memory", AsGood(bound=0.02), {"optimizer": "adamw_8bit"}),
    "cosine_latent_loss": (120, "cosine latent loss", "safety", _COSINE, {"latent_loss": "cosine"}),
    "replicas": (130, "replicas (DDP)", "speed", _CLOSE, _DDP),
    "processes": (140, "several processes", "speed", _CLOSE, _processes),
    "checkpoint_rotation": (150, "checkpoint rotation", "safety", SameBits(), {"keep_last_n": 3}),
}


def _why_not(name: str, now: Situation) -> str:
    """Return why a rung of the table does not apply; empty if it does."""
    config, plan, backend = now.config, now.plan, now.plan.backend
    sharded = plan.world_size > 1 and shards_weights(config.sharding_strategy)
    limits, missing = limits_of(config), missing_compiler(backend.name)
    ends_a_hang = SHORTEST_S <= limits.collective_s <= LONGEST_S and limits.heartbeat_s <= LONGEST_S
    reasons: dict[str, dict[str, object]] = {
        "time_limits": {
            "there is only one process": plan.world_size == 1,
            f"the timeout of a collective is {limits.collective_s:g} s already": ends_a_hang,
        },
        "data_loading": {"it is always on: a thread prepares micro-batches ahead of the step": True},
        "attention": {
            "{} is used already ({})".format(*plan.attention): config.use_flash_attention is not False,
            f"no fused kernel ran on {backend.name}": not backend.has_flash_attention,
        },
        "fast_layers": {
            "the fast layers train LoRA adapters of language models with torch, and latent diffusion": (
                config.recipe != "latent_diffusion"
                and (plan.engine, plan.method, config.recipe) != ("torch", "lora", "sft")
            ),
            "the fused blocks for latent diffusion need an NVIDIA GPU": (
                config.recipe == "latent_diffusion" and backend.name != "cuda"
            ),
            "the fast layers are used already": config.kernels == "fast",
            "the fast layers need whole weights": sharded,
        },
        "compile": {
            "torch.compile needs torch; MLX compiles its steps on a GPU anyway": plan.engine != "torch",
            "the blocks are compiled already": config.torch_compile,
            "the fast layers bring their own kernels": config.kernels == "fast",
            "sharded weights are not compiled": sharded,
            f"torch.compile needs {missing} on {backend.name}": missing,
        },
        "fp8_base": {
            "fp8 matmuls need an NVIDIA GPU": backend.name != "cuda",
            "only the fast layers with LoRA support fp8 matmul": config.kernels != "fast"
            or plan.method != "lora",
            "the base uses fp8 matmul already": config.base_precision == "fp8",
        },
        "recomputation_off": {
            "gradient checkpointing is off": not config.use_gradient_checkpointing,
            "--low_memory prefers memory to speed": config.low_memory,
        },
        "gradient_checkpointing": {"gradient checkpointing is on already": config.use_gradient_checkpointing},
        "activation_offload": {
            f"{backend.name} has no separate device memory": (
                plan.engine != "torch" or backend.device == "cpu" or backend.unified_memory
            ),
            "activations are in host memory already": config.use_activation_cpu_offload,
        },
        "optimizer_8bit": {
            f"{config.optimizer} has no 8-bit version": config.optimizer not in ("adamw", "fused_adamw"),
            "the moments of adapters are small": plan.method in ("lora", "dora"),
            f"bitsandbytes does not work on {backend.name} on this machine": "bnb" not in backend.quantizers,
        },
        "cosine_latent_loss": {
            "only latent_diffusion has a latent loss": config.recipe != "latent_diffusion",
            "the latent loss is the cosine already": config.latent_loss == "cosine",
            "--loss_type l2t does not use a latent loss": config.loss_type == "l2t",
        },
        "replicas": {
            "one process has the whole model": plan.world_size == 1,
            "the processes are replicas already": not sharded,
        },
        "checkpoint_rotation": {
            f"only the newest {config.keep_last_n} are kept already": config.keep_last_n <= 3
        },
    }
    return next((reason for reason, holds in reasons.get(name, {}).items() if holds), "")


def _propose(
    name: str, change: Change | Callable[[Situation], list[Change]]
) -> Callable[[Situation], list[Change]]:
    """Return the function that proposes the change of a row."""
    if callable(change):
        return change

    def propose(now: Situation) -> list[Change]:
        if reason := _why_not(name, now):
            raise NotApplicable(reason)
        return [change]

    return propose


def all_rungs() -> dict[str, Rung]:
    """Return the rungs by name, in the order of their trials."""
    found = {
        name: Rung(title=title, order=order, gain=gain, promise=promise, propose=_propose(name, change))
        for name, (order, title, gain, promise, change) in _RUNGS.items()
    }
    for name in plugin_names(__name__):
        rung = getattr(load_plugin(__name__, name, kind="rung"), "RUNG", None)
        if not isinstance(rung, Rung):
            raise UserError(f"The rung {name} defines no RUNG.", do="see docs/internals/add-a-rung.md")
        found[name] = rung
    return dict(sorted(found.items(), key=lambda item: (item[1].order, item[0])))
