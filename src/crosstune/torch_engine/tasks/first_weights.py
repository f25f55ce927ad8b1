"""Keep the initial trained weights of a model, and turn the model into its initial state for a pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from crosstune.torch_engine.device import evaluating
from crosstune.torch_engine.sharding.local_shard import free_gathered, local_part


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
