"""Resolve `--batch_size auto` before a run starts: from an earlier search on this machine, or by searching now.

The search makes real passes over the longest rows: the size is doubled while a pass fits, then bisected. A size that
would not fit by linear extrapolation is not tried.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from crosstune.config.resolve.plan import Adjustment, Plan
from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.core.events import Loading, Observer
from crosstune.core.out_of_memory import OutOfMemory
from crosstune.core.protocols import Batch, HasLongestRows, Recipe, Session
from crosstune.estimate.memory import GIB, moment_bytes
from crosstune.models.locate import ModelFolder
from crosstune.planner.measurements import recall, remember
from crosstune.process.ranks import Group
from crosstune.runs.open_parts import open_session

FILE = "batch_sizes"
_MATTERS = (
    *("model_name", "recipe", "train_type", "quantization_backend", "group_size", "quant_type"),
    *("double_quant", "lora_rank", "lora_target_modules", "lora_dropout", "optimizer", "precision"),
    *("packing", "ema_decay", "modules_to_save", "add_tokens", "teacher", "teacher_quantization"),
    *("teacher_top_k", "use_gradient_checkpointing", "use_activation_cpu_offload", "use_flash_attention"),
    *("sharding_strategy", "kernels", "base_precision", "low_memory", "num_new_blocks", "train_on_prompt"),
    *("gradient_accumulation_steps", "rows_per_step"),
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
        size, why = _search(plan, model=model, recipe=recipe, group=group)
        if group.ranks.first:
            remember(FILE, key, {"batch_size": size})
    chosen = Adjustment(option="batch_size", requested="auto", used=size, reason=why, kind="choice")
    observer.on_event(chosen.to_event())
    return replace(config, batch_size=size, sources={**config.sources, "batch_size": "a search"})


def _search(
    plan: Plan, *, model: ModelFolder | None, recipe: HasLongestRows, group: Group
) -> tuple[int, str]:
    """Search with a separate session, so that the run is not affected; return the size and the reason for it."""
    config, report = plan.config, plan.backend
    group.activity.start("finding the batch size")
    task = recipe.task(plan.engine)
    session = open_session(plan, model, task=task, group=group)
    trained = sum(math.prod(shape) for shape in session.trained_shapes().values())
    used = session.memory().used_bytes
    free = int(report.memory_free_bytes * plan.usable_bytes / max(1, report.memory_total_bytes))
    search = BatchSearch(
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
    )
    size = search.run()
    reason = search.reason(size)
    del session, search
    gc.collect()
    return size, reason


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


MAX_ROWS = 512
"""Larger micro-batches are hardly faster, but change the training."""
STEPS_PER_EPOCH = 8
"""An epoch keeps at least this many steps."""
FINENESS = 8
"""The search ends when the remaining interval is this fraction of the size."""


@dataclass(kw_only=True)
class BatchSearch:
    session: Session
    longest_batch: Callable[[int], Batch]
    group: Group
    limit_bytes: int
    reserve_bytes: int
    """The optimizer state, allocated after the first pass."""
    at_most: int
    _tried: dict[int, int] = field(default_factory=dict)
    """Rows -> the peak bytes of their pass, for the sizes that fit."""
    _num_tried: int = 0

    def run(self) -> int:
        """Return the largest size that fits; raise OutOfMemory if one row does not fit."""
        good, size = 0, 1
        while size <= self.at_most and self._fits(size):
            good, size = size, min(2 * size, max(self.at_most, size + 1))
        if good == 0:
            raise OutOfMemory("one row does not fit")
        bad = size
        while bad - good > max(1, good // FINENESS):
            middle = (good + bad) // 2
            if self._fits(middle):
                good = middle
            else:
                bad = middle
        return good

    def reason(self, size: int) -> str:
        """Return why this size was chosen."""
        peak = self._tried[size] + self.reserve_bytes
        use = f"{peak / GIB:.2f} of {self.limit_bytes / GIB:.2f} GiB to use"
        if size >= self.at_most:
            return f"found by {self._num_tried} real passes: the largest size searched for, {use}"
        return f"found by {self._num_tried} real passes over the longest rows: {use}; more rows would not fit"

    def _fits(self, size: int) -> bool:
        """Return True if a pass over this many rows fits in every process. All processes try the same sizes."""
        used = self.session.memory().used_bytes
        if self._tried:
            largest = max(self._tried)
            growth = max(0, self._tried[largest] - used) * size / largest
            if self.group.any(used + growth + self.reserve_bytes > self.limit_bytes):
                return False
        peak = self._try(size)
        gc.collect()  # frames of an error keep the tensors of the pass alive
        if self.group.any(peak is None or peak + self.reserve_bytes > self.limit_bytes):
            return False
        assert peak is not None
        self._tried[size] = peak
        return True

    def _try(self, size: int) -> int | None:
        """Return the peak memory of a pass over this many rows; None if it does not fit."""
        self._num_tried += 1
        prepared = self.session.prepare(self.longest_batch(size))
        getattr(self.session, "reset_peak", lambda: None)()
        try:
            self.session.backward([prepared] * self.group.ranks.size)
            peak = self.session.memory().peak_bytes
        except OutOfMemory as error:
            if self.group.ranks.size > 1 and not error.shared:
                raise
            peak = None
        self.session.discard()
        return peak


def max_rows(num_rows: int, *, micro_batches: int, rows_per_step: int, world_size: int) -> int:
    """Return the largest size to search for: an epoch keeps a few steps, or a step keeps --rows_per_step."""
    world = max(1, world_size)
    if rows_per_step:
        return max(1, min(MAX_ROWS, rows_per_step // world))
    return max(1, min(MAX_ROWS, num_rows // (STEPS_PER_EPOCH * micro_batches * world)))
