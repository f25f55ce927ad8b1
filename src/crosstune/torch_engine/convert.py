"""Rewrite a model folder with quantized, requantized or dense weights, and measure the error."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from crosstune.core.model_folders import OnBytes
from crosstune.core.quantization import QuantSpec
from crosstune.models.folder import PLAIN_STEM, QUANTIZED_STEM
from crosstune.torch_engine import export
from crosstune.torch_engine.load import quantizable_layers, read_config
from crosstune.torch_engine.merge import Base, base_tensors, weight_shapes
from crosstune.torch_engine.prequantized import (
    Prequantized,
    own_config,
    pieces,
    read_prequantized,
    write_record,
)
from crosstune.torch_engine.quantized import open_quantizer, quantize_weight

_SPARE_BYTES = 50_000_000


@dataclass
class WeightErrors:
    """Relative error over all layers: the norm of the difference divided by the norm of the reference."""

    worst: float = 0.0
    worst_layer: str = ""
    _error: float = 0.0
    _total: float = 0.0

    def add(self, layer: str, weight: torch.Tensor, reference: torch.Tensor) -> None:
        error = float(((weight.double() - reference.double()) ** 2).sum())
        total = float((reference.double() ** 2).sum())
        self._error, self._total = self._error + error, self._total + total
        relative = (error / total) ** 0.5 if total else 0.0
        if relative > self.worst:
            self.worst, self.worst_layer = relative, layer

    @property
    def relative(self) -> float:
        return (self._error / self._total) ** 0.5 if self._total else 0.0

    def to_json(self) -> dict[str, Any]:
        return {"relative": self.relative, "worst": self.worst, "worst_layer": self.worst_layer}


@dataclass
class Conversion:
    """Convert the weights of `start` tensor by tensor and measure the error."""

    start: Base
    spec: QuantSpec | None
    """None for dense weights."""
    dtype: torch.dtype
    """Dtype of the dense weights and of the quantizer's scales in the result."""
    replaced: Prequantized | None = None
    """The quantized folder to replace when `start` is its original: the same layers are quantized."""
    errors: WeightErrors = field(default_factory=WeightErrors)
    layers: dict[str, dict[str, Any]] = field(default_factory=dict)

    def write(
        self,
        folder: Path,
        *,
        tokenizer: Path,
        original: Mapping[str, Any] | None,
        on_read: OnBytes | None = None,
    ) -> None:
        config = read_config(self.start.folder)
        config.dtype = self.dtype
        if self.spec is not None:
            self.check_layer_shapes()
            config.quantization_config = own_config(self.spec)
        stem = PLAIN_STEM if self.spec is None else QUANTIZED_STEM
        export.save_model(folder, config, self._tensors(on_read), base=tokenizer, stem=stem)
        if self.spec is not None:
            write_record(folder, spec=self.spec, dtype=self.dtype, layers=self.layers, original=original)

    def result_bytes(self) -> int:
        """Estimate the size of the result; scales take up to two bits per weight."""
        chosen = self._chosen()
        bits = self.spec.bits + 2 if self.spec is not None else 8 * self.dtype.itemsize
        counts = {name: math.prod(shape) for name, shape in weight_shapes(self.start.folder).items()}
        converted = sum(count for name, count in counts.items() if name.removesuffix(".weight") in chosen)
        return converted * bits // 8 + (sum(counts.values()) - converted) * self.dtype.itemsize + _SPARE_BYTES

    def _tensors(self, on_read: OnBytes | None) -> Iterator[tuple[str, torch.Tensor]]:
        chosen = self._chosen()
        for name, tensor in base_tensors(self.start, on_read=on_read):
            layer = name.removesuffix(".weight")
            if layer not in chosen or not name.endswith(".weight"):
                yield name, tensor.to(self.dtype) if tensor.is_floating_point() else tensor
                continue
            yield from self._convert(layer, tensor)

    def _convert(self, layer: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        if self.spec is None:
            dense = tensor.to(self.dtype)
            self.errors.add(layer, dense, tensor)
            yield f"{layer}.weight", dense
            return
        stored = quantize_weight(tensor.to(self.start.device), self.spec, self.dtype)
        self.errors.add(layer, stored.dequantize(torch.float32).cpu(), tensor)
        tensors, self.layers[layer] = pieces(stored)
        yield from ((f"{layer}.weight.{part}", values) for part, values in tensors.items())

    def _chosen(self) -> set[str]:
        """Return the layers to convert: the ones already quantized, or all quantizable ones."""
        prequantized = self.replaced or read_prequantized(self.start.folder)
        return prequantized.layers if prequantized is not None else quantizable_layers(self.start.folder)

    def check_layer_shapes(self) -> None:
        assert self.spec is not None
        quantizer, shapes = open_quantizer(self.spec), weight_shapes(self.start.folder)
        for layer in sorted(self._chosen()):
            quantizer.check(self.spec, shapes[f"{layer}.weight"])


def measure_errors(prequantized: Prequantized, original: Base) -> WeightErrors:
    """Return the error of a quantized folder against the weights it was made from."""
    errors = WeightErrors()
    for name, tensor in base_tensors(original):
        layer = name.removesuffix(".weight")
        if layer in prequantized.layers and name.endswith(".weight"):
            errors.add(
                layer, prequantized.stored(layer, original.device).dequantize(torch.float32).cpu(), tensor
            )
    return errors
