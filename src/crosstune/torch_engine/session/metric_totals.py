"""Sum a task's metrics over the batches of a step or an evaluation, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from crosstune.core.events import check_known_metrics
from crosstune.core.protocols import Metrics
from crosstune.process.ranks import MAXIMUM, mean_metrics
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
            before, found = self._sums[name], _detached(total)
            added = _larger(before[0], found) if name.endswith(MAXIMUM) else before[0] + found
            self._sums[name] = (added, before[1] + _detached(weight))

    def means(self, parallel: Parallel | None = None) -> Metrics:
        """Return the means across all ranks. All ranks have the same metrics."""
        numbers = _read([number for pair in self._sums.values() for number in pair])
        return mean_metrics(list(self._sums), numbers, parallel.group if parallel is not None else None)


def _larger(before: torch.Tensor | float, found: torch.Tensor | float) -> torch.Tensor | float:
    if isinstance(found, torch.Tensor):
        return torch.maximum(found, torch.as_tensor(before, dtype=found.dtype, device=found.device))
    return max(float(before), found)


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
