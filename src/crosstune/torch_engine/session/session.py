"""Implement `Session` with torch: gradients of a step, updates, evaluation, state and results."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from crosstune.core.out_of_memory import EVALUATING, UPDATING
from crosstune.core.profiling import (
    BACKWARD,
    COMMUNICATION,
    DATA,
    FORWARD,
    OPTIMIZER,
    Phase,
    ProfileSettings,
    no_phase,
)
from crosstune.core.protocols import (
    Array,
    Backward,
    Batch,
    EvalResult,
    HasOwnHead,
    Memory,
    PreparedBatch,
    SessionState,
)
from crosstune.core.weights import kept_moments
from crosstune.process.ranks import Group, SingleProcess
from crosstune.torch_engine.device import (
    clear_cache,
    compile_errors,
    evaluating,
    memory_errors,
    read_memory,
    reset_peak,
)
from crosstune.torch_engine.loading.adapters import Adapted
from crosstune.torch_engine.quantized import count_weights
from crosstune.torch_engine.results import export
from crosstune.torch_engine.session import state as states
from crosstune.torch_engine.session.find_nonfinite import find_nonfinite
from crosstune.torch_engine.session.offload_activations import offload_activations
from crosstune.torch_engine.session.optimizer import Masters, averages_of, set_learning_rate, swap
from crosstune.torch_engine.session.profiler import TorchProfiler
from crosstune.torch_engine.sharding.local_shard import (
    free_gathered,
    is_sharded,
    without_gradients,
)
from crosstune.torch_engine.task import (
    BuildContext,
    DeviceTotals,
    HasFastLayers,
    MeasuresEvaluation,
    Tensors,
    TorchTask,
)
from crosstune.torch_engine.tasks.causal_lm import CausalLM

if TYPE_CHECKING:
    from crosstune.torch_engine.sharding.parallel import Parallel

LARGE_STATE_BYTES = 2**30
"""Each rank writes its own part of a sharded state of at least this size."""


@dataclass(kw_only=True, eq=False)
class TorchSession:
    """A model, its adapters and its optimizer on the device of this process."""

    context: BuildContext
    task: TorchTask
    model: nn.Module
    adapters: dict[str, Adapted]
    masters: Masters
    optimizer: torch.optim.Optimizer | None
    """None if the model is only evaluated."""
    cache_interval: int = 0
    """Release torch's cached memory after this number of updates; never if 0."""
    pin_memory: bool = False
    parallel: Parallel | None = None
    """None for a single process."""
    notes: Sequence[str] = ()
    """Decisions made while opening the model, for the user."""

    def __post_init__(self) -> None:
        context = self.context
        self.plan, self.device, self.precision = context.plan, context.device, context.precision
        self.group: Group = self.parallel.group if self.parallel is not None else SingleProcess()
        self._random_before: dict[str, Array] = {}
        self._is_averaged = False
        self._num_updates = 0
        self.phase: Phase = no_phase

    def prepare(self, batch: Batch) -> PreparedBatch:
        """Return the batch as host tensors, pinned if copies to the device can overlap with the host."""
        arrays = {
            name: torch.from_numpy(np.require(array, requirements=("C", "W")))
            for name, array in self.task.arrays(batch).items()
        }
        if self.pin_memory:
            arrays = {name: tensor.pin_memory() for name, tensor in arrays.items()}
        return PreparedBatch(weight=int(batch.weight), num_tokens=int(batch.num_tokens), arrays=arrays)

    def backward(self, window: Sequence[PreparedBatch], *, loss_scale: float = 1.0) -> Backward:
        self._random_before = states.export_random(self.device)
        with self.connected("a step"), memory_errors(self.device), compile_errors(self.model):
            return self.compute_gradients(window, loss_scale=loss_scale)

    def connected(self, doing: str) -> contextlib.AbstractContextManager[None]:
        """Convert errors of collectives in the `with` block; do nothing for a single process."""
        return self.parallel.connected(doing) if self.parallel is not None else contextlib.nullcontext()

    def discard(self) -> None:
        self.masters.clear_gradients()
        states.import_random(self.device, self._random_before)

    def update(self, *, lr: float) -> None:
        optimizer = self._trained_optimizer()
        set_learning_rate(optimizer, lr)
        with self.phase(OPTIMIZER):
            with self.connected("an update"):
                with memory_errors(self.device, doing=UPDATING):
                    optimizer.step()
                self.masters.publish()
            self.masters.clear_gradients()
        self._num_updates += 1
        if self.cache_interval and self._num_updates % self.cache_interval == 0:
            clear_cache(self.device)

    def evaluate(self, batches: Iterable[Batch]) -> EvalResult:
        measure, names = self.task.loss, self.task.metric_names
        if isinstance(self.task, MeasuresEvaluation):
            measure, names = self.task.evaluate, self.task.eval_metric_names
        total, weight, metrics = 0.0, 0, DeviceTotals(names)
        with (
            self.connected(EVALUATING),
            self.averaged(),
            evaluating(self.model),
            self.parallel.passes(self.model, doing=EVALUATING) if self.parallel else contextlib.nullcontext(),
            memory_errors(self.device, doing=EVALUATING),
            states.separate_random(self.device),
            without_gradients(self.model),
            self.precision.context(self.device),
        ):
            for index, batch, counts in self._evaluation_batches(batches):
                # The noise of a task is the same in every evaluation and at any world size.
                torch.manual_seed(self.plan.config.seed + index)
                loss, sums = measure(self.model, self._to_device(batch))
                if counts:
                    total += float(loss)
                if counts and (self.parallel is None or self.parallel.counts_rows):
                    weight += batch.weight
                    metrics.add(sums)
        total, weights = self.group.sum_numbers(total, weight)
        loss_mean = total / weights if weights else math.nan
        return EvalResult(loss=loss_mean, weight=int(weights), metrics=metrics.means(self.group))

    def find_nonfinite(self, window: Sequence[PreparedBatch]) -> str:
        def repeat() -> None:
            with contextlib.ExitStack() as stack:
                if isinstance(self.task, HasFastLayers):
                    stack.enter_context(self.task.general_layers())
                stack.enter_context(self.connected("a step"))
                self.compute_gradients(window)

        return find_nonfinite(self.model, self.masters, self.group, device=self.device, repeat=repeat)

    def memory(self) -> Memory:
        return read_memory(self.device)

    def profiler(self, settings: ProfileSettings) -> TorchProfiler:
        dtype = self.precision.autocast or self.precision.weights
        return TorchProfiler(self.device, settings, dtype=dtype)

    def reset_peak(self) -> None:
        reset_peak(self.device)

    def num_parameters(self) -> tuple[int, int]:
        trained = sum(p.numel() for p in self.masters.parameters.values())
        added = sum(p.numel() for p in export.adapter_weights(self.adapters).values())
        return trained, count_weights(self.model) - added

    def trained_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self.masters.shapes()

    def export_state(self, *, copy: bool = True, divided: bool = False) -> SessionState:
        doing, masters = "a copy of the training state", self.masters
        large = 12 * self.num_parameters()[0] >= LARGE_STATE_BYTES  # the weights and two moments in fp32
        if divided and large and self.parallel is not None and self.parallel.num_shards > 1:
            part = self.parallel.state_part(masters.shapes())
            return states.export_part(self._trained_optimizer(), masters, part, device=self.device)
        with self._gathering(doing), memory_errors(self.device, doing=doing):
            return SessionState(
                weights=states.export_weights(masters, copy=copy),
                moments=states.export_moments(
                    self._trained_optimizer(), masters.masters, parameters=masters.parameters, copy=copy
                ),
                random=states.export_random(self.device),
            )

    def import_state(self, state: SessionState) -> None:
        self.import_weights(state.weights)
        masters = self.masters
        moments = kept_moments(state, ema_decay=self.plan.config.ema_decay)
        states.import_moments(
            self._trained_optimizer(), masters.masters, moments, parameters=masters.parameters
        )
        states.import_random(self.device, state.random)

    def import_weights(self, weights: Mapping[str, Array]) -> None:
        free_gathered(self.model)  # from an earlier pass of a task that tries the model
        states.import_weights(self.masters, weights)
        self.masters.publish()
        for master, average in averages_of(self.optimizer).items():
            average.copy_(master.detach())

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Swap in the moving average of the weights, if there is one, in the `with` block."""
        averages = averages_of(self.optimizer)
        if not averages or self._is_averaged:
            yield
            return
        self._is_averaged = True
        swap(averages)
        self.masters.publish()
        try:
            yield
        finally:
            swap(averages)
            self.masters.publish()
            self._is_averaged = False

    def save_result(self, folder: Path | None) -> Path | None:
        doing, model, adapters, task = "writing the result", self.model, self.adapters, self.task
        with self._gathering(doing), memory_errors(self.device, doing=doing), self.averaged():
            if adapters and not isinstance(task, HasOwnHead):
                weights = states.export_weights(self.masters)
                if folder is None:
                    return None
                return export.write_adapter(
                    folder / "adapter",
                    weights,
                    model=model,
                    adapters=adapters,
                    context=self.context,
                    task=task,
                )
            if isinstance(task, CausalLM):
                task.measure_result(model)
            target = folder / "model" if folder is not None else None
            return export.write_model(
                target, model, self.masters, merged=adapters, task=task, group=self.group
            )

    def _gathering(self, doing: str) -> contextlib.AbstractContextManager[None]:
        """Like `connected` for sharded models; replicas gather nothing."""
        is_divided = self.parallel is not None and self.parallel.strategy.sharded
        return self.connected(doing) if is_divided else contextlib.nullcontext()

    def compute_gradients(self, window: Sequence[PreparedBatch], *, loss_scale: float = 1.0) -> Backward:
        """Compute the gradients of a step into the masters, unscaled and clipped."""
        weight = sum(batch.weight for batch in window)
        total, metrics = torch.zeros((), device=self.device), DeviceTotals(self.task.metric_names)
        offload = self.plan.config.use_activation_cpu_offload
        with self._passes(window) as turns:
            for batch, counts in turns:
                with self.phase(DATA):
                    tensors = self._to_device(batch)
                with (
                    self.phase(FORWARD),
                    self.precision.context(self.device),
                    offload_activations(self.device, enabled=offload),
                ):
                    loss, sums = self.task.loss(self.model, tensors)
                    loss = loss / weight if counts else loss * 0.0
                with self.phase(BACKWARD):
                    (loss * loss_scale).backward()
                    self.masters.collect_gradients()
                if counts:
                    total += loss.detach()
                    metrics.add(sums)
        if self.parallel is not None:
            with self.phase(COMMUNICATION):
                self.parallel.reduce_gradients(self._replicated())
        trained = list(self.masters.masters.values())
        if loss_scale != 1.0:
            for tensor in trained:
                if tensor.grad is not None:
                    tensor.grad.div_(loss_scale)
        with self.phase(OPTIMIZER):
            norm = self._clip(trained)
        loss_sum, grad_norm = self._read(total, norm)
        return Backward(
            loss=loss_sum,
            grad_norm=grad_norm,
            weight=weight,
            num_tokens=sum(batch.num_tokens for batch in window),
            metrics=metrics.means(self.group),
        )

    def _clip(self, trained: Sequence[torch.Tensor]) -> torch.Tensor | float:
        """Clip the gradients and return their norm before; with one process, as a tensor on the device."""
        config = self.plan.config
        limit = config.grad_norm if config.apply_gradient_clipping else math.inf
        if self.parallel is None:
            return torch.nn.utils.clip_grad_norm_(trained, limit)
        same = self._replicated()
        divided = [tensor for name, tensor in self.masters.masters.items() if name not in same]
        return self.parallel.clip_gradients(divided, list(same.values()), limit)

    def _read(self, total: torch.Tensor, norm: torch.Tensor | float) -> tuple[float, float]:
        """Return the loss, summed across the processes, and the norm. The host waits for the device only here."""
        if isinstance(norm, torch.Tensor) and norm.dtype == total.dtype:
            loss, norm = torch.stack([total, norm]).tolist()
        else:
            loss, norm = float(total), float(norm)
        return self.group.sum_numbers(loss)[0], norm

    def _replicated(self) -> dict[str, torch.Tensor]:
        """Return the masters that are not sharded."""
        parameters = self.masters.parameters
        return {name: m for name, m in self.masters.masters.items() if not is_sharded(parameters[name])}

    @contextlib.contextmanager
    def _passes(self, window: Sequence[PreparedBatch]) -> Iterator[Iterator[tuple[PreparedBatch, bool]]]:
        """Yield the micro-batches of this rank, each with a flag that is false for a filler (see
        `Parallel.local_micro_batches`)."""
        if self.parallel is None:
            yield ((batch, True) for batch in window)
            return
        self._check_batches(window)
        with self.parallel.passes(self.model), memory_errors(self.device):
            yield self.parallel.local_micro_batches(self.model, window)

    def _evaluation_batches(self, batches: Iterable[Batch]) -> Iterator[tuple[int, PreparedBatch, bool]]:
        """Yield the index and batch of every size-th batch, with a flag that is false for a filler: a rank of a sharded
        model that runs out of batches repeats one, so that it still joins the passes of the others."""
        size, rank = (self.parallel.num_teams, self.parallel.team) if self.parallel is not None else (1, 0)
        found = enumerate(batches)
        while together := [(index, self.prepare(batch)) for index, batch in itertools.islice(found, size)]:
            self._check_batches([batch for _, batch in together])
            counts = rank < len(together)
            if counts or (self.parallel is not None and self.parallel.strategy.sharded):
                yield (*together[rank if counts else 0], counts)

    def _check_batches(self, batches: Sequence[PreparedBatch]) -> None:
        """Raise if the model cannot train on a batch. Called on every rank, since it may need a forward pass."""
        if self.parallel is not None and isinstance(self.task, CausalLM):
            for batch in batches:
                self.task.check_packed(self.model, self._to_device(batch).get("positions"))

    def _to_device(self, batch: PreparedBatch) -> Tensors:
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.arrays.items()}

    @property
    def optimizer_name(self) -> str:
        """The --optimizer, and whether it is torch's fused version, which `adamw` becomes on a GPU."""
        name = self.plan.config.optimizer.removeprefix("fused_")
        return f"{name} (fused)" if self.optimizer and self.optimizer.defaults.get("fused") else name

    def _trained_optimizer(self) -> torch.optim.Optimizer:
        assert self.optimizer is not None, "this session was opened without training"
        return self.optimizer
