"""The facts that a plan depends on: machine, model, data. Resolving reads nothing else but the request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from crosstune.core.backend import BackendSpec
from crosstune.core.quantization import BaseChoice, Quantizer
from crosstune.estimate.machine import Machine
from crosstune.estimate.memory import Correction
from crosstune.estimate.model_shape import ModelShape
from crosstune.process.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class StoredQuantization:
    """The quantization that a folder of quantized weights records."""

    source: str
    """The folder."""
    quantizer: str
    options: Mapping[str, Any]
    """The options that give exactly these weights."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A value that a recipe chooses for an option that was left open, and why."""

    value: Any
    reason: str


@dataclass(frozen=True, kw_only=True)
class Facts:
    machine: Machine
    backends: Mapping[str, BackendSpec]
    """By name, in the order in which `auto` tries them."""
    quantizers: Mapping[str, Quantizer]
    """By name, in the order in which `auto` prefers them."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The variables of the backends that are set."""
    ranks: Ranks | None = None
    """Set when several processes were started."""
    shape: ModelShape | None = None
    stored: StoredQuantization | None = None
    """Set when the model is a folder of quantized weights."""
    base: BaseChoice | None = None
    """What was decided about the base by the training that is continued or opened; None for a new one."""
    mlx_settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings in the file of --mlx_config."""
    longest_row: int | None = None
    """Tokens in the longest row, once the data is loaded; the memory estimate then uses it instead of the context."""
    longest_target: int | None = None
    """The most tokens of a row that reach the head, once the data is loaded; None for all."""
    corrections: Mapping[str, Correction] = field(default_factory=dict)
    """Backend -> how far earlier runs on this machine were from their estimates."""
    preset: Mapping[str, Preset] = field(default_factory=dict)
    """The recipe's choices for the backend; only options that were not set."""
    engines: tuple[str, ...] = ()
    """The engines that the recipe has a task for; empty for all."""

    def preference(self) -> list[str]:
        """Return the backends that `auto` may take, in the order in which it tries them."""
        return auto_preference(self.backends, engines=self.engines)


def auto_preference(backends: Mapping[str, BackendSpec], *, engines: tuple[str, ...]) -> list[str]:
    return [name for name, spec in backends.items() if not engines or spec.engine in engines]
