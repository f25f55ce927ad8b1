"""What a backend file declares about itself; engines probe by it, the resolver decides by it."""

from __future__ import annotations

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


def backend_specs() -> dict[str, BackendSpec]:
    """Every backend that has a file, in the order `auto` tries them."""
    names = plugin_names(BACKENDS_PACKAGE)
    specs: list[BackendSpec] = [load_plugin(BACKENDS_PACKAGE, name, kind="backend").SPEC for name in names]
    return {spec.name: spec for spec in sorted(specs, key=lambda spec: spec.preference)}
