"""The original import path: `from quantization_wrapper import QuantizationConfig, QuantizationMethod`."""

from crosstune.compat.quantization_adapters import (
    BitsAndBytesAdapter,
    FallbackAdapter,
    HQQAdapter,
    MLXAdapter,
    QuantizationAdapter,
    QuantoAdapter,
    replace_linear_with_quantized,
)
from crosstune.compat.quantization_choice import (
    create_quantization_adapter,
    get_recommended_config,
    validate_quantization_config,
)
from crosstune.compat.quantization_config import QuantizationConfig, QuantizationMethod, QuantizedLinear

__all__ = [
    "BitsAndBytesAdapter",
    "FallbackAdapter",
    "HQQAdapter",
    "MLXAdapter",
    "QuantizationAdapter",
    "QuantizationConfig",
    "QuantizationMethod",
    "QuantizedLinear",
    "QuantoAdapter",
    "create_quantization_adapter",
    "get_recommended_config",
    "replace_linear_with_quantized",
    "validate_quantization_config",
]
