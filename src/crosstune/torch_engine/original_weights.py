"""Run a quantized model with its original weights temporarily, reading each from its file when needed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from crosstune.torch_engine.blocks import Expansion
from crosstune.torch_engine.quantized import QuantLinear
from crosstune.torch_engine.stream import Place, find_tensors, read_tensor


class FileWeight(nn.Module):
    """A weight on disk that replaces a quantized one; only one is in memory at a time."""

    def __init__(self, shape: tuple[int, int], place: Place, device: torch.device) -> None:
        super().__init__()
        self.shape, self.place, self.device = shape, place, device

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        return read_tensor(self.place).to(self.device, dtype)


@contextlib.contextmanager
def original_weights(model: nn.Module, folder: Path, expansion: Expansion) -> Iterator[None]:
    """Use the base folder's weights in the quantized layers of a model that was expanded from it."""
    places = {
        target: place for name, place in find_tensors(folder).items() for target, _ in expansion.names(name)
    }
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantLinear)}
    kept = {name: layer.stored for name, layer in layers.items()}
    try:
        for name, layer in layers.items():
            device = kept[name].packed.device
            original = FileWeight(kept[name].shape, places[f"{name}.weight"], device)
            layer.register_module("stored", original)
        yield
    finally:
        for name, layer in layers.items():
            layer.stored = kept[name]
