"""Read the declarations in the quantizer files, without importing their libraries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from types import ModuleType

from crosstune.core.names import load_plugin, plugin_names

QUANT_PACKAGES = {"torch": "crosstune.torch_engine.quant", "mlx": "crosstune.mlx_engine.quant"}
"""Engine -> the package of its quantizers, one file each."""
LAST = 100
"""The default preference: `auto` picks such a quantizer only if no other runs."""


@dataclass(frozen=True, kw_only=True)
class Quantizer:
    """A quantizer. These values are the same everywhere; which bits run on a machine is in its BackendReport."""

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
    """The extra of crosstune that installs the library; empty if there is none."""
    distribution: str = ""
    """The library's name on PyPI."""

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
    """Return the quantizer of this name; None where it has no file, as in a record that another installation wrote."""
    return read_quantizers().get(name)


def _read(module: ModuleType, name: str, engine: str) -> Quantizer:
    """Read the constants of a quantizer module: LIBRARY and BITS are required, the others are fields in capitals."""
    distribution = module.LIBRARY.partition(".")[0]
    found = {
        item.name: getattr(module, item.name.upper())
        for item in fields(Quantizer)
        if hasattr(module, item.name.upper())
    }
    return Quantizer(**{"distribution": distribution, **found, "name": name, "engine": engine})
