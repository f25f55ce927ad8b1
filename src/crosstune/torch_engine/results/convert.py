"""Rewrite a model folder with quantized, requantized or dense weights, and measure the error."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from crosstune.core.model_folders import DenseWeights, OnBytes
from crosstune.core.quantization import QuantSpec
from crosstune.models.folder import PLAIN_STEM, QUANTIZED_STEM
from crosstune.torch_engine.loading.load import check_layer_shapes, forms_to_quantize, read_config
from crosstune.torch_engine.loading.prequantized import Prequantized, own_config, write_record
from crosstune.torch_engine.loading.weight_forms import WeightForm
from crosstune.torch_engine.quantized import quantize_weight
from crosstune.torch_engine.results import export
from crosstune.torch_engine.results.merge import BaseTensors

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
    """The conversion of a folder, tensor by tensor, with its error."""

    start: Path
    device: torch.device
    spec: QuantSpec | None
    """None for dense weights."""
    dtype: torch.dtype
    """The dtype of dense weights and scales in the result."""
    replaced: Prequantized | None = None
    """The quantized folder made from `start` before, if any: the same layers are quantized again."""
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
        config = read_config(self.start)
        config.dtype = self.dtype
        if self.spec is not None:
            check_layer_shapes(self.spec, self._chosen())
            config.quantization_config = own_config(self.spec)
        stem = PLAIN_STEM if self.spec is None else QUANTIZED_STEM
        export.save_model(folder, config, self._tensors(on_read), base=tokenizer, stem=stem)
        if self.spec is not None:
            write_record(folder, spec=self.spec, dtype=self.dtype, layers=self.layers, original=original)

    def result_bytes(self) -> int:
        """Estimate the size of the result. Scales need up to two bits per weight."""
        chosen = self._chosen()
        bits = self.spec.bits + 2 if self.spec is not None else 8 * self.dtype.itemsize
        counts = {name: math.prod(shape) for name, shape in self._source.shapes.items()}
        converted = sum(count for name, count in counts.items() if name in chosen)
        return converted * bits // 8 + (sum(counts.values()) - converted) * self.dtype.itemsize + _SPARE_BYTES

    def _tensors(self, on_read: OnBytes | None) -> Iterator[tuple[str, torch.Tensor]]:
        chosen, source = self._chosen(), self._source
        for group, tensors in source.read(on_read=on_read):
            rounded = {
                name: tensor.to(self.dtype) if tensor.is_floating_point() else tensor
                for name, tensor in tensors.items()
            }
            if self.spec is None:
                for name in tensors.keys() & chosen.keys():
                    self.errors.add(name.removesuffix(".weight"), rounded[name], tensors[name])
                yield from source.layout.revert(group, rounded).items()
                continue
            for name, tensor in tensors.items():
                if name in chosen:
                    yield from self._quantized(chosen[name], tensor)
                else:
                    yield name, rounded[name]

    def _quantized(self, form: WeightForm, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        assert self.spec is not None
        for layer, matrix in zip(form.matrices, form.split(tensor), strict=True):
            stored = quantize_weight(matrix.to(self.device), self.spec, self.dtype)
            self.errors.add(layer, stored.dequantize(torch.float32).cpu(), matrix)
            self.layers[layer] = dict(stored.facts)
            for part, values in stored.tensors().items():
                yield f"{layer}.weight.{part}", values.detach().clone()

    @cached_property
    def _source(self) -> BaseTensors:
        return BaseTensors(DenseWeights(folder=self.start), self.device)

    def _chosen(self) -> dict[str, WeightForm]:
        """Return the weights to convert by parameter: the quantized weights, or all that can be quantized."""
        source = self._source
        held = self.replaced.forms(source.model) if self.replaced is not None else source.held
        if held or self.spec is None:
            return {name: source.forms.get(name, form) for name, form in held.items()} or source.forms
        return forms_to_quantize(source.model, self.spec)


def measure_errors(prequantized: Prequantized, original: Path, device: torch.device) -> WeightErrors:
    """Return the error of a quantized folder against its original weights."""
    errors, source = WeightErrors(), BaseTensors(DenseWeights(folder=original), device)
    held = prequantized.forms(source.model)
    for _, tensors in source.read():
        for name in tensors.keys() & held.keys():
            form = source.forms.get(name, held[name])
            for layer, matrix in zip(form.matrices, form.split(tensors[name]), strict=True):
                stored = prequantized.stored(layer, device)
                errors.add(layer, stored.dequantize(torch.float32).cpu(), matrix)
    return errors
