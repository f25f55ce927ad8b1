"""Define the identity of a quantization: its fields, its form in files, and the fields that change the numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from types import ModuleType
from typing import Any

from crosstune.core.errors import UserError, shown
from crosstune.core.names import load_plugin, plugin_names

QUANT_PACKAGES = {"torch": "crosstune.torch_engine.quant", "mlx": "crosstune.mlx_engine.quant"}
"""Engine -> the package of its quantizers, one file each."""
LAST = 100
"""The default preference: `auto` picks such a quantizer only if no other runs."""
# Keys in records of older versions, named after the options.
_OLDER_KEYS = {"backend": "quantizer", "type": "kind"}
_TYPES = {"quantizer": str, "bits": int, "group_size": int, "kind": str, "double": bool, "kept": list}

GGUF_PLAIN = ("f32", "f16", "bf16")
GGUF_BLOCKS = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
GGUF_RECIPES = {"q6_k": "Q6_K", "q5_k_m": "Q5_K", "q4_k_m": "Q4_K", "iq4_xs": "IQ4_XS", "q3_k_m": "Q3_K"}
"""llama.cpp's recipes: name -> the type of most tensors."""
GGUF_TYPES = (*GGUF_PLAIN, *GGUF_BLOCKS, *GGUF_RECIPES)


@dataclass(frozen=True, kw_only=True)
class Quantizer:
    """A quantizer. These values hold on every machine; the bit widths supported on a machine are in its BackendReport."""

    name: str
    engine: str
    library: str
    """The module to import to check that the library is installed."""
    bits: tuple[int, ...]
    preference: int = LAST
    """`auto` picks the quantizer with the smallest number among those that run."""
    preference_on: Mapping[str, int] = field(default_factory=dict)
    """Backend -> the preference on it, where it differs."""
    group_sizes: tuple[int, ...] = ()
    """The supported group sizes; empty for any."""
    bits_by_row: tuple[int, ...] = ()
    """Bit widths with one scale per row, where the group size has no effect."""
    bits_with_double_quant: tuple[int, ...] = ()
    """Bit widths at which the scales can be quantized too."""
    takes_kind: bool = False
    """True if --quant_type offers a choice."""
    usual_kinds: Mapping[int, str] = field(default_factory=dict)
    """Bits -> the kind that `auto` means, where it is not plain integers."""
    extra: str = ""
    """The crosstune extra that installs the library; empty if there is none."""
    distribution: str = ""

    @property
    def install_command(self) -> str:
        return f"pip install 'crosstune[{self.extra}]'" if self.extra else f"pip install {self.distribution}"

    def preference_for(self, backend: str) -> int:
        return self.preference_on.get(backend, self.preference)


def quantizer_names() -> list[str]:
    """Return the names of all quantizers, without importing them."""
    return sorted({name for package in QUANT_PACKAGES.values() for name in plugin_names(package)})


def torch_quantizer_names() -> list[str]:
    return plugin_names(QUANT_PACKAGES["torch"])


def read_quantizers() -> dict[str, Quantizer]:
    """Return all quantizers in the order in which `auto` prefers them."""
    found = [
        _read(load_plugin(package, name, kind="quantizer"), name, engine)
        for engine, package in QUANT_PACKAGES.items()
        for name in plugin_names(package)
    ]
    return {item.name: item for item in sorted(found, key=lambda item: (item.preference, item.name))}


@lru_cache(maxsize=64)
def find_quantizer(name: str) -> Quantizer | None:
    """Return the quantizer of this name; None if this installation does not have it."""
    return read_quantizers().get(name)


def _read(module: ModuleType, name: str, engine: str) -> Quantizer:
    """Read a quantizer module's constants: LIBRARY and BITS are required, the others are uppercase field names."""
    distribution = module.LIBRARY.partition(".")[0]
    found = {
        item.name: getattr(module, item.name.upper())
        for item in fields(Quantizer)
        if hasattr(module, item.name.upper())
    }
    return Quantizer(**{"distribution": distribution, **found, "name": name, "engine": engine})


@dataclass(frozen=True, kw_only=True)
class QuantSpec:
    """Everything that quantized numbers depend on: every field, if this installation lacks the quantizer."""

    quantizer: str
    bits: int
    group_size: int
    kind: str = "auto"
    """nf4 or fp4 (bnb), int or float8 (quanto); auto is the library's default."""
    double: bool = True
    """Quantize the scales too (bnb, 4 bits)."""
    kept: tuple[str, ...] = ()
    """Canonical names of quantizable layers that stay dense; chosen when a model is opened for training."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> QuantSpec:
        """Read a record that this version or an older one wrote."""
        if wrong := wrong_spec(data):
            raise UserError(
                "The quantization record cannot be read.",
                why=f"{wrong}.",
                do="use the version of crosstune that wrote it, or a newer one",
            )
        fields = {_OLDER_KEYS.get(key, key): value for key, value in data.items()}
        return cls(**fields | {"kept": tuple(fields.get("kept", ()))})

    def to_json(self) -> dict[str, Any]:
        """Return the record. Omits `kept` when empty, for compatibility with older versions."""
        fields = asdict(self)
        kept = fields.pop("kept")
        return fields | ({"kept": list(kept)} if kept else {})

    def name(self) -> str:
        """Return the short name that checkpoints and reports use, such as `bnb-4bit`."""
        return f"{self.quantizer}-{self.bits}bit"

    def resolved_kind(self) -> str:
        """Return the kind with `auto` resolved to the library's default."""
        declared = find_quantizer(self.quantizer)
        if declared is None or (declared.takes_kind and self.kind != "auto"):
            return self.kind
        return declared.usual_kinds.get(self.bits, "int")

    def has_groups(self) -> bool:
        """Return True if the group size changes the numbers."""
        declared = find_quantizer(self.quantizer)
        return declared is None or self.bits not in declared.bits_by_row

    def has_double(self) -> bool:
        """Return True if the scales can be quantized too."""
        declared = find_quantizer(self.quantizer)
        return declared is None or self.bits in declared.bits_with_double_quant

    def meaning(self) -> QuantSpec:
        """Return a copy in which every field that does not change the numbers has a fixed value."""
        return replace(
            self,
            group_size=self.group_size if self.has_groups() else 0,
            kind=self.resolved_kind(),
            double=self.double and self.has_double(),
            kept=tuple(sorted(set(self.kept))),
        )

    def describe(self) -> str:
        """Describe the quantization and the fields that change its numbers."""
        parts = [f"{self.quantizer} with {self.bits} bits"]
        parts += [f"groups of {self.group_size}"] if self.has_groups() else []
        declared = find_quantizer(self.quantizer)
        parts += [f"kind {self.resolved_kind()}"] if declared is None or declared.takes_kind else []
        parts += ["scales quantized too" if self.double else "plain scales"] if self.has_double() else []
        parts += [f"without {len(self.kept)} layers such as {self.kept[0]}"] if self.kept else []
        return ", ".join(parts)


def wrong_spec(data: Mapping[str, Any] | None) -> str | None:
    """Return why a quantization record cannot be read; None if it can, or if there is no record."""
    if data is None:
        return None
    fields = {_OLDER_KEYS.get(key, key): value for key, value in data.items()}
    missing = sorted({"quantizer", "bits", "group_size"} - fields.keys())
    if missing or fields.keys() - QuantSpec.__dataclass_fields__.keys():
        lacks = f" and lacks {', '.join(missing)}" if missing else ""
        return f"it has the keys {', '.join(data)[:200]}{lacks}"
    for key, value in fields.items():
        is_wrong = type(value) is not _TYPES[key]
        if not is_wrong and key == "kept":
            is_wrong = not all(isinstance(name, str) for name in value)
        if is_wrong or (key == "bits" and not 1 <= value <= 64) or (key == "group_size" and value < 0):
            return f"it has a wrong value at {key}: {shown(value)}"
    return None


def read_spec(data: Mapping[str, Any] | None) -> QuantSpec | None:
    """Read the record of a base; None for a base that is not quantized."""
    return None if data is None else QuantSpec.from_json(data)


def same_quantization(one: QuantSpec | None, other: QuantSpec | None) -> bool:
    """Return True if two bases are quantized to the same numbers; None is a base that is not quantized."""
    if one is None or other is None:
        return one is other
    return one.meaning() == other.meaning()


@dataclass(frozen=True, kw_only=True)
class BaseChoice:
    """The layers chosen by a pass over the model, recorded so that the base is the same whenever it is opened again."""

    quantizer: str
    """The base's quantizer for which the choice was made; it does not apply to others."""
    kept: tuple[str, ...] = ()
    """`QuantSpec.kept`: the layers that keep their original weights."""
    outside_fp8: tuple[str, ...] | None = None
    """The fast-layer groups kept out of fp8; None until chosen. The weights do not depend on it."""


def recorded_choice(spec: QuantSpec | None) -> BaseChoice | None:
    """Return the choice recorded in the quantization of a finished run; None for a base that is not quantized."""
    return BaseChoice(quantizer=spec.quantizer, kept=spec.kept) if spec is not None else None
