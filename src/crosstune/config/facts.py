"""What a plan depends on beside the request: gathered once, then resolved without reading anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from crosstune.core.backend import BackendSpec
from crosstune.core.machine import Machine
from crosstune.core.memory import ModelShape
from crosstune.core.quantizers import Quantizer
from crosstune.core.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class HeldQuantization:
    """What a folder of quantized weights says about itself."""

    source: str
    """The folder."""
    quantizer: str
    options: Mapping[str, Any]
    """The options that ask for exactly these weights."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    machine: Machine
    backends: Mapping[str, BackendSpec]
    """By name, in the order `auto` tries them."""
    quantizers: Mapping[str, Quantizer]
    """By name, in the order `auto` prefers them."""
    ranks: Ranks | None = None
    """Where several processes were started."""
    shape: ModelShape | None = None
    held: HeldQuantization | None = None
    """Where the model is a folder of quantized weights."""
    mlx_settings: Mapping[str, Any] = field(default_factory=dict)
    """What the file of --mlx_config sets."""
    longest_row: int | None = None
    """Tokens of the longest row, once the data is open; memory is then estimated for it and not for the context."""
