"""Sum a task's metrics over the batches of a step or an evaluation, on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from crosstune.core.events import check_known_metrics
from crosstune.core.protocols import Metrics
from crosstune.torch_engine.task import MetricSums

if TYPE_CHECKING:
    from crosstune.torch_engine.sharding.parallel import Parallel


class MetricTotals:
    """Sums of a task's metrics and weights, on the device until `means` reads them."""

    def __init__(self, names: Sequence[str]) -> None:
        self._sums: dict[str, tuple[torch.Tensor | float, torch.Tensor | float]] = dict.fromkeys(
            names, (0, 0)
        )

    def add(self, sums: MetricSums) -> None:
        check_known_metrics(sums, self._sums)
        for name, (total, weight) in sums.items():
            before = self._sums[name]
            self._sums[name] = (before[0] + _detached(total), before[1] + _detached(weight))

    def means(self, parallel: Parallel | None = None) -> Metrics:
        """Return the means across all ranks. All ranks have the same metrics."""
        numbers = _read([number for pair in self._sums.values() for number in pair])
        if parallel is not None:
            numbers = parallel.group.sum_numbers(*numbers)
        pairs = zip(numbers[::2], numbers[1::2], strict=True)
        return {
            name: total / weight if weight else math.nan
            for name, (total, weight) in zip(self._sums, pairs, strict=True)
        }


def _read(numbers: Sequence[torch.Tensor | float]) -> list[float]:
    """Return the numbers, with one copy from the device for all of them."""
    stored = [number.reshape(()) for number in numbers if isinstance(number, torch.Tensor)]
    read = iter(torch.stack(stored).tolist() if stored else ())
    return [float(next(read)) if isinstance(number, torch.Tensor) else float(number) for number in numbers]


def _detached(value: torch.Tensor | float) -> torch.Tensor | float:
    """Return a number to add to a total: integers unchanged, others in the widest float of the device."""
    if not isinstance(value, torch.Tensor):
        return value
    if not value.is_floating_point():
        return value.detach()
    return value.detach().to(torch.float32 if value.device.type == "mps" else torch.float64)
