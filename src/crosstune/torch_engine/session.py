"""Implement `Session` with torch: gradients of a window, updates, evaluation and state."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from crosstune.core.metric_names import check_known_metrics
from crosstune.core.out_of_memory import EVALUATING
from crosstune.core.protocols import (
    Array,
    Backward,
    Batch,
    EvalResult,
    Memory,
    Metrics,
    PreparedBatch,
    RecordsBase,
    SessionState,
)
from crosstune.models.adapter_choice import AdapterSettings
from crosstune.models.adapter_files import save_adapter
from crosstune.torch_engine import export
from crosstune.torch_engine import state as states
from crosstune.torch_engine.adapters import Adapted, name_targets
from crosstune.torch_engine.device import CacheClearing, evaluating, memory_errors, read_memory
from crosstune.torch_engine.find_nonfinite import bad_gradients, bad_weights, watch_outputs
from crosstune.torch_engine.optimizer import Masters, averages_of, set_learning_rate
from crosstune.torch_engine.quantized import count_weights
from crosstune.torch_engine.task import MetricSums, Opening, Tensors, TorchTask, WritesModel


@dataclass(kw_only=True)
class Parts:
    """The parts of an opened model."""

    opening: Opening
    task: TorchTask
    model: nn.Module
    adapters: dict[str, Adapted]
    masters: Masters
    optimizer: torch.optim.Optimizer | None
    """None if the model is only evaluated."""
    cache: CacheClearing
    pin_memory: bool = False


class TorchSession:
    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.plan, self.device = parts.opening.plan, parts.opening.device
        self.precision = parts.opening.precision
        self.task, self.model, self.adapters = parts.task, parts.model, parts.adapters
        self.masters, self.optimizer = parts.masters, parts.optimizer
        self._random_before: dict[str, Array] = {}
        self._is_averaged = False

    def prepare(self, batch: Batch) -> PreparedBatch:
        """Return the batch as host tensors, pinned if copies to the device can overlap with the host."""
        arrays = {
            name: torch.from_numpy(np.ascontiguousarray(array))
            for name, array in self.task.arrays(batch).items()
        }
        if self.parts.pin_memory:
            arrays = {name: tensor.pin_memory() for name, tensor in arrays.items()}
        return PreparedBatch(weight=int(batch.weight), num_tokens=int(batch.num_tokens), arrays=arrays)

    def backward(self, window: Sequence[PreparedBatch], *, loss_scale: float = 1.0) -> Backward:
        self._random_before = states.export_random(self.device)
        with memory_errors(self.device):
            return self._backward(window, loss_scale=loss_scale)

    def discard(self) -> None:
        self.masters.clear_gradients()
        states.import_random(self.device, self._random_before)

    def update(self, *, lr: float) -> None:
        optimizer = self._trained_optimizer()
        set_learning_rate(optimizer, lr)
        with memory_errors(self.device):
            optimizer.step()
        self.masters.publish()
        self.masters.clear_gradients()
        self.parts.cache.after_step()

    def evaluate(self, batches: Iterable[Batch]) -> EvalResult:
        total, weight, metrics = 0.0, 0, MetricTotals(self.task.metric_names)
        with (
            self.averaged(),
            evaluating(self.model),
            memory_errors(self.device, doing=EVALUATING),
            states.separate_random(self.device),
            torch.inference_mode(),
            self.precision.context(self.device),
        ):
            for index, batch in enumerate(batches):
                # A task that draws noise draws the same in every evaluation.
                torch.manual_seed(self.plan.config.seed + index)
                loss, sums = self.task.loss(self.model, self._to_device(self.prepare(batch)))
                total += float(loss)
                weight += batch.weight
                metrics.add(sums)
        loss_mean = total / weight if weight else math.nan
        return EvalResult(loss=loss_mean, weight=weight, metrics=metrics.means())

    def find_nonfinite(self, window: Sequence[PreparedBatch]) -> str:
        if broken := bad_weights(self.masters.masters):
            return f"the weight {broken[0]} was not finite before the step"
        before = states.export_random(self.device)
        with watch_outputs(self.model) as layers, memory_errors(self.device):
            self._backward(window)
        gradients = bad_gradients(self.masters.masters)
        self.masters.clear_gradients()
        states.import_random(self.device, before)
        if layers:
            return f"the first non-finite value was the output of {layers[0]}"
        if gradients:
            return f"every output was finite; the first non-finite gradient was that of {gradients[0]}"
        return "every value was finite when the step was run again"

    def memory(self) -> Memory:
        return read_memory(self.device)

    def num_parameters(self) -> tuple[int, int]:
        trained = sum(p.numel() for p in self.masters.parameters.values())
        added = sum(p.numel() for p in export.adapter_weights(self.adapters).values())
        return trained, count_weights(self.model) - added

    def trained_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(master.shape) for name, master in self.masters.masters.items()}

    def export_state(self, *, copy: bool = True) -> SessionState:
        masters = self.masters.masters
        with memory_errors(self.device, doing="a copy of the training state"):
            return SessionState(
                weights={name: states.to_host(master, copy=copy) for name, master in masters.items()},
                moments=states.export_moments(self._trained_optimizer(), masters, copy=copy),
                random=states.export_random(self.device),
            )

    def import_state(self, state: SessionState) -> None:
        self.import_weights(state.weights)
        states.import_moments(self._trained_optimizer(), self.masters.masters, state.moments)
        states.import_random(self.device, state.random)

    def import_weights(self, weights: Mapping[str, Array]) -> None:
        states.import_weights(self.masters.masters, weights)
        self.masters.publish()
        for master, average in averages_of(self.optimizer).items():
            average.copy_(master.detach())

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the moving average in the place of the weights inside the block; without one, change nothing."""
        averages = averages_of(self.optimizer)
        if not averages or self._is_averaged:
            yield
            return
        self._is_averaged = True
        self._swap(averages)
        try:
            yield
        finally:
            self._swap(averages)
            self._is_averaged = False

    @torch.no_grad()
    def _swap(self, averages: Mapping[torch.Tensor, torch.Tensor]) -> None:
        for master, average in averages.items():
            kept = master.detach().clone()
            master.copy_(average)
            average.copy_(kept)
        self.masters.publish()

    def save_result(self, folder: Path | None) -> Path | None:
        if folder is None:  # every rank has the whole model, so only the writing rank has work to do
            return None
        with memory_errors(self.device, doing="writing the result"), self.averaged():
            return self._write_result(folder)

    def _write_result(self, folder: Path) -> Path:
        if self.adapters:
            return self._save_adapter(folder / "adapter")
        target = folder / "model"
        if isinstance(self.task, WritesModel):
            self.task.write_model(self.model, target, trained=self.masters.masters)
        else:
            export.save_tensors(target, self.model.state_dict().items())
        return target

    def _save_adapter(self, folder: Path) -> Path:
        opening = self.parts.opening
        save_adapter(
            folder,
            export.host_weights(self.adapters),
            settings=AdapterSettings.from_config(self.plan.config, method=self.plan.method),
            targets=name_targets(self.model, self.adapters),
            base=opening.folder,
            base_name=opening.base_name,
            record=self.task.base_record() if isinstance(self.task, RecordsBase) else {},
        )
        return folder

    def _backward(self, window: Sequence[PreparedBatch], *, loss_scale: float = 1.0) -> Backward:
        """Leave the gradients of the window in the masters, unscaled and clipped."""
        weight = sum(batch.weight for batch in window)
        total, metrics = torch.zeros((), device=self.device), MetricTotals(self.task.metric_names)
        for batch in window:
            with self.precision.context(self.device):
                loss, sums = self.task.loss(self.model, self._to_device(batch))
                loss = loss / weight
            (loss * loss_scale).backward()
            self.masters.collect_gradients()
            total += loss.detach()
            metrics.add(sums)
        trained = list(self.masters.masters.values())
        if loss_scale != 1.0:
            for tensor in trained:
                if tensor.grad is not None:
                    tensor.grad.div_(loss_scale)
        config = self.plan.config
        limit = config.grad_norm if config.apply_gradient_clipping else math.inf
        norm = torch.nn.utils.clip_grad_norm_(trained, limit)
        return Backward(
            loss=float(total),
            grad_norm=float(norm),
            weight=weight,
            num_tokens=sum(batch.num_tokens for batch in window),
            metrics=metrics.means(),
        )

    def _to_device(self, batch: PreparedBatch) -> Tensors:
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.arrays.items()}

    def _trained_optimizer(self) -> torch.optim.Optimizer:
        assert self.optimizer is not None, "this session was opened without training"
        return self.optimizer


class MetricTotals:
    """Sums of a task's metrics and of their weights, kept on the device until read."""

    def __init__(self, names: Sequence[str]) -> None:
        self._sums: dict[str, tuple[torch.Tensor | float, torch.Tensor | float]] = dict.fromkeys(
            names, (0.0, 0.0)
        )

    def add(self, sums: MetricSums) -> None:
        check_known_metrics(sums, self._sums)
        for name, (total, weight) in sums.items():
            before = self._sums[name]
            self._sums[name] = (before[0] + _detached(total), before[1] + _detached(weight))

    def means(self) -> Metrics:
        return {
            name: float(total) / float(weight) if float(weight) else math.nan
            for name, (total, weight) in self._sums.items()
        }


def _detached(value: torch.Tensor | float) -> torch.Tensor | float:
    """Return a number to sum up, in a dtype that counts exactly."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to(torch.float32 if value.device.type == "mps" else torch.float64)
