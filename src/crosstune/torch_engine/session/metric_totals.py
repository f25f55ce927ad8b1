"""Sum a task's metrics over the batches of a step or an evaluation, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from crosstune.process.ranks import MetricTotals

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
