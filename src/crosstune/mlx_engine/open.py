"""Check a model folder without its weights, and open a model for training on MLX, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from crosstune.config.conditions import ADAPTER_METHODS
from crosstune.config.mlx_settings import read_mlx_settings
from crosstune.config.resolve.plan import Plan
from crosstune.core.errors import UserError, nothing_to_train
from crosstune.core.out_of_memory import LOADING
from crosstune.mlx_engine.adapters import (
    add_adapters,
    choose_targets,
    saved_parameters,
    tied_parameters,
    train_in_full,
    warn_of_left_out,
)
from crosstune.mlx_engine.expert_adapters import Adapter, ExpertAdapter, expert_stacks
from crosstune.mlx_engine.group import RingGroup
from crosstune.mlx_engine.limits import memory_errors, set_limits
from crosstune.mlx_engine.load import (
    DTYPES,
    check_quantization,
    check_readable,
    check_rope,
    check_window,
    num_parameters,
    read_model,
)
from crosstune.mlx_engine.optimizer import Adam, Masters, Optimizer
from crosstune.mlx_engine.session import MlxSession
from crosstune.mlx_engine.task import BuildContext, Gradients, HasOwnHead, Loss, MlxTask
from crosstune.mlx_engine.tasks.causal_lm import CausalLM
from crosstune.mlx_engine.text_session import TextSession
from crosstune.mlx_engine.wrap_call import recompute_in_backward
from crosstune.models.adapter_choice import AdapterSettings, Layers, check_start
from crosstune.models.adapter_files import load_adapter
from crosstune.models.folder import read_config_json
from crosstune.process.ranks import SingleProcess


def open_session(
    plan: Plan,
    *,
    model_folder: Path | None,
    base_name: str | None = None,
    task: MlxTask | None = None,
    trained: bool = True,
    group: RingGroup | SingleProcess | None = None,
) -> MlxSession:
    """Open the model of a task, by default a causal language model; `trained=False` for evaluation and generation only.

    The processes of a `group` share the micro-batches; each has the whole model and makes the same update.
    """
    task = task if task is not None else CausalLM()
    config = plan.config
    settings = read_mlx_settings(config.mlx_config)
    set_limits(settings)
    mx.random.seed(config.seed)
    # On a CPU, each new shape of a compiled step calls a C++ compiler.
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    compiles = on_gpu if settings.compile is None else settings.compile
    is_text = isinstance(task, CausalLM)
    opening = BuildContext(
        plan=plan,
        dtype=DTYPES[plan.precision],
        folder=model_folder,
        base_name=base_name,
        trained=trained,
        compiled=compiles and is_text,
    )
    with memory_errors(doing=LOADING):
        model = task.build(opening)
        total_parameters = num_parameters(model)
        adapters = adapt(model, plan)
        if adapters and isinstance(task, HasOwnHead):
            train_in_full(model, task.head_names)
        model.eval()  # its mode between steps
        loss = task.prepare_loss(model) if isinstance(task, CausalLM) else Loss(model, task.loss)
        if trained:
            if config.use_gradient_checkpointing:
                recompute_activations(model, random=not is_text)
            check_no_running_statistics(model)
        masters = Masters(model if trained else None)
        if trained and not masters.arrays:
            raise nothing_to_train(type(model).__name__)
    if trained and isinstance(task, CausalLM):
        layers = {
            name if isinstance(adapter, ExpertAdapter) else f"{name}.weight": adapter.original()
            for name, adapter in adapters.items()
        }
        saved = {name: array for name, array in masters.published.items() if ".lora_" not in name}
        task.check_weights(model, layers | saved)
    kind = TextSession if is_text else MlxSession
    return kind(
        opening=opening,
        task=task,
        model=model,
        adapters=adapters,
        loss=loss,
        gradients=Gradients(model, loss, list(adapters.values()), compiled=opening.compiled),
        masters=masters,
        optimizer=Optimizer(
            config.optimizer,
            weight_decay=config.wd,
            adam=Adam(beta1=config.adam_beta1, beta2=config.adam_beta2, epsilon=config.adam_epsilon),
            b_ratio=config.loraplus_lr_ratio,
            ema_decay=config.ema_decay,
            compiled=compiles,
        ),
        total_parameters=total_parameters,
        group=group if isinstance(group, RingGroup) else None,
    )


def adapt(model: nn.Module, plan: Plan) -> dict[str, Adapter]:
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
        layers=Layers.from_config(config),
    )
    train_in_full(model, saved_parameters(model, config, adapted=adapters))
    if config.base_adapter:
        masters = Masters(model)
        shapes = {name: array.shape for name, array in masters.arrays.items()}
        found = load_adapter(
            Path(config.base_adapter).expanduser(),
            shapes,
            settings=settings,
            tied=tied_parameters(model),
        )
        masters.replace({name: mx.array(array) for name, array in found.items()})
    return adapters


def recompute_activations(model: nn.Module, *, random: bool) -> None:
    """Turn on activation checkpointing for every layer."""
    layers: Any = getattr(model, "layers", None)
    if not layers:
        raise UserError(
            f"--use_gradient_checkpointing does not work with {type(model).__name__}.",
            why="the model has no list `layers`.",
            do="remove it, or use a smaller --batch_size",
        )
    for layer in layers:
        recompute_in_backward(layer, random=random)


def check_no_running_statistics(model: nn.Module) -> None:
    """Raise for layers that learn without gradients, since a checkpoint contains only trained weights."""
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm) and module.track_running_stats:
            raise UserError(
                f"The layer {name or 'BatchNorm'} cannot be trained.",
                why="it keeps running statistics, which are not in checkpoints: a resumed run would differ.",
                do="use track_running_stats=False, or a layer norm",
            )


def check_model(folder: Path, *, plan: Plan) -> list[str]:
    """Return warnings; raise the errors that loading the model or adding adapters would raise."""
    config = read_config_json(folder)
    check_quantization(folder, check_readable(folder, config), plan)
    check_window(config, plan)
    model = read_model(folder, config)
    check_rope(model, plan)
    if plan.method in ADAPTER_METHODS:
        layers = Layers.from_config(plan.config)
        targets, quantized = plan.config.lora_target_modules, plan.quantizer != "none"
        dora = plan.method == "dora"
        chosen = choose_targets(model, targets, dora=dora, layers=layers)
        check_start(plan.config.init_lora, list(expert_stacks(model).keys() & chosen))
        saved_parameters(model, plan.config, adapted=chosen)
        return warn_of_left_out(model, targets, dora=dora, quantized=quantized, layers=layers)
    return []
