"""Define the facts about machine, model and data that `resolve` combines with the request."""

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
    """The quantization recorded in a quantized model folder."""

    source: str
    """The folder."""
    quantizer: str
    options: Mapping[str, Any]
    """The options that produce exactly these weights."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A recipe's value for an option that was not set, with the reason."""

    value: Any
    reason: str


@dataclass(frozen=True, kw_only=True)
class Facts:
    machine: Machine
    backends: Mapping[str, BackendSpec]
    """By name, in the order of `auto`."""
    quantizers: Mapping[str, Quantizer]
    """By name, in the order of `auto`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The backends' environment variables that are set."""
    ranks: Ranks | None = None
    """Set for a multi-process run."""
    shape: ModelShape | None = None
    teacher: ModelShape | None = None
    """The shape of a teacher, if it is a second model and known."""
    stored: StoredQuantization | None = None
    """Set if the model folder is quantized."""
    base: BaseChoice | None = None
    """The base of the run to continue or open; None for a new run."""
    mlx_settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings in the --mlx_config file."""
    longest_row: int | None = None
    """Tokens in the longest row, once the data is loaded; replaces the context in memory estimates."""
    longest_target: int | None = None
    """Maximum tokens per row that reach the head, once the data is loaded; None: all."""
    patches: int = 0
    """Maximum patches of the pictures in a row, once the data is loaded."""
    corrections: Mapping[str, Correction] = field(default_factory=dict)
    """Backend -> correction of memory estimates, from earlier runs on this machine."""
    preset: Mapping[str, Preset] = field(default_factory=dict)
    """The recipe's values for options that were not set."""
    ready_tracker: str | None = None
    """A tracker with projects that is set up, if --project_name was set without --log_to."""
    engines: tuple[str, ...] = ()
    """The engines that the recipe supports; empty: all."""
    has_base_model: bool = True
    """False for a recipe that builds its own model."""

    def preference(self) -> list[str]:
        """Return the backends that `auto` tries, in order."""
        return auto_preference(self.backends, engines=self.engines)


def auto_preference(backends: Mapping[str, BackendSpec], *, engines: tuple[str, ...]) -> list[str]:
    return [name for name, spec in backends.items() if not engines or spec.engine in engines]
