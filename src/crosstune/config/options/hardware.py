"""Options for the device, the precision and the processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from crosstune.config.conditions import (
    DEVICE_MEMORY,
    RECOMPUTATION,
    SEVERAL_DEVICES,
    SHARDED_MODEL,
    SHARDED_WEIGHTS,
    TORCH_ENGINE,
)
from crosstune.config.option import OnResume, check_duration, not_zero, option
from crosstune.core.backend import BACKENDS_PACKAGE
from crosstune.core.names import plugin_names

EMULATED_PACKAGE = "crosstune.emulate.devices"
PRECISIONS = ("auto", "fp32", "bf16", "fp16", "fp16_autocast", "bf16_autocast", "bf16_buffers_autocast")
SHARDING = ("full_shard", "shard_grad_op", "ddp", "no_shard", "hybrid_full_shard", "hybrid_shard_grad_op")


def _backend_names() -> Sequence[str]:
    return ("auto", *plugin_names(BACKENDS_PACKAGE))


def _emulated_names() -> Sequence[str]:
    return plugin_names(EMULATED_PACKAGE)


@dataclass(frozen=True, kw_only=True)
class HardwareOptions:
    backend: str = option(
        "auto",
        "Backend to train on; auto: the first available one",
        choices=_backend_names,
        env="FSDP_BACKEND",
        on_resume=OnResume.OWN_MACHINE,
    )
    emulate: str | None = option(
        None,
        "Do not train: try a few steps on this CPU and report whether the run would work on this backend",
        choices=_emulated_names,
        on_resume=OnResume.ONE_START,
    )
    precision: str = option(
        "auto",
        "Number format of weights and computation; auto: the best one that works on the backend",
        choices=PRECISIONS,
        on_resume=OnResume.OWN_MACHINE,
    )
    use_gradient_checkpointing: bool = option(
        False, "Recompute activations in the backward pass to save memory"
    )
    reentrant_checkpointing: bool = option(
        False, "Use torch's re-entrant gradient checkpointing", needs=(TORCH_ENGINE, RECOMPUTATION)
    )
    use_flash_attention: bool | None = option(None, "Use flash attention; unset: wherever it is available")
    kernels: str = option(
        "auto",
        "Decoder layers: general (from transformers) or fast, fused for adapters on a frozen base (Llama, Mistral, "
        "Qwen, Gemma, Phi-3); auto: fast for LoRA in bf16 on an NVIDIA GPU and on a CPU with fast 16-bit products",
        choices=("auto", "fast", "general"),
        needs=(TORCH_ENGINE,),
        on_resume=OnResume.OWN_MACHINE,
    )
    torch_compile: bool = option(
        False,
        "Compile the blocks of the model with torch.compile: the first steps take longer, by up to minutes, and the others "
        "less. Needs a C++ compiler on a CPU, and Triton on a GPU",
        needs=(TORCH_ENGINE,),
        on_resume=OnResume.OWN_MACHINE,
    )
    low_memory: bool = option(
        False, "Prefer less memory to more speed wherever there is a choice", on_resume=OnResume.FREE
    )
    world_size: int = option(
        -1,
        "Number of devices, with a process for each; -1 for all. On a CPU and on MLX the number of processes; -1 for one",
        low=-1,
        high=2**16,
        on_resume=OnResume.FREE,
        check=not_zero,
    )
    sharding_strategy: str = option(
        "full_shard",
        "How weights are divided over several devices",
        choices=SHARDING,
        needs=(SEVERAL_DEVICES, SHARDED_MODEL),
    )
    distributed_backend: str = option(
        "auto",
        "Communication library for several devices",
        choices=("auto", "nccl", "gloo", "xccl", "ring"),
        needs=(SEVERAL_DEVICES,),
    )
    use_cpu_offload: bool = option(
        False,
        "Keep sharded weights, gradients and optimizer moments in host memory",
        needs=(SEVERAL_DEVICES, SHARDED_MODEL, SHARDED_WEIGHTS),
    )
    use_activation_cpu_offload: bool = option(
        False,
        "Keep the activations that the backward pass needs in host memory",
        needs=(TORCH_ENGINE, DEVICE_MEMORY),
    )
    no_sync: bool = option(
        False,
        "Do not reduce gradients between the micro-batches of a step: faster, but each rank holds whole gradients",
        needs=(SEVERAL_DEVICES, SHARDED_MODEL, SHARDED_WEIGHTS),
    )


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    master_addr: str = option(
        "localhost",
        "Address of the machine with the first process; overrides nothing that a launcher has set",
        needs=(SEVERAL_DEVICES, SHARDED_MODEL),
        on_resume=OnResume.ONE_START | OnResume.FREE,
    )
    master_port: int = option(
        12355,
        "Port on that machine; unset: a free one on a single machine, 29500 on several",
        low=1,
        high=65535,
        needs=(SEVERAL_DEVICES, SHARDED_MODEL),
        on_resume=OnResume.ONE_START | OnResume.FREE,
    )
    max_restarts: int = option(
        3,
        "How often crosstune starts the processes again, from the newest checkpoint, after one was killed or crashed",
        low=0,
        high=10_000,
        needs=(SEVERAL_DEVICES,),
        on_resume=OnResume.FREE,
    )
    connect_timeout: str = option(
        "5m",
        "How long the processes wait for each other at the start",
        needs=(SEVERAL_DEVICES,),
        on_resume=OnResume.FREE,
        check=check_duration,
    )
    collective_timeout: str = option(
        "30m",
        "How long a process may wait in one collective or make no progress; after that the run is ended and the process named",
        needs=(SEVERAL_DEVICES,),
        env="NCCL_TIMEOUT",
        on_resume=OnResume.FREE,
        check=check_duration,
    )
    heartbeat_timeout: str | None = option(
        None,
        "How long NCCL's own watchdog may be silent; unset: as long as --collective_timeout",
        needs=(SEVERAL_DEVICES, SHARDED_MODEL),
        env="TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
        on_resume=OnResume.FREE,
        check=check_duration,
    )
    debug_collectives: bool = option(
        False,
        "Compare operation, shape and dtype of each collective between the processes first: a mismatch is an error at once, "
        "instead of a hang. Slow",
        needs=(SEVERAL_DEVICES, SHARDED_MODEL),
        on_resume=OnResume.FREE,
    )
