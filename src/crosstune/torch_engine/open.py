"""Check a model folder without its weights, and open a model on a torch device: build, adapt, shard, recompute, compile,
optimize."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from crosstune.config.conditions import ADAPTER_METHODS
from crosstune.config.resolve.plan import Plan
from crosstune.core.backend import backend_specs
from crosstune.core.errors import UserError, keeps_statistics, nothing_to_train
from crosstune.core.out_of_memory import LOADING
from crosstune.core.protocols import HasOwnHead
from crosstune.models.adapter_choice import AdapterSettings
from crosstune.process.ranks import Group, SingleProcess
from crosstune.torch_engine.device import PRECISIONS, compile_blocks, memory_errors, open_device
from crosstune.torch_engine.kernels.choose_layers import (
    decide_base,
    describe_general,
    open_decoder,
    warn_of_general,
)
from crosstune.torch_engine.loading.adapters import (
    Adapted,
    adapt,
    choose_adapted,
    saved_parameters,
    warn_of_left_out,
)
from crosstune.torch_engine.loading.load import empty_model, open_source, read_pretrained
from crosstune.torch_engine.results import export
from crosstune.torch_engine.session.optimizer import Masters, make_optimizer
from crosstune.torch_engine.session.session import TorchSession
from crosstune.torch_engine.session.text_session import TextSession
from crosstune.torch_engine.sharding.context import check_parts
from crosstune.torch_engine.task import BuildContext, HasFastLayers, KeepsReference, TorchTask
from crosstune.torch_engine.tasks.causal_lm import CausalLM
from crosstune.torch_engine.tasks.token_losses import check_router_balance


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

    With `trained=False` the session can evaluate and generate, but has no masters and no optimizer. With a `group` of
    connected processes, even of one, --sharding_strategy applies.
    """
    task = task if task is not None else CausalLM()
    device, precision = open_device(plan.backend), PRECISIONS[plan.precision]
    torch.manual_seed(plan.config.seed)
    parallel = shard_on_load = None
    if group is not None and not isinstance(group, SingleProcess):
        from crosstune.torch_engine.sharding.parallel import open_parallel
        from crosstune.torch_engine.sharding.shard import ShardOnLoad

        parallel = open_parallel(plan, group, device=device)
        device = parallel.device
        if parallel.strategy.sharded:
            shard_on_load = ShardOnLoad(
                plan=plan, mesh=parallel.mesh, strategy=parallel.strategy, autocast=precision.autocast
            )
    context = BuildContext(
        plan=plan,
        device=device,
        precision=precision,
        folder=model_folder,
        base_name=base_name,
        finish=shard_on_load,
    )
    with memory_errors(device, doing=LOADING):
        model = task.build(context)
        if shard_on_load is None:
            adapters = adapt(model, plan, autocast=precision.autocast)
        else:
            adapters = shard_on_load.finish_all(model)
        if adapters and plan.config.base_adapter:
            settings = AdapterSettings.from_config(plan.config, method=plan.method)
            export.load_adapter(
                Path(plan.config.base_adapter).expanduser(), model, adapters, settings=settings
            )
        if parallel is not None and parallel.part is not None:
            assert isinstance(task, CausalLM)
            task.part = parallel.part
            with precision.context(device):
                check_parts(model, parallel.part, device=device)
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
            context = task.context = replace(context, plan=plan)
        elif trained:
            plan = replace(plan, base=decide_base(plan))
            context = replace(context, plan=plan)
            if plan.config.kernels == "fast" and not isinstance(task, HasFastLayers):
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
        optimizer = make_optimizer(masters.masters, plan.config) if trained else None
        if trained and isinstance(task, KeepsReference):
            task.keep_reference(model, masters.parameters)
    spec = backend_specs()[plan.backend.name]
    kind = TextSession if isinstance(task, CausalLM) else TorchSession
    return kind(
        context=context,
        task=task,
        model=model.train(),
        adapters=adapters,
        masters=masters,
        optimizer=optimizer,
        cache_interval=spec.cache_interval(low_memory=plan.config.low_memory),
        pin_memory=spec.pinned_memory,
        parallel=parallel,
        notes=notes,
    )


def recompute_activations(model: nn.Module, plan: Plan) -> None:
    """Turn on activation checkpointing if the plan uses it."""
    config = plan.config
    if not config.use_gradient_checkpointing:
        return
    if not hasattr(model, "gradient_checkpointing_enable"):
        raise UserError(
            f"--use_gradient_checkpointing does not work with {type(model).__name__}.",
            why="the model has no gradient_checkpointing_enable() method.",
            do="remove it, or use a smaller --batch_size",
        )
    reentrant = config.reentrant_checkpointing
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant and plan.method != "full":
        # Reentrant checkpointing needs at least one input that requires gradients.
        model.enable_input_require_grads()
    elif hasattr(model, "_require_grads_hook"):
        # transformers does so for all kinds: a frozen tower would keep its activations, and compute gradients.
        model.disable_input_require_grads()


def check_no_running_statistics(model: nn.Module) -> None:
    """Reject layers that learn without gradients: checkpoints contain only what the optimizer updates."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
            raise keeps_statistics(name or type(module).__name__)


def trained_parameters(
    model: nn.Module, adapters: Mapping[str, Adapted], *, head: Sequence[str] = ()
) -> dict[str, torch.nn.Parameter]:
    """Return the trained parameters by canonical name: adapters, --modules_to_save and head, or all that require gradients."""
    if adapters:
        heads = {name: model.get_parameter(name).requires_grad_() for name in head}
        return export.adapter_weights(adapters) | export.saved_weights(model, adapters) | heads
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def check_model(folder: Path, *, plan: Plan) -> list[str]:
    """Raise the errors of loading and adapting the model without reading weights; return warnings."""
    source = open_source(folder, plan)
    if source.is_plain:
        model = read_pretrained(folder, plan=plan, device="meta")
    else:
        model = empty_model(folder, source.config)
        source.read_layout(model)
    source.forms_to_quantize(model)
    if plan.config.router_aux_loss_coef:
        check_router_balance(model)
    if plan.method in ADAPTER_METHODS:
        chosen = choose_adapted(model, plan)
        left_out = warn_of_left_out(model, chosen, plan)
        saved_parameters(model, plan, adapted=chosen)
        return [*left_out, *warn_of_general(model, plan=plan), *warn_of_rope(source.config, plan=plan)]
    return warn_of_rope(source.config, plan=plan)


def warn_of_rope(config: Any, *, plan: Plan) -> list[str]:
    """Return a warning if rows may exceed the length at which the rotary frequencies change."""
    settings = getattr(config, "rope_parameters", None) or {}
    is_alone = plan.config.batch_size == 1 and not plan.config.packing
    for rope in (
        [settings] if "rope_type" in settings else settings.values()
    ):  # a model may have one per type of layer
        kind = rope.get("rope_type") if isinstance(rope, Mapping) else None
        if kind not in ("longrope", "dynamic") or is_alone:
            continue
        limit = config.max_position_embeddings
        if kind == "longrope":
            limit = rope.get("original_max_position_embeddings") or limit
        if limit is None or plan.config.context_length <= limit:
            continue
        return [
            f"context_length: beyond {limit:,} tokens, this model ({kind}) chooses its rotary frequencies by the longest "
            "row of a micro-batch, so the loss of a row depends on the other rows, and in packed rows on the longest "
            f"document; to avoid that, use --context_length {limit} or --batch_size 1 without --packing"
        ]
    return []
