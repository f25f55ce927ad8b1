"""Define the torch engine's task protocol (a model, the arrays of a batch, a loss), and what tasks share: sums of metrics, initial weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import nn

from crosstune.config.resolve.plan import Plan
from crosstune.core.protocols import Array
from crosstune.process.ranks import MetricTotals
from crosstune.torch_engine.device import Precision, evaluating
from crosstune.torch_engine.sharding.local_shard import free_gathered, local_part

Tensors = Mapping[str, torch.Tensor]
MetricSums = Mapping[str, tuple[torch.Tensor | float, torch.Tensor | float]]
"""Name -> (sum, weight); the metric is their quotient over all batches and ranks."""
Finish = Callable[[nn.Module, str], None]


@dataclass(frozen=True, kw_only=True)
class BuildContext:
    """Arguments for building a model."""

    plan: Plan
    device: torch.device
    precision: Precision
    folder: Path | None
    """The base model; None for a recipe without one."""
    base_name: str | None = None
    """The hub id of the base model, if it came from there."""
    finish: Finish | None = None
    """Shards a loaded block, so that no process stores the whole model; None without sharding. Call it with the model and
    the name of each block, and last with "" for the rest. If a task does not call it, the engine does."""


class TorchTask(Protocol):
    """The part of a recipe inside the torch engine."""

    metric_names: Sequence[str]
    """Names of the metrics that `loss` returns."""

    def build(self, context: BuildContext) -> nn.Module:
        """Return the model on the device, with its weights. Frozen parameters do not require gradients."""
        ...

    def arrays(self, batch: Any) -> Mapping[str, Array]:
        """Return the arrays of a batch that the loss reads. Called in a prefetch thread."""
        ...

    def loss(self, model: nn.Module, tensors: Tensors) -> tuple[torch.Tensor, MetricSums]:
        """Return the sum of losses over a batch, and the sums of its metrics."""
        ...


@runtime_checkable
class MeasuresEvaluation(Protocol):
    """A task with its own metrics for evaluations."""

    eval_metric_names: Sequence[str]

    def evaluate(self, model: nn.Module, tensors: Tensors) -> tuple[torch.Tensor, MetricSums]:
        """Return the sum of losses over a batch, and the sums of the evaluation's metrics."""
        ...


@runtime_checkable
class HasFastLayers(Protocol):
    """A task that can run the model with fast layers."""

    def general_layers(self) -> contextlib.AbstractContextManager[None]:
        """Use the model's own layers in the `with` block."""
        ...


@runtime_checkable
class KeepsReference(Protocol):
    """A task that compares the model with its initial weights."""

    def keep_reference(self, model: nn.Module, trained: Mapping[str, nn.Parameter]) -> None:
        """Keep the weights of an opened model, before a checkpoint is restored."""
        ...


@runtime_checkable
class WritesModel(Protocol):
    """A task that writes the whole model in a format that other tools read.

    Called on one rank, without collectives. The tensors come from `model.state_dict()` or, in fp32, from `trained`.
    """

    def write_model(self, model: nn.Module, folder: Path, *, trained: Tensors) -> None: ...


Number: TypeAlias = torch.Tensor | float


class DeviceTotals(MetricTotals):
    """The sums stay on the device until `means` reads them."""

    def number(self, value: Number) -> Number:
        """Return a number to add to a total: integers unchanged, others in the widest float of the device."""
        if not isinstance(value, torch.Tensor):
            return value
        if not value.is_floating_point():
            return value.detach()
        return value.detach().to(torch.float32 if value.device.type == "mps" else torch.float64)

    def larger(self, before: Number, found: Number) -> Number:
        if isinstance(found, torch.Tensor):
            return torch.maximum(found, torch.as_tensor(before, dtype=found.dtype, device=found.device))
        return max(float(before), found)

    def read(self, numbers: Sequence[Number]) -> list[float]:
        """Return the numbers, with one copy from the device for all of them."""
        stored = [number.reshape(()) for number in numbers if isinstance(number, torch.Tensor)]
        read = iter(torch.stack(stored).tolist() if stored else ())
        return [
            float(next(read)) if isinstance(number, torch.Tensor) else float(number) for number in numbers
        ]


class FirstWeights:
    """Copies of the trained weights when the model was opened."""

    def __init__(self, trained: Mapping[str, nn.Parameter]) -> None:
        self._kept = [(parameter, local_part(parameter.detach()).clone()) for parameter in trained.values()]

    @contextlib.contextmanager
    def restored(self, model: Any) -> Iterator[None]:
        """Use the initial weights in the `with` block, without gradients and dropout."""
        with evaluating(model), torch.no_grad():
            trained = [local_part(parameter.detach()).clone() for parameter, _ in self._kept]
            self._put(model, [before for _, before in self._kept])
            try:
                yield
            finally:
                self._put(model, trained)

    def _put(self, model: nn.Module, values: list[torch.Tensor]) -> None:
        """Copy into this rank's part of the trained weights. The next pass gathers them again: FSDP2 keeps some between passes."""
        free_gathered(model)
        for (parameter, _), value in zip(self._kept, values, strict=True):
            local_part(parameter).copy_(value)
