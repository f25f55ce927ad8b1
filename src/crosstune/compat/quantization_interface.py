"""The guides' abstract classes: what a quantized layer and a quantization adapter can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from crosstune.compat.quantization_config import QuantizationConfig


class QuantizedLinear(ABC):
    """A linear layer with a quantized weight. Every torch layer with these three methods is one."""

    @abstractmethod
    def forward(self, x: Any) -> Any: ...

    @abstractmethod
    def quantize_weights(self, weight: Any) -> None:
        """Take another dense weight."""

    @abstractmethod
    def dequantize_weights(self, dtype: Any = None) -> Any:
        """The weight as a dense matrix."""

    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        if cls is not QuantizedLinear:
            return NotImplemented
        names = ("forward", "quantize_weights", "dequantize_weights")
        return all(hasattr(other, name) for name in names) or NotImplemented


class QuantizationAdapter(ABC):
    """A way to quantize models, by its configuration."""

    def __init__(self, config: QuantizationConfig | None = None) -> None:
        self.config = QuantizationConfig() if config is None else config
        self.adjustments: list[str] = []
        """What `create_quantization_adapter` changed of what was asked, and why."""

    @abstractmethod
    def create_quantized_linear(
        self, in_features: int, out_features: int, bias: bool = True, *, device: Any = None
    ) -> Any:
        """A new layer as torch would start it, quantized."""

    @abstractmethod
    def quantize_model(self, model: Any) -> Any:
        """Replace the linear layers in place, where the model is; returns the model."""

    @abstractmethod
    def prepare_model_for_training(self, model: Any, use_gradient_checkpointing: bool = False) -> Any:
        """Freeze the model, so that what is added to it trains through its quantized layers."""

    @abstractmethod
    def save_quantized_model(self, model: Any, path: str | Path) -> None:
        """Write a folder of safetensors and JSON."""

    @abstractmethod
    def load_quantized_model(self, path: str | Path, model: Any = None, *, device: Any = None) -> Any:
        """The saved model, bit for bit. One that is not transformers' is built by you and given as `model`."""
