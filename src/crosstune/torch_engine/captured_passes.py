"""Replay the passes of a training from CUDA graphs, where its task, its layers and its batches allow it."""

from __future__ import annotations

import numpy as np
import torch

from crosstune.torch_engine.kernels.choose import open_graphs
from crosstune.torch_engine.kernels.pass_graphs import PassGraphs
from crosstune.torch_engine.parts import Parts
from crosstune.torch_engine.task import Tensors
from crosstune.torch_engine.tasks.causal_lm import FAST_ARRAYS, CausalLM


class CapturedPasses:
    def __init__(self, parts: Parts, task: CausalLM, graphs: PassGraphs) -> None:
        self._parts, self._task, self._graphs = parts, task, graphs

    def loss(self, tensors: Tensors, *, weight: int, loss_scale: float, more: bool) -> torch.Tensor | None:
        """Add the gradients of a batch, and return its share of the loss; None if its pass is not captured."""
        if self._task.decoder is None or "rows" not in tensors:
            return None
        opening = self._parts.opening
        with opening.precision.context(opening.device):
            loss = self._graphs.add_gradients(
                lambda given: self._task.loss(self._parts.model, given)[0],
                {name: tensors[name] for name in FAST_ARRAYS if name in tensors},
                factor=float(np.float32(loss_scale) / np.float32(weight)),  # rounded as the device divides
                more=more,
            )
        return loss / weight if loss is not None else None

    def clear(self) -> None:
        """Free the memory of all captured passes."""
        self._graphs.clear()


def open_captured(parts: Parts) -> CapturedPasses | None:
    """Return the passes of a training that may be captured; None if it has none."""
    task = parts.task
    alone = parts.parallel is None and parts.masters.are_parameters and parts.optimizer is not None
    # The tasks of other recipes read other arrays and count their targets on the device.
    if not alone or type(task) is not CausalLM:
        return None
    graphs = open_graphs(task.decoder, list(parts.masters.parameters.values()), plan=parts.opening.plan)
    return CapturedPasses(parts, task, graphs) if graphs is not None else None
