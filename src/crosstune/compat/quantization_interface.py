"""The guides' abstract classes: a quantized layer and a quantization adapter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from crosstune.compat.quantization_config import QuantizationConfig


class QuantizedLinear(ABC):
    """A linear layer with a quantized weight. Every torch layer with these three methods is an instance."""

    @abstractmethod
    def forward(self, x: Any) -> Any: ...

    @abstractmethod
    def quantize_weights(self, weight: Any) -> None:
        """Replace the weight by this dense weight, quantized."""

    @abstractmethod
    def dequantize_weights(self, dtype: Any = None) -> Any:
        """Return the weight as a dense matrix."""

    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        if cls is not QuantizedLinear:
            return NotImplemented
        names = ("forward", "quantize_weights", "dequantize_weights")
        return all(hasattr(other, name) for name in names) or NotImplemented


class QuantizationAdapter(ABC):
    """Quantizes models as its configuration says."""

    def __init__(self, config: QuantizationConfig | None = None) -> None:
        self.config = QuantizationConfig() if config is None else config
        self.adjustments: list[str] = []
        """Changes that `create_quantization_adapter` made to the requested configuration, with the reasons."""

    @abstractmethod
    def create_quantized_linear(
        self, in_features: int, out_features: int, bias: bool = True, *, device: Any = None
    ) -> Any:
        """Return a new quantized layer with torch's default initialization."""

    @abstractmethod
    def quantize_model(self, model: Any) -> Any:
        """Replace the linear layers in place, on the model's device, and return the model."""

    @abstractmethod
    def prepare_model_for_training(self, model: Any, use_gradient_checkpointing: bool = False) -> Any:
        """Freeze the model, so that adapters added to it can be trained."""

    @abstractmethod
    def save_quantized_model(self, model: Any, path: str | Path) -> None:
        """Write a folder of safetensors and JSON."""

    @abstractmethod
    def load_quantized_model(self, path: str | Path, model: Any = None, *, device: Any = None) -> Any:
        """Return the saved model, bit for bit. Pass a model that is not from transformers, newly built, as `model`."""
