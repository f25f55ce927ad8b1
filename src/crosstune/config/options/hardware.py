"""Options for the device, the precision and the processes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from crosstune.config.conditions import SFT, TORCH_ENGINE, Condition, shards_weights, with_option
from crosstune.config.option import OnResume, backend_choices, check_duration, not_zero, option
from crosstune.core.names import plugin_names

SEVERAL_DEVICES = Condition("several devices", lambda now: now["world_size"] > 1)
SHARDED_MODEL = Condition("", lambda now: now["engine"] != "mlx", "on MLX, which replicates the model")
SHARDED_WEIGHTS = Condition("a strategy that shards", lambda now: shards_weights(now["sharding_strategy"]))
DEVICE_MEMORY = Condition("a device with dedicated memory", lambda now: now["backend"] != "cpu")
RECOMPUTATION = with_option("use_gradient_checkpointing")

EMULATED_PACKAGE = "crosstune.emulate.devices"
PRECISIONS = ("auto", "fp32", "bf16", "fp16", "fp16_autocast", "bf16_autocast", "bf16_buffers_autocast")
SHARDING = ("full_shard", "shard_grad_op", "ddp", "no_shard", "hybrid_full_shard", "hybrid_shard_grad_op")


@dataclass(frozen=True, kw_only=True)
class HardwareOptions:
    backend: str = option(
        "auto",
        "Backend to train on; auto: the first available",
        choices=backend_choices,
        env="FSDP_BACKEND",
        on_resume=OnResume.OWN_MACHINE,
    )
    emulate: str | None = option(
        None,
        "Emulate a few steps of this backend on the CPU instead of training, and report whether the run would work on it",
        choices=partial(plugin_names, EMULATED_PACKAGE),
        on_resume=OnResume.ONE_START,
    )
    precision: str = option(
        "auto",
        "Precision of weights and computation; auto: the best the backend supports",
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
        "Decoder layers: general (transformers) or fast (fused, for adapters on a frozen base: Llama, Mistral, Qwen, "
        "Gemma, Phi-3; and for latent diffusion); auto: fast for LoRA in bf16 on NVIDIA GPUs, and on CPUs",
        choices=("auto", "fast", "general"),
        needs=(TORCH_ENGINE,),
        on_resume=OnResume.OWN_MACHINE,
    )
    torch_compile: bool = option(
        False,
        "Compile the model's blocks with torch.compile: the first steps are slower, by up to minutes, the others faster; "
        "needs a C++ compiler on a CPU, Triton on a GPU",
        needs=(TORCH_ENGINE,),
        on_resume=OnResume.OWN_MACHINE,
    )
    low_memory: bool = option(False, "Prefer low memory use to speed", on_resume=OnResume.FREE)
    world_size: int = option(
        -1,
        "Number of devices, one process each; -1: all. On CPU and MLX, the number of processes; -1: one",
        low=-1,
        high=2**16,
        on_resume=OnResume.FREE,
        check=not_zero,
    )
    sharding_strategy: str = option(
        "full_shard",
        "How the model is sharded or replicated across devices",
        choices=SHARDING,
        needs=(SEVERAL_DEVICES, SHARDED_MODEL),
    )
    context_parallel: int = option(
        1,
        "Number of devices that divide the tokens of each row, for rows too long for one; the general layers compute them",
        low=1,
        high=1024,
        needs=(SFT, TORCH_ENGINE, SEVERAL_DEVICES),
        on_resume=OnResume.FREE,
    )
    distributed_backend: str = option(
        "auto",
        "Communication library",
        choices=("auto", "nccl", "gloo", "xccl", "ring"),
        needs=(SEVERAL_DEVICES,),
    )
    use_cpu_offload: bool = option(
        False,
        "Keep sharded weights, gradients and optimizer state in host memory",
        needs=(SEVERAL_DEVICES, SHARDED_MODEL, SHARDED_WEIGHTS),
    )
    use_activation_cpu_offload: bool = option(
        False,
        "Keep activations for the backward pass in host memory",
        needs=(TORCH_ENGINE, DEVICE_MEMORY),
    )
    no_sync: bool = option(
        False,
        "Reduce gradients once per step instead of once per micro-batch: faster, but every rank stores all gradients",
        needs=(SEVERAL_DEVICES, SHARDED_MODEL, SHARDED_WEIGHTS),
    )


_several = partial(option, needs=(SEVERAL_DEVICES,), on_resume=OnResume.FREE)
_sharded = partial(option, needs=(SEVERAL_DEVICES, SHARDED_MODEL), on_resume=OnResume.FREE)
_one_start = OnResume.ONE_START | OnResume.FREE


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    master_addr: str = _sharded(
        "localhost", "Address of the rank 0 node, unless set by a launcher", on_resume=_one_start
    )
    master_port: int | None = _sharded(
        None,
        "Port on the rank 0 node; unset: a free port on a single node, 29500 on multiple nodes",
        low=1,
        high=65535,
        on_resume=_one_start,
    )
    max_restarts: int = _several(
        3,
        "Maximum number of restarts, from the newest checkpoint, after a process was killed or crashed",
        high=10_000,
    )
    connect_timeout: str = _several(
        "5m", "Time limit for all processes to connect at the start", check=check_duration
    )
    collective_timeout: str = _several(
        "30m",
        "Abort and report the stuck rank after this long in a collective or without progress",
        env="NCCL_TIMEOUT",
        check=check_duration,
    )
    heartbeat_timeout: str | None = _sharded(
        None,
        "Time limit for the heartbeat of NCCL's watchdog; unset: --collective_timeout",
        env="TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
        check=check_duration,
    )
    debug_collectives: bool = _sharded(
        False,
        "Compare the operation, shape and dtype of each collective between processes before it runs: a mismatch becomes "
        "an error instead of a hang; slow",
    )
