"""Resolve `--batch_size auto` before a run starts: from an earlier search on this machine, or by searching now."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from typing import Any

from crosstune.config.resolve.plan import Adjustment, Plan
from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.core.events import Loading, Observer
from crosstune.core.protocols import HasLongestRows, Recipe
from crosstune.estimate.memory import moment_bytes
from crosstune.models.locate import ModelFolder
from crosstune.planner.measurements import recall, remember
from crosstune.planner.search_batch import BatchSearch, BatchSizeFound, max_rows
from crosstune.process.ranks import Group
from crosstune.runs.open_parts import open_session

FILE = "batch_sizes"
_MATTERS = (
    *(
        "model_name",
        "recipe",
        "train_type",
        "quantization_backend",
        "group_size",
        "quant_type",
        "double_quant",
    ),
    *("lora_rank", "lora_target_modules", "lora_dropout", "optimizer", "precision", "packing", "ema_decay"),
    *("modules_to_save", "add_tokens", "teacher", "teacher_quantization", "teacher_top_k"),
    *("use_gradient_checkpointing", "use_activation_cpu_offload", "use_flash_attention", "sharding_strategy"),
    *("kernels", "base_precision"),
    *("low_memory", "num_new_blocks", "train_on_prompt", "gradient_accumulation_steps", "rows_per_step"),
)
"""Options that affect the memory of a row or the number of rows searched."""


def find_batch_size(
    config: Config, plan: Plan, *, model: ModelFolder | None, recipe: Recipe, group: Group, observer: Observer
) -> Config:
    """Return the configuration with the batch size found, as if the user had set it."""
    if not isinstance(recipe, HasLongestRows):
        raise UserError(
            f"--batch_size auto does not work with the {plan.config.recipe} recipe.",
            why="the recipe has no longest_batch() method.",
            do="set a --batch_size",
        )
    key = _key(plan, recipe)
    known = int(group.broadcast(str(int((recall(FILE, key) or {}).get("batch_size", 0)))))
    if known:
        size, why = known, "found by an earlier search with these options on this machine"
    else:
        observer.on_event(Loading(model=f"{plan.config.model_name} (to find the batch size)"))
        found = _search(plan, model=model, recipe=recipe, group=group)
        size, why = found.batch_size, found.sentence()
        if group.ranks.first:
            remember(FILE, key, {"batch_size": size})
    chosen = Adjustment(option="batch_size", requested="auto", used=size, reason=why, kind="choice")
    observer.on_event(chosen.to_event())
    return replace(config, batch_size=size, sources={**config.sources, "batch_size": "a search"})


def _search(plan: Plan, *, model: ModelFolder | None, recipe: HasLongestRows, group: Group) -> BatchSizeFound:
    """Search with a separate session, so that the run is not affected."""
    config, report = plan.config, plan.backend
    group.activity.start("finding the batch size")
    task = recipe.task(plan.engine)
    session = open_session(plan, model, task=task, group=group)
    trained = sum(math.prod(shape) for shape in session.trained_shapes().values())
    used = session.memory().used_bytes
    free = int(report.memory_free_bytes * plan.usable_bytes / max(1, report.memory_total_bytes))
    found = BatchSearch(
        session=session,
        longest_batch=recipe.longest_batch,
        group=group,
        limit_bytes=min(plan.usable_bytes, free + (used if report.is_torch_cpu else 0)),
        reserve_bytes=moment_bytes(trained, config.optimizer) + 4 * trained * bool(config.ema_decay),
        at_most=max_rows(
            recipe.num_rows(),
            micro_batches=config.gradient_accumulation_steps,
            rows_per_step=config.rows_per_step,
            world_size=plan.world_size,
        ),
    ).run()
    del session
    gc.collect()
    return found


def _key(plan: Plan, recipe: HasLongestRows) -> dict[str, Any]:
    report, options = plan.backend, plan.config.options()
    return {
        "machine": plan.machine.name,
        "backend": report.name,
        "devices": [[device.name, device.memory_total_bytes] for device in report.devices],
        "world_size": plan.world_size,
        "bits": plan.n_bits if plan.quantizer != "none" else 0,
        "quantizer": plan.quantizer,
        "longest_row": recipe.longest_row(),
        "num_rows": recipe.num_rows(),
        "usable_bytes": plan.usable_bytes,
        **{name: options[name] for name in _MATTERS},
    }
