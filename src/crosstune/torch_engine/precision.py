"""Map each value of --precision to torch dtypes."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Precision:
    weights: torch.dtype
    """Dtype of the weights in memory. Trained parameters always have fp32 masters as well."""
    autocast: torch.dtype | None = None
    buffers: torch.dtype | None = None

    def context(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=self.autocast)


PRECISIONS = {
    "fp32": Precision(weights=torch.float32),
    "bf16": Precision(weights=torch.bfloat16),
    "fp16": Precision(weights=torch.float16),
    "bf16_autocast": Precision(weights=torch.float32, autocast=torch.bfloat16),
    "fp16_autocast": Precision(weights=torch.float32, autocast=torch.float16),
    "bf16_buffers_autocast": Precision(
        weights=torch.float32, autocast=torch.bfloat16, buffers=torch.bfloat16
    ),
}
