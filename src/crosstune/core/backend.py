"""Define `BackendSpec`, the declaration in each file of `backends`."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field

from crosstune.core.names import load_plugin, plugin_names

BACKENDS_PACKAGE = "crosstune.backends"


@dataclass(frozen=True, kw_only=True)
class BackendSpec:
    """A backend; values that differ between machines are in its BackendReport."""

    name: str
    title: str
    engine: str
    device: str
    """The engine's name for the device."""
    torch_build: str = ""
    """The torch build the backend needs, cuda or hip: both use the device name `cuda`."""
    preference: int
    """`auto` picks the available backend with the smallest number."""
    collective: str | None = None
    """The communication library for multi-device runs."""
    visible_devices: str = ""
    """The environment variable that selects devices, if a process may use some of several."""
    install: str
    """The way to make it available; shown when it is not."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables to set before the engine starts; values set by the user are kept."""
    environment_on: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Operating system, as `platform.system()` names it -> more variables for it."""
    at_most: Mapping[str, str] = field(default_factory=dict)
    """Variable -> the variable it may not exceed. Whichever the user did not set is adjusted."""
    memory_share: float = 0.9
    """The fraction of a device's memory that a training step may use."""
    overhead_bytes: int = 0
    """Memory used before the first tensor, by libraries or the GPU context."""
    memory_share_variable: str = ""
    """The environment variable that sets this fraction in the engine's allocator; 0 means no limit."""
    clear_cache_every: int = 0
    """Release the engine's cached memory every this many steps, 0 for never; with --low_memory, a GPU's after each step."""
    pinned_memory: bool = False
    """True if host memory may be pinned to speed up copies to the device."""

    def cache_interval(self, *, low_memory: bool) -> int:
        """Return the number of steps between releases of the engine's cached memory; 0 for never."""
        return 1 if low_memory and self.device != "cpu" else self.clear_cache_every

    def wanted_environment(self, system: str | None = None) -> dict[str, str]:
        """Return all environment variables of the backend, for this machine or for a given `Machine.system`."""
        parts = (platform.system() if system is None else system).split()
        return {**self.environment, **self.environment_on.get(parts[0] if parts else "", {})}

    def usable_share(self, given: Mapping[str, str]) -> float | None:
        """Return the fraction of device memory that a step may use with these variables set; None for no limit."""
        if not self.memory_share_variable:
            return self.memory_share
        full = {**self.missing_environment(given), **given}
        return _number(full[self.memory_share_variable]) or None

    def missing_environment(self, given: Mapping[str, str], *, system: str | None = None) -> dict[str, str]:
        """Return the variables to set in addition to `given`."""
        missing = {
            name: value for name, value in self.wanted_environment(system).items() if name not in given
        }
        for lower, upper in self.at_most.items():
            together = {**missing, **given}
            low, high = _number(together.get(lower)), _number(together.get(upper))
            if low is None or not high or low <= high:  # an upper limit of 0 means no limit
                continue
            if lower in missing:
                missing[lower] = together[upper]
            elif upper in missing:
                missing[upper] = together[lower]
        return missing


def backend_specs() -> dict[str, BackendSpec]:
    """Return all backends in the order of `auto`."""
    names = plugin_names(BACKENDS_PACKAGE)
    specs: list[BackendSpec] = [load_plugin(BACKENDS_PACKAGE, name, kind="backend").SPEC for name in names]
    return {spec.name: spec for spec in sorted(specs, key=lambda spec: spec.preference)}


def _number(text: str | None) -> float | None:
    try:
        number = float(text) if text is not None else math.nan
    except ValueError:
        return None
    return number if math.isfinite(number) else None
