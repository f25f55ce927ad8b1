"""Measure how much each input of a linear layer matters: its mean square over the tokens of some rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn


def input_squares(
    model: nn.Module,
    rows: Sequence[Sequence[int]],
    *,
    device: torch.device,
    show: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, NDArray[np.float32]]:
    """Return the mean squares of every linear layer's inputs, by the name of the layer."""
    sums: dict[str, torch.Tensor] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def add(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            values = inputs[0].detach().reshape(-1, inputs[0].shape[-1]).double()
            sums[name] = sums.get(name, 0.0) + values.square().sum(0)

        return add

    handles = [
        module.register_forward_pre_hook(watch(name))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        with torch.inference_mode():
            for done, row in enumerate(rows, start=1):
                model(input_ids=torch.tensor([list(row)], device=device))
                show(done, len(rows))
    finally:
        for handle in handles:
            handle.remove()
    count = sum(len(row) for row in rows)
    return {name: (total / count).float().cpu().numpy() for name, total in sums.items()}
