"""Implement `Session` with MLX: gradients of a batch, updates, evaluation, state and results."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from crosstune.core.out_of_memory import EVALUATING, STEP, UPDATING, OutOfMemory
from crosstune.core.profiling import BOTH_PASSES, COMMUNICATION, OPTIMIZER, Phase, ProfileSettings, no_phase
from crosstune.core.protocols import (
    Array,
    Backward,
    Batch,
    EvalResult,
    Memory,
    PreparedBatch,
    SessionState,
)
from crosstune.core.weights import check_fit, kept_moments
from crosstune.mlx_engine.adapters import name_targets
from crosstune.mlx_engine.expert_adapters import Adapter
from crosstune.mlx_engine.group import RingGroup
from crosstune.mlx_engine.limits import memory_errors, read_memory
from crosstune.mlx_engine.load import DTYPES
from crosstune.mlx_engine.optimizer import Masters, Optimizer
from crosstune.mlx_engine.probe import MlxProfiler
from crosstune.mlx_engine.save_model import save_tensors
from crosstune.mlx_engine.task import Arrays, BuildContext, Gradients, HasOwnHead, Loss, MetricSums, MlxTask
from crosstune.mlx_engine.wrap_call import bad_arrays, watch_outputs
from crosstune.models.adapter_choice import AdapterSettings
from crosstune.models.adapter_files import changes_to_base, save_adapter
from crosstune.models.mlx_adapters import to_mlx
from crosstune.process.ranks import MetricTotals

RANDOM = "mlx"
"""The key of the random state in a checkpoint."""


@dataclass(kw_only=True, eq=False)
class MlxSession:
    """The session of a task that MLX differentiates and that may draw from MLX's global generator."""

    opening: BuildContext
    task: MlxTask
    model: nn.Module
    adapters: dict[str, Adapter]
    loss: Loss
    gradients: Gradients
    masters: Masters
    optimizer: Optimizer
    total_parameters: int
    group: RingGroup | None
    """None for a single process."""
    phase: Phase = no_phase

    def __post_init__(self) -> None:
        self.plan = self.opening.plan
        self.key = self._key_before = mx.random.key(self.plan.config.seed)
        """Random key of the next dropout."""
        self._pending: dict[str, mx.array] = {}
        self._is_averaged = False

    def prepare(self, batch: Batch) -> PreparedBatch:
        return PreparedBatch(
            weight=int(batch.weight), num_tokens=int(batch.num_tokens), arrays=self.task.arrays(batch)
        )

    def backward(self, window: Sequence[PreparedBatch], *, loss_scale: float = 1.0) -> Backward:
        assert self.masters.arrays, "this session was opened without training"
        self._key_before = self.key
        weight = sum(batch.weight for batch in window)
        with self._agreeing(STEP), self.phase(BOTH_PASSES):
            loss, metrics, gradients = self._gradients_of(window, weight, loss_scale=loss_scale)
        with memory_errors(doing=STEP):
            if self.group is not None:
                with self.phase(COMMUNICATION):
                    [loss] = self.group.sum_numbers(loss)
                    gradients = self.group.sum_arrays({name: gradients[name] for name in self.masters.arrays})
            if loss_scale != 1.0:
                gradients = {name: array / loss_scale for name, array in gradients.items()}
            with self.phase(OPTIMIZER):
                norm = float(mx.sqrt(mx.stack([(array * array).sum() for array in gradients.values()]).sum()))
        self._pending = self._clip(gradients, norm)
        return Backward(
            loss=loss,
            grad_norm=norm,
            weight=weight,
            num_tokens=sum(batch.num_tokens for batch in window),
            metrics=metrics.means(self.group),
        )

    def discard(self) -> None:
        self._pending = {}
        self.key = self._key_before

    def update(self, *, lr: float) -> None:
        gradients, self._pending = self._pending, {}
        with self.phase(OPTIMIZER), memory_errors(doing=UPDATING):
            self.masters.replace(self.optimizer.step(self.masters.arrays, gradients, lr=lr))
            mx.eval(
                self.masters.arrays, self.optimizer.slots, self.optimizer.averages, self.model.parameters()
            )
        del gradients
        if self.plan.config.low_memory:
            mx.clear_cache()

    def evaluate(self, batches: Iterable[Batch]) -> EvalResult:
        measure, names = self._evaluation_loss()
        total, weight, metrics = 0.0, 0, MetricTotals(names)
        with self._agreeing(EVALUATING), self.averaged():
            for index, batch in enumerate(batches):
                weight += batch.weight
                prepared = self.prepare(batch)
                self._check_batches([prepared])
                if self._on_this_rank(index):
                    # The same noise in every evaluation, on any number of processes.
                    mx.random.seed(self.plan.config.seed + index)
                    loss, sums = measure(self._to_device(prepared))
                    total += float(loss)
                    metrics.add(sums)
        if self.group is not None:
            [total] = self.group.sum_numbers(total)
        mean = total / weight if weight else math.nan
        return EvalResult(loss=mean, weight=weight, metrics=metrics.means(self.group))

    def find_nonfinite(self, window: Sequence[PreparedBatch]) -> str:
        if broken := bad_arrays(self.masters.arrays):
            return f"the weight {broken[0]} was not finite before the step"
        before = self.key
        with watch_outputs(self.model) as layers, memory_errors():
            for batch in window:
                key = self._next_key()
                self._seed_from(key)
                self.gradients.forward(self._to_device(batch), key)
        self.key = before
        weight = sum(batch.weight for batch in window)
        _, _, gradients = self._gradients_of(window, weight, divided=False)
        self.key = before
        if layers:
            return f"the first non-finite value was the output of {layers[0]}"
        if bad := bad_arrays(dict(reversed(list(gradients.items())))):
            return f"every output was finite; the first non-finite gradient was that of {bad[0]}"
        return "every value was finite when the step was run again"

    def memory(self) -> Memory:
        return read_memory()

    def profiler(self, settings: ProfileSettings) -> MlxProfiler:
        return MlxProfiler(settings, dtype=DTYPES[self.plan.precision])

    def reset_peak(self) -> None:
        mx.reset_peak_memory()

    def num_parameters(self) -> tuple[int, int]:
        return sum(array.size for array in self.masters.arrays.values()), self.total_parameters

    def trained_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(array.shape) for name, array in self.masters.arrays.items()}

    def export_state(self, *, copy: bool = True, divided: bool = False) -> SessionState:
        """Return the whole state: every process has it. MLX arrays are immutable, so `copy` changes nothing."""
        with memory_errors(doing="a copy of the training state"):
            return SessionState(
                weights={name: to_host(array) for name, array in self.masters.arrays.items()},
                moments=self.optimizer.export_moments(),
                random={RANDOM: to_host(self.key)},
            )

    def import_state(self, state: SessionState) -> None:
        self.import_weights(state.weights)
        moments = kept_moments(state, ema_decay=self.plan.config.ema_decay)
        self.optimizer.import_moments(self.masters.arrays, moments)
        if RANDOM in state.random:
            self.key = mx.array(np.asarray(state.random[RANDOM], np.uint32))

    def import_weights(self, weights: Mapping[str, Array]) -> None:
        check_fit(self.trained_shapes(), weights)
        self.masters.replace(
            {name: mx.array(np.asarray(array, np.float32)) for name, array in weights.items()}
        )
        self.optimizer.averages = {name: self.masters.arrays[name] for name in self.optimizer.averages}

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Use the moving average as the weights within the context, if there is one."""
        if not self.optimizer.averages or self._is_averaged:
            yield
            return
        weights, self._is_averaged = self.masters.arrays, True
        self.masters.replace({**weights, **self.optimizer.averages})
        try:
            yield
        finally:
            self.masters.replace(weights)
            self._is_averaged = False

    def save_result(self, folder: Path | None) -> Path | None:
        if folder is None:  # every rank has the whole model, so only the writing rank has work to do
            return None
        with memory_errors(doing="writing the result"), self.averaged():
            if self.adapters and not isinstance(self.task, HasOwnHead):
                return self._save_adapter(folder / "adapter")
            self._save_model(folder / "model")
            return folder / "model"

    def _save_model(self, folder: Path) -> None:
        save_tensors(folder, self.model)

    def _save_adapter(self, folder: Path) -> Path:
        saved = [name for name in self.masters.arrays if ".lora_" not in name]
        targets = name_targets(self.model, self.adapters, saved=saved)
        save_adapter(
            folder,
            {name: np.array(array) for name, array in self.masters.arrays.items()},
            settings=AdapterSettings.from_config(self.plan.config, method=self.plan.method),
            targets=targets,
            base=self.opening.folder,
            base_name=self.opening.base_name,
            record={**changes_to_base(self.plan.config), **self._base_record()},
            starts={
                name: adapter.start for name, adapter in self.adapters.items() if adapter.start is not None
            },
        )
        if not (saved or targets.stacks):  # mlx-lm's adapters have low-rank matrices of single layers only
            to_mlx(folder, folder / "mlx")
        return folder

    def _base_record(self) -> dict[str, Any]:
        return {}

    def _evaluation_loss(self) -> tuple[Callable[[Arrays], tuple[mx.array, MetricSums]], Sequence[str]]:
        """Return the loss of an evaluation, and the names of its metrics."""
        return self.loss.__call__, self.task.metric_names

    def _gradients_of(
        self,
        window: Sequence[PreparedBatch],
        weight: int,
        *,
        loss_scale: float = 1.0,
        divided: bool = True,
    ) -> tuple[float, MetricTotals, dict[str, mx.array]]:
        """Sum the gradients over the micro-batches of this process, or over all of them if not `divided`.

        The random key of a micro-batch depends on its index in the window, not on the process that computes it.
        """
        self._check_batches(window)
        total, gradients = 0.0, dict[str, mx.array]()
        metrics = MetricTotals(self.task.metric_names)
        for index, batch in enumerate(window):
            key = self._next_key()
            if divided and not self._on_this_rank(index):
                continue
            self._seed_from(key)
            loss, sums, found = self.gradients(
                self.masters.published, self._to_device(batch), key, scale=loss_scale / weight
            )
            found = {name: array.astype(mx.float32) for name, array in found.items()}
            gradients = (
                {name: gradients[name] + array for name, array in found.items()} if gradients else found
            )
            mx.eval(loss, gradients)
            metrics.add(sums)
            total += float(loss) / loss_scale
        if not gradients:  # the last window of a run may have fewer micro-batches than there are processes
            gradients = {name: mx.zeros_like(array) for name, array in self.masters.arrays.items()}
        return total, metrics, gradients

    @contextlib.contextmanager
    def _agreeing(self, doing: str) -> Iterator[None]:
        """Raise OutOfMemory on every process if one runs out of memory in the `with` block. No process may wait in it."""
        failure: OutOfMemory | None = None
        try:
            with memory_errors(doing=doing):
                yield
        except OutOfMemory as error:
            if self.group is None:
                raise
            failure = error
        if self.group is not None and self.group.any(failure is not None):
            failure = failure or OutOfMemory("another process of the run has too little", doing=doing)
            failure.shared = True
            raise failure

    def _check_batches(self, batches: Sequence[PreparedBatch]) -> None:
        """Raise for a batch that the model does not support. All ranks check all batches, so that all raise."""

    def _to_device(self, batch: PreparedBatch) -> Arrays:
        return {name: mx.array(array) for name, array in batch.arrays.items()}

    def _on_this_rank(self, index: int) -> bool:
        return self.group is None or index % self.group.ranks.size == self.group.ranks.rank

    def _clip(self, gradients: dict[str, mx.array], norm: float) -> dict[str, mx.array]:
        config = self.plan.config
        if not config.apply_gradient_clipping or config.grad_norm >= norm + 1e-6:
            return gradients
        factor = config.grad_norm / (norm + 1e-6)
        return {name: array * factor for name, array in gradients.items()}

    def _next_key(self) -> mx.array:
        self.key, drawn = mx.random.split(self.key)
        return drawn

    def _seed_from(self, key: mx.array) -> None:
        """Seed MLX's global generator for a task that draws from it."""
        high, low = np.array(key).tolist()
        mx.random.seed((high << 32 | low) % 2**63)


def to_host(array: mx.array) -> Array:
    """Return a copy that later steps do not change."""
    return np.array(array, copy=True)
