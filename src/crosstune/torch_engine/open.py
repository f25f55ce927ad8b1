"""Open a model for training on a torch device, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from crosstune.config.mlx_settings import read_mlx_settings
from crosstune.config.plan import Plan
from crosstune.core.backend import backend_specs
from crosstune.core.errors import UserError, nothing_to_train
from crosstune.core.out_of_memory import LOADING
from crosstune.core.ranks import Group
from crosstune.models.adapter_choice import AdapterSettings
from crosstune.torch_engine import export
from crosstune.torch_engine.adapters import Adapted, add_adapters
from crosstune.torch_engine.device import CacheClearing, memory_errors, open_device
from crosstune.torch_engine.load import shrink_frozen
from crosstune.torch_engine.optimizer import Masters, make_optimizer
from crosstune.torch_engine.precision import PRECISIONS, Precision
from crosstune.torch_engine.session import Parts, TorchSession
from crosstune.torch_engine.task import Opening, TorchTask
from crosstune.torch_engine.tasks.causal_lm import CausalLM
from crosstune.torch_engine.text_session import TextSession


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

    `trained=False` opens it for evaluation and generation only, without masters and optimizer. The plan already
    refuses a group of several processes.
    """
    task = task if task is not None else CausalLM()
    device, precision = open_device(plan.backend), PRECISIONS[plan.precision]
    torch.manual_seed(plan.config.seed)
    opening = Opening(plan=plan, device=device, precision=precision, folder=model_folder, base_name=base_name)
    with memory_errors(device, doing=LOADING):
        model = task.build(opening)
        adapters = adapt(model, plan, precision=precision)
        recompute_activations(model, plan)
        if trained:
            check_no_running_statistics(model)
        else:
            model.requires_grad_(False)
        masters = Masters(trained_parameters(model, adapters) if trained else {})
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
    )
    return TextSession(parts) if isinstance(task, CausalLM) else TorchSession(parts)


def adapt(model: nn.Module, plan: Plan, *, precision: Precision) -> dict[str, Adapted]:
    """Add LoRA or DoRA adapters if the method uses them, and load the weights of --base_adapter."""
    config = plan.config
    if plan.method not in ("lora", "dora"):
        return {}
    settings = AdapterSettings.from_config(config, method=plan.method)
    adapters = add_adapters(
        model,
        targets=config.lora_target_modules,
        settings=settings,
        seed=config.seed,
        last_layers=read_mlx_settings(config.mlx_config).num_layers,
    )
    if precision.autocast is not None:
        shrink_frozen(model, dtype=precision.autocast)
    if config.base_adapter:
        export.load_adapter(Path(config.base_adapter).expanduser(), adapters, settings=settings)
    return adapters


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


def trained_parameters(model: nn.Module, adapters: Mapping[str, Adapted]) -> dict[str, torch.nn.Parameter]:
    """Return the trained parameters by canonical name: the adapters, or all parameters that require gradients."""
    if adapters:
        return export.adapter_weights(adapters)
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
