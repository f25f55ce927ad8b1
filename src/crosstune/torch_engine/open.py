"""Open a model for training on a torch device, step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from crosstune.config.conditions import ADAPTER_METHODS
from crosstune.config.mlx_settings import read_mlx_settings
from crosstune.config.resolve.plan import Plan
from crosstune.core.backend import backend_specs
from crosstune.core.errors import UserError, nothing_to_train
from crosstune.core.out_of_memory import LOADING
from crosstune.models.adapter_choice import AdapterSettings
from crosstune.process.ranks import Group, SingleProcess
from crosstune.torch_engine.device import PRECISIONS, CacheClearing, Precision, memory_errors, open_device
from crosstune.torch_engine.kernels.choose import decide_base, describe_general, open_decoder
from crosstune.torch_engine.loading.adapters import Adapted, adapt_layers, choose_targets
from crosstune.torch_engine.loading.compile_blocks import compile_blocks
from crosstune.torch_engine.loading.load import shrink_frozen
from crosstune.torch_engine.results import export
from crosstune.torch_engine.session.optimizer import Masters, make_optimizer
from crosstune.torch_engine.session.session import TorchSession
from crosstune.torch_engine.session.session_parts import Parts
from crosstune.torch_engine.session.text_session import TextSession
from crosstune.torch_engine.task import BuildContext, HasOwnHead, TorchTask
from crosstune.torch_engine.tasks.causal_lm import CausalLM

if TYPE_CHECKING:
    from crosstune.torch_engine.sharding.parallel import Parallel
    from crosstune.torch_engine.sharding.shard_on_load import ShardOnLoad


def open_session(
    plan: Plan,
    *,
    model_folder: Path | None,
    base_name: str | None = None,
    task: TorchTask | None = None,
    trained: bool = True,
    group: Group | None = None,
) -> TorchSession:
    """Open the model of a task, by default a causal language model.

    `trained=False` opens it for evaluation and generation only, without masters and optimizer. With a `group` of connected
    processes, even of one, the model is divided as --sharding_strategy says.
    """
    task = task if task is not None else CausalLM()
    device, precision = open_device(plan.backend), PRECISIONS[plan.precision]
    torch.manual_seed(plan.config.seed)
    parallel = connect_devices(plan, group, device=device)
    shard_on_load = sharding(plan, parallel, precision=precision)
    device = parallel.device if parallel is not None else device
    opening = BuildContext(
        plan=plan,
        device=device,
        precision=precision,
        folder=model_folder,
        base_name=base_name,
        finish=shard_on_load,
    )
    with memory_errors(device, doing=LOADING):
        model = task.build(opening)
        adapters = (
            adapt(model, plan, precision=precision)
            if shard_on_load is None
            else shard_on_load.finish_all(model)
        )
        load_base_adapter(adapters, plan)
        recompute_activations(model, plan)
        notes: list[str] = []
        if trained and shard_on_load is None and isinstance(task, CausalLM):
            task.decoder, base, notes = open_decoder(
                model,
                adapters,
                plan=plan,
                precision=precision,
                device=device,
                folder=model_folder,
                group=group,
            )
            plan = replace(plan, base=base)
            opening = task.opening = replace(opening, plan=plan)
        elif trained:
            plan = replace(plan, base=decide_base(plan))
            opening = replace(opening, plan=plan)
            if plan.config.kernels == "fast":
                notes = describe_general("the task of the recipe computes with the model itself")
        if trained:
            notes += compile_blocks(model, plan)
            check_no_running_statistics(model)
        else:
            model.requires_grad_(False)
        head = task.head_names if isinstance(task, HasOwnHead) else ()
        masters = Masters(trained_parameters(model, adapters, head=head) if trained else {})
        if trained and not masters.masters:
            raise nothing_to_train(type(model).__name__)
        optimizer = optimize(masters, plan) if trained else None
    spec = backend_specs()[plan.backend.name]
    parts = Parts(
        opening=opening,
        task=task,
        model=model.train(),
        adapters=adapters,
        masters=masters,
        optimizer=optimizer,
        cache=CacheClearing(device, every=spec.cache_interval(low_memory=plan.config.low_memory)),
        pin_memory=spec.pinned_memory,
        parallel=parallel,
        notes=notes,
    )
    return TextSession(parts) if isinstance(task, CausalLM) else TorchSession(parts)


def connect_devices(plan: Plan, group: Group | None, *, device: torch.device) -> Parallel | None:
    """Connect the devices of a group of processes; return None for a run of one process."""
    if group is None or isinstance(group, SingleProcess):
        return None
    from crosstune.torch_engine.sharding.parallel import open_parallel

    return open_parallel(plan, group, device=device)


def sharding(plan: Plan, parallel: Parallel | None, *, precision: Precision) -> ShardOnLoad | None:
    """Return the callback that adapts and shards each block while the model loads; None without sharding."""
    if parallel is None or not parallel.strategy.sharded:
        return None
    from crosstune.torch_engine.sharding.shard_on_load import ShardOnLoad

    return ShardOnLoad(
        parallel=parallel,
        cpu_offload=plan.config.use_cpu_offload,
        choose=partial(choose_adapted, plan=plan) if plan.method in ADAPTER_METHODS else None,
        adapt=partial(adapt_part, plan=plan, precision=precision),
    )


def adapt(model: nn.Module, plan: Plan, *, precision: Precision) -> dict[str, Adapted]:
    """Freeze the model and add LoRA or DoRA adapters, if the method uses them."""
    if plan.method not in ADAPTER_METHODS:
        return {}
    chosen = choose_adapted(model, plan=plan)
    model.requires_grad_(False)
    return adapt_part(model, model, chosen, plan=plan, precision=precision)


def choose_adapted(model: nn.Module, *, plan: Plan) -> list[str]:
    """Return the layers that get an adapter."""
    return choose_targets(
        model,
        plan.config.lora_target_modules,
        dora=plan.method == "dora",
        last_layers=read_mlx_settings(plan.config.mlx_config).num_layers,
    )


def adapt_part(
    model: nn.Module, part: nn.Module, names: Sequence[str], *, plan: Plan, precision: Precision
) -> dict[str, Adapted]:
    """Add adapters to the layers of a part of the model, and shrink its frozen weights."""
    settings = AdapterSettings.from_config(plan.config, method=plan.method)
    adapters = adapt_layers(model, names, settings=settings, seed=plan.config.seed)
    if precision.autocast is not None:
        shrink_frozen(part, dtype=precision.autocast)
    return adapters


def load_base_adapter(adapters: Mapping[str, Adapted], plan: Plan) -> None:
    """Load the weights of --base_adapter."""
    if adapters and plan.config.base_adapter:
        settings = AdapterSettings.from_config(plan.config, method=plan.method)
        export.load_adapter(Path(plan.config.base_adapter).expanduser(), adapters, settings=settings)


def recompute_activations(model: nn.Module, plan: Plan) -> None:
    """Turn on activation checkpointing if the config asks for it."""
    config = plan.config
    if not config.use_gradient_checkpointing:
        return
    if not hasattr(model, "gradient_checkpointing_enable"):
        raise UserError(
            f"--use_gradient_checkpointing does not work with {type(model).__name__}.",
            why="the model has no method gradient_checkpointing_enable.",
            do="leave it out, or use a smaller --batch_size",
        )
    reentrant = config.reentrant_checkpointing
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant and plan.method != "full":
        # Reentrant checkpointing needs at least one input that requires gradients.
        model.enable_input_require_grads()


def check_no_running_statistics(model: nn.Module) -> None:
    """Raise for layers that learn without gradients: a checkpoint holds what the optimizer moves."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
            raise UserError(
                f"The layer {name or type(module).__name__} cannot be trained.",
                why="it keeps running statistics, which checkpoints do not hold: a resumed run would be another one.",
                do="use track_running_stats=False, or a layer norm",
            )


def trained_parameters(
    model: nn.Module, adapters: Mapping[str, Adapted], *, head: Sequence[str] = ()
) -> dict[str, torch.nn.Parameter]:
    """Return the trained parameters by canonical name: the adapters and the head, or all that require gradients."""
    if adapters:
        heads = {name: model.get_parameter(name).requires_grad_() for name in head}
        return export.adapter_weights(adapters) | heads
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def optimize(masters: Masters, plan: Plan) -> torch.optim.Optimizer:
    config = plan.config
    return make_optimizer(
        config.optimizer,
        masters.masters,
        weight_decay=config.wd,
        b_ratio=config.loraplus_lr_ratio,
        average_decay=config.ema_decay,
    )
