"""What a backend file declares about itself; engines probe by it, the resolver decides by it."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field

from crosstune.core.names import load_plugin, plugin_names

BACKENDS_PACKAGE = "crosstune.backends"


@dataclass(frozen=True, kw_only=True)
class BackendSpec:
    """One backend. Everything here is fixed; what differs between machines is in its BackendReport."""

    name: str
    title: str
    engine: str
    device: str
    """The engine's own word for the device."""
    torch_build: str = ""
    """cuda and hip share torch's device name; this says which build of torch belongs to the backend."""
    preference: int
    """`auto` takes the available backend with the smallest number."""
    collective: str | None = None
    """What its devices talk through when there are several."""
    install: str
    """What to do when it is not available."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables its engine wants set before it starts; one the user has set already is kept."""
    environment_on: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """More of them, for one operating system alone, by its name as `platform.system()` says it."""
    at_most: Mapping[str, str] = field(default_factory=dict)
    """Variable -> the one it may not exceed. Of the two, the one the user has not set gives way."""
    clear_cache_every: int = 0
    """Steps after which the engine hands memory that it keeps for reuse back to the device; 0 for never."""
    pinned_memory: bool = False
    """Whether host memory may be pinned to speed up copies to the device."""

    def wanted_environment(self, system: str | None = None) -> dict[str, str]:
        """Every variable it wants, on this computer or on one whose `system` begins with the system's name."""
        words = (platform.system() if system is None else system).split()
        return {**self.environment, **self.environment_on.get(words[0] if words else "", {})}

    def missing_environment(self, given: Mapping[str, str], *, system: str | None = None) -> dict[str, str]:
        """The variables to set beside those that are given."""
        missing = {
            name: value for name, value in self.wanted_environment(system).items() if name not in given
        }
        for lower, upper in self.at_most.items():
            together = {**missing, **given}
            low, high = _number(together.get(lower)), _number(together.get(upper))
            if low is None or not high or low <= high:  # an upper limit of 0 is none
                continue
            if lower in missing:
                missing[lower] = together[upper]
            elif upper in missing:
                missing[upper] = together[lower]
        return missing


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None


def backend_specs() -> dict[str, BackendSpec]:
    """Every backend that has a file, in the order `auto` tries them."""
    names = plugin_names(BACKENDS_PACKAGE)
    specs: list[BackendSpec] = [load_plugin(BACKENDS_PACKAGE, name, kind="backend").SPEC for name in names]
    return {spec.name: spec for spec in sorted(specs, key=lambda spec: spec.preference)}
