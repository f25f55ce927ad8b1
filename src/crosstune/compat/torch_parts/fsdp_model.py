"""Connect processes, shard a model with FSDP2 or run it whole, and check a machine, for MPSFSDPWrapper."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import platform
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecisionPolicy, ShardingStrategy
from torch.nn.modules.batchnorm import _BatchNorm

from crosstune.compat.torch_parts.fsdp_config import MPSFSDPConfig
from crosstune.core.errors import UserError
from crosstune.torch_engine.capabilities import DTYPES, working_dtypes
from crosstune.torch_engine.device import clear_cache
from crosstune.torch_engine.quantized import StoredWeight
from crosstune.torch_engine.sharding.local_shard import free_gathered, local_part, sharded_modules
from crosstune.torch_engine.sharding.shard import REPLICAS, SHARDS, STRATEGIES, shard
from crosstune.torch_engine.sharding.staged_backend import NAME, prepare_mps, register_staged_backend

FALLBACK = "PYTORCH_ENABLE_MPS_FALLBACK"
LOG = logging.getLogger("crosstune.mps_fsdp")


def find_device(model: nn.Module | None = None) -> torch.device:
    """Return the GPU of a model if it is on one; otherwise MPS, CUDA or the CPU."""
    for parameter in model.parameters() if model is not None else ():
        if parameter.device.type not in ("cpu", "meta"):
            return parameter.device
    if torch.backends.mps.is_available():
        return torch.device("mps")
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def usable_dtype(wanted: torch.dtype, device: torch.device) -> torch.dtype:
    """Return a dtype that computes correctly on the device: bfloat16 falls back to float16, and float16 to float32."""
    works = working_dtypes(device.type, notes=[])
    order = {torch.bfloat16: ("bf16", "fp16"), torch.float16: ("fp16",)}.get(wanted, ())
    return next((DTYPES[name] for name in order if name in works), torch.float32)


def list_adjustments(config: MPSFSDPConfig) -> list[str]:
    """Return a sentence for each setting that has no effect."""
    no_fallback = config.fallback_to_cpu_ops and os.environ.get(FALLBACK) != "1"
    found = {
        "backward_prefetch: FSDP2 always gathers the next layer before it computes the gradients of "
        "this one": config.backward_prefetch is not BackwardPrefetch.BACKWARD_PRE,
        "limit_all_gathers: FSDP2 always keeps at most two gathered layers": not config.limit_all_gathers,
        "use_orig_params: FSDP2 always keeps the original parameters": not config.use_orig_params,
        f"fallback_to_cpu_ops: set {FALLBACK}=1 before Python starts; it applies to all operators": no_fallback,
    }
    return [sentence for sentence, applies in found.items() if applies]


def check_mps_fsdp_compatibility() -> dict[str, Any]:
    """Try dtypes and FSDP2 on this machine, and return the results, with warnings."""
    device, notes = find_device(), []  # type: ignore[var-annotated]
    is_mps = torch.backends.mps.is_available()
    dtypes = working_dtypes(device.type, notes=notes)
    if not is_mps:
        is_built = torch.backends.mps.is_built()
        reason = "needs macOS 13 on a Mac" if is_built else "this torch was built without it"
        notes.append(f"MPS is not available ({reason}); {device.type} is used")
    elif os.environ.get(FALLBACK) != "1":
        notes.append(f"operators without a Metal kernel fail: set {FALLBACK}=1 before starting Python")
    problem: str | None = None  # unknown: all connected processes would have to try it together
    if not dist.is_initialized():
        connect_alone()
        try:
            problem = fsdp_problem(device)
        finally:
            disconnect()
    if problem:
        notes.append(f"FSDP2 does not run on {device.type}: {problem}")
    return {
        "mps_available": is_mps,
        "mps_built": torch.backends.mps.is_built(),
        "device": device.type,
        "pytorch_version": torch.__version__,
        "macos_version": platform.mac_ver()[0] or None,
        "float16_supported": "fp16" in dtypes,
        "bfloat16_supported": "bf16" in dtypes,
        "distributed_available": dist.is_available(),
        "gloo_available": dist.is_available() and dist.is_gloo_available(),
        "backend": "gloo",
        "fsdp_supported": None if problem is None else not problem,
        "warnings": notes,
    }


def connect(config: MPSFSDPConfig) -> None:
    """Join the other processes unless the program has done so, and set world_size and rank from the group."""
    if not dist.is_initialized():
        if config.world_size > 1:
            dist.init_process_group(
                "gloo", init_method=config.init_method, world_size=config.world_size, rank=config.rank
            )
        elif int(os.environ.get("WORLD_SIZE", "1")) > 1:  # started by torchrun
            dist.init_process_group("gloo", init_method="env://")
        else:
            connect_alone()
    size, rank = dist.get_world_size(), dist.get_rank()
    if config.world_size not in (1, size):
        raise UserError(
            f"world_size={config.world_size} does not match the {size} processes that are connected.",
            do="pass the world_size and rank of torch.distributed, or remove them",
        )
    config.world_size, config.rank = size, rank


def connect_alone() -> None:
    """Make a process group of one, without a port; FSDP2 needs a group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(disconnect)


def disconnect() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def wrap(
    model: nn.Module,
    *,
    config: MPSFSDPConfig,
    device: torch.device,
    blocks: list[nn.Module],
    compute: torch.dtype,
    in_order: bool = False,
) -> nn.Module:
    """Shard a model in place and return it. `in_order`: the blocks run one after the other."""
    if sharded_modules(model):
        raise UserError("This model is wrapped already.", do="use the model that wrap_model returned before")
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise UserError("The model has no weights yet.", do="load its weights before wrapping it")
    if config.sync_module_states and dist.get_world_size() > 1:
        _sync_states(model)
    casts = config.use_mixed_precision and not _is_quantized(model)
    _place_unsharded(model, device, config.buffer_dtype if casts else None)
    if device.type == "mps":
        prepare_mps()
    is_full = config.sharding_strategy is ShardingStrategy.FULL_SHARD
    strategy = STRATEGIES["full_shard" if is_full else "shard_grad_op"]
    policy = MixedPrecisionPolicy(
        param_dtype=compute if casts else None,
        reduce_dtype=config.reduce_dtype if config.use_mixed_precision else None,
        cast_forward_inputs=casts,
    )
    mesh = make_mesh(config.sharding_strategy, device.type)
    shard(
        model, mesh=mesh, strategy=strategy, cpu_offload=config.cpu_offload, blocks=blocks, precision=policy
    )
    _reduce_scalars(model)
    for module in sharded_modules(model):
        # FSDP2's own division, the mean across processes: an explicit factor would divide twice with NO_SHARD.
        module.set_gradient_divide_factor(None)
    if is_full:
        model.set_reshard_after_forward(True, recurse=False)
    # After a pass without gradients, free the gathered weights: an optimizer made now must see the shards.
    model.register_forward_hook(
        lambda model, inputs, output: None if torch.is_grad_enabled() else free_gathered(model)
    )
    if config.forward_prefetch and in_order:
        for block, following in pairwise(blocks):
            block.set_modules_to_forward_prefetch([following])
    _finish(model, config, device)
    return model


def run_whole(
    model: nn.Module, *, config: MPSFSDPConfig, device: torch.device, compute: torch.dtype
) -> nn.Module:
    """Place a model on the device without FSDP2, with mixed precision by autocast. For one process only."""
    model.to(device)
    if config.use_mixed_precision and not _is_quantized(model) and compute != torch.float32:
        forward = model.forward

        @functools.wraps(forward)
        def cast_forward(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device.type, dtype=compute):
                return forward(*args, **kwargs)

        model.forward = cast_forward
    _finish(model, config, device)
    return model


def fsdp_problem(device: torch.device) -> str:
    """Train a few weights with FSDP2 on this device; return why it fails, or "". For one process only."""
    if device.type == "mps":
        prepare_mps()
    layer = nn.Linear(4, 4)
    try:
        mesh = make_mesh(ShardingStrategy.FULL_SHARD, device.type)
        shard(layer, mesh=mesh, strategy=STRATEGIES["full_shard"], blocks=[])
        layer(torch.ones(2, 4, device=device)).sum().backward()
        torch.optim.AdamW(layer.parameters()).step()
    except (RuntimeError, AttributeError, TypeError, ValueError, AssertionError) as error:
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return ""


def make_mesh(strategy: ShardingStrategy, device: str) -> DeviceMesh:
    """Return the mesh of all processes. With NO_SHARD each process is a replica with a single shard."""
    if strategy is not ShardingStrategy.NO_SHARD:
        return DeviceMesh.from_group(open_group(device), device, mesh_dim_names=(SHARDS,))
    ranks = list(range(dist.get_world_size()))
    alone = [open_group(device, [rank]) for rank in ranks][dist.get_rank()]
    return DeviceMesh.from_group(
        [open_group(device), alone],
        device,
        mesh=torch.tensor(ranks).view(-1, 1),
        mesh_dim_names=(REPLICAS, SHARDS),
    )


def open_group(device: str, ranks: list[int] | None = None) -> Any:
    """Return a group for tensors of this device. A collective call: every process makes every group."""
    if device == "cpu":
        if ranks is None and dist.get_backend() == "gloo":
            return dist.group.WORLD
        return dist.new_group(ranks, backend="gloo")
    register_staged_backend()
    return dist.new_group(ranks, backend=NAME)


def _is_quantized(model: nn.Module) -> bool:
    """True if a model has quantized layers: they choose their compute dtype, and a cast would round their scales."""
    return any(isinstance(module, StoredWeight) for module in model.modules())


def _sync_states(model: nn.Module) -> None:
    """Broadcast the weights and buffers of rank 0, one at a time, through host memory."""
    group = open_group("cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            host = tensor.detach().to("cpu", copy=True).contiguous()
            dist.broadcast(host, src=0, group=group)
            tensor.copy_(host)


def _place_unsharded(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Move buffers and scalars to the device and cast floating-point buffers; batch norm keeps its precision."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            casts = dtype is not None and buffer.is_floating_point() and not isinstance(module, _BatchNorm)
            module._buffers[name] = buffer.to(device, dtype if casts else buffer.dtype)
    for parameter in model.parameters():
        if parameter.ndim == 0:  # FSDP2 does not move scalars
            parameter.data = parameter.data.to(device)


def _reduce_scalars(model: nn.Module) -> None:
    """Average the gradients of scalar parameters across processes, as FSDP2 ignores scalars."""
    scalars = [p for p in model.parameters() if p.ndim == 0 and p.requires_grad]
    if not scalars or dist.get_world_size() == 1:
        return
    group = open_group(scalars[0].device.type)

    def average(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= dist.get_world_size()

    for scalar in scalars:
        scalar.register_post_accumulate_grad_hook(average)


def _finish(model: nn.Module, config: MPSFSDPConfig, device: torch.device) -> None:
    apply = type(model)._apply

    def apply_on_device(fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Handle model.to(): reject a different device, and keep offloaded weights on the host."""
        before = torch.empty(0, device=device)
        after = fn(before)
        if after.device.type != device.type:
            raise UserError(
                f"A model that was wrapped for {device.type} cannot be moved to {after.device.type}.",
                do=f"move the model to {after.device.type} before wrapping it",
            )
        if config.cpu_offload and after.dtype == before.dtype:
            return model
        return apply(model, fn, recurse)

    model._apply = apply_on_device
    if config.aggressive_memory_optimization:
        model.register_forward_pre_hook(lambda module, inputs: clear_cache(device))
    if config.debug_mode:
        _log_passes(model)


def _log_passes(model: nn.Module) -> None:
    """Log the sharded modules, and each all-gather in a forward or backward pass."""
    if not LOG.handlers:
        LOG.addHandler(logging.StreamHandler())
    LOG.setLevel(logging.DEBUG)
    names = {module: name for name, module in model.named_modules()}
    for module in sharded_modules(model):
        label, parameters = names[module] or type(model).__name__, list(module.parameters())
        total, local = sum(p.numel() for p in parameters), sum(local_part(p).numel() for p in parameters)
        LOG.debug("sharded %s: %d parameters, %d on this rank", label, total, local)
        module.register_forward_pre_hook(lambda _, __, label=label: LOG.debug("forward gathers %s", label))
        module.register_full_backward_pre_hook(
            lambda _, __, label=label: LOG.debug("backward gathers %s", label)
        )
