"""Define QuantizationConfig, QuantizationMethod and the interface of quantized layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any, Protocol, runtime_checkable

from crosstune.core.names import nearest

BITS = (2, 4, 8, 16)
HQQ_BITS = (1, 2, 3, 4, 8, 16)
DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""torch's names of the compute dtypes -> crosstune's."""
_OTHER_NAMES = {"float": "float32", "half": "float16"} | {short: name for name, short in DTYPES.items()}
NOT_PER_LAYER = ("storage_dtype", "layer_configs", "skip_modules", "backend_options")


class QuantizationMethod(Enum):
    """A library and the type it quantizes weights to."""

    BNB_NF4 = "bnb_nf4"
    BNB_INT8 = "bnb_int8"
    HQQ = "hqq"
    HQQ_4BIT = "hqq_4bit"
    MLX_INT4 = "mlx_int4"
    MLX_INT8 = "mlx_int8"
    QUANTO_INT2 = "quanto_int2"
    QUANTO_INT4 = "quanto_int4"
    QUANTO_INT8 = "quanto_int8"
    NONE = "none"

    @property
    def library(self) -> str:
        """bnb, hqq, mlx, quanto or none: its value for --quantization_backend."""
        return self.value.partition("_")[0]

    @property
    def bits(self) -> int | None:
        """The bits in the method's name; None for HQQ, which supports several."""
        if self is QuantizationMethod.NONE:
            return 16
        found = re.search(r"[0-9]+", self.value)
        return int(found[0]) if found else None


@dataclass
class QuantizationConfig:
    """The storage of weights. An invalid value raises a ValueError; adapters check the rest."""

    method: QuantizationMethod = QuantizationMethod.BNB_NF4
    bits: int = None  # type: ignore[assignment]  # replaced below
    """Default: the bits of the method."""
    group_size: int = 64
    """Weights that share a scale (hqq, quanto, mlx)."""
    compute_dtype: Any = None
    """A torch.dtype or its name; None computes in the dtype of the input."""
    storage_dtype: Any = None
    """The 16-bit dtype of layers that are not quantized; quantizers choose their own."""
    double_quant: bool = True
    """bnb, 4 bits: quantize the scales too."""
    quant_type: str = "nf4"
    """bnb: nf4 or fp4. quanto, 8 bits: int or float8. Other methods ignore the default."""
    block_size: int = 64
    """Weights that share a scale (bnb, 4 bits)."""
    quant_zero: bool = True
    """hqq: quantize zero points to 8 bits."""
    quant_scale: bool = False
    """hqq: quantize scales to 8 bits; this multiplies the error of 8-bit weights."""
    layer_configs: dict[str, Any] = field(default_factory=dict)
    """Layer pattern (see `matches`) -> a number of bits, or a dict of options. When several match, the last one wins."""
    skip_modules: list[str] = field(default_factory=lambda: ["lm_head"])
    backend_options: dict[str, Any] = field(default_factory=dict)
    """Part of the original interface; each entry raises a warning, as no backend has options."""

    def __post_init__(self) -> None:
        self.method = _read_method(self.method)
        if self.bits is None:
            self.bits = self.method.bits or 4
        allowed = HQQ_BITS if self.method.library == "hqq" else BITS
        if self.bits not in allowed:
            raise ValueError(
                f"{self.method.name} does not support bits={self.bits}; use one of {', '.join(map(str, allowed))}."
            )
        for name in ("group_size", "block_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} is not a positive integer.")
        if self.compute_dtype is not None and dtype_name(self.compute_dtype) not in DTYPES:
            raise ValueError(f"compute_dtype={self.compute_dtype} is not one of {', '.join(DTYPES)}.")
        self.layer_configs = dict(self.layer_configs or {})
        self.skip_modules = list(self.skip_modules if self.skip_modules is not None else ["lm_head"])
        self.backend_options = dict(self.backend_options or {})
        for word, value in self.layer_configs.items():
            self.with_overrides(word, value)

    def for_layer(self, name: str) -> QuantizationConfig | None:
        """Return the configuration of one layer; None if the layer is skipped."""
        if any(matches(word, name) for word in self.skip_modules):
            return None
        config = self
        for word, value in self.layer_configs.items():
            if matches(word, name):
                config = config.with_overrides(word, value)
        return config

    def with_overrides(self, word: str, value: Any) -> QuantizationConfig:
        """Return this configuration with an entry of `layer_configs`, and without the others."""
        values = _read_overrides(word, value)
        try:
            method = self.method
            if "method" in values:
                method = _read_method(values["method"])
            elif "bits" in values:
                found = method_for(method.library, values["bits"])
                if found is None:
                    raise ValueError(
                        f"{method.library} does not support {values['bits']} bits; specify a method that does."
                    )
                method = found
            if method is not self.method:
                # A quant_type such as fp4 belongs to the method it was chosen for.
                values = {"quant_type": "nf4", "bits": None} | values
            return replace(self, **{"layer_configs": {}, **values, "method": method})
        except ValueError as error:
            raise ValueError(f"layer_configs[{word!r}]: {error}") from error

    def moved_to(self, library: str) -> QuantizationConfig | None:
        """Return the configuration for a different library with the same group size; None if it lacks these bits."""
        method = method_for(library, self.bits)
        if method is None:
            return None
        size = self.block_size if self.method.library == "bnb" else self.group_size
        group, block = (64, size) if library == "bnb" else (size, 64)
        return replace(
            self, method=method, group_size=group, block_size=block, quant_type="nf4", double_quant=True
        )

    def to_json(self) -> dict[str, Any]:
        return {name: _plain(value) for name, value in vars(self).items()}


def method_for(library: str, bits: int) -> QuantizationMethod | None:
    """Return the library's method with these bits; 16 bits is NONE for every library."""
    if bits == 16:
        return QuantizationMethod.NONE
    if library == "hqq":
        return QuantizationMethod.HQQ if bits in HQQ_BITS else None
    return next((m for m in QuantizationMethod if (m.library, m.bits) == (library, bits)), None)


def matches(word: str, name: str) -> bool:
    """True if `word` is consecutive parts of the name, such as lm_head or layers.0, or a pattern with * or ?."""
    if "*" in word or "?" in word:
        return fnmatchcase(name, word)
    wanted, parts = word.split("."), name.split(".")
    return any(parts[start : start + len(wanted)] == wanted for start in range(len(parts)))


def dtype_name(dtype: Any) -> str | None:
    """Return torch's name of a dtype given as torch.float16, 'float16' or 'fp16'."""
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    return _OTHER_NAMES.get(name, name)


def _plain(value: Any) -> Any:
    """Return a setting as JSON: a method by its value, a dtype by its name."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, QuantizationMethod):
        return value.value
    return value if isinstance(value, (int, str, list, type(None))) else dtype_name(value)


def _read_method(value: Any) -> QuantizationMethod:
    if isinstance(value, QuantizationMethod):
        return value
    names = {method.value: method for method in QuantizationMethod}
    found = names.get(str(value).strip().lower())
    if found is None:
        raise ValueError(f"Unknown quantization method {value!r}. Known methods: {', '.join(names)}.")
    return found


def _read_overrides(word: str, value: Any) -> dict[str, Any]:
    if isinstance(value, int) and not isinstance(value, bool):
        return {"bits": value}
    if not isinstance(value, Mapping):
        raise ValueError(f"layer_configs[{word!r}] is neither a number of bits nor a dict of options.")
    options = [item.name for item in fields(QuantizationConfig) if item.name not in NOT_PER_LAYER]
    unknown = [key for key in value if key not in options]
    if unknown:
        close = nearest(str(unknown[0]), options)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise ValueError(
            f"layer_configs[{word!r}] has no option {unknown[0]!r}.{hint} Options: {', '.join(options)}."
        )
    return dict(value)


@runtime_checkable
class QuantizedLinear(Protocol):
    """A linear layer with a quantized weight. Every torch layer with these three methods is an instance."""

    def forward(self, x: Any) -> Any: ...

    def quantize_weights(self, weight: Any) -> None:
        """Quantize a dense weight and replace the layer's weight with it."""

    def dequantize_weights(self, dtype: Any = None) -> Any:
        """Return the weight as a dense matrix."""
