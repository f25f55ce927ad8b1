"""Estimate the parameters and the memory of a tower, the part of a vision-language model that reads pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TEMPORARY = 3
"""Number of tensors as wide as the MLP that are in memory at once in a layer's forward pass; the norms and attention need
less."""


@dataclass(frozen=True, kw_only=True)
class Tower:
    """The sizes of a tower. It computes one vector for each patch of a picture."""

    hidden: int
    intermediate: int
    num_layers: int
    patch_values: int
    """The values of a patch: pixels of three colours."""
    num_parameters: int = 0
    """Of tower and projector."""
    projector: int = 0
    """Of the projector alone."""

    def adapters(self, rank: int) -> int:
        """Return the parameters of adapters on all linear layers: four of attention, two of the MLP."""
        return rank * self.num_layers * (4 * 2 * self.hidden + 2 * (self.hidden + self.intermediate))

    def input_bytes(self, patches: int) -> int:
        """Return the bytes of the pixels, which a step holds in fp32."""
        return 4 * patches * self.patch_values

    def forward_bytes(self, patches: int, *, width: int) -> int:
        """Return the temporary bytes of a forward pass without gradients."""
        return patches * (width * (4 * self.hidden + _TEMPORARY * self.intermediate) + 4 * self.hidden)

    def kept_bytes(self, patches: int, *, width: int, checkpointing: bool) -> int:
        """Return the bytes that a trained tower keeps for its backward pass."""
        layer = patches * width * (9 * self.hidden + _TEMPORARY * self.intermediate)
        if checkpointing:
            return self.num_layers * patches * width * self.hidden + layer
        return self.num_layers * layer


def read_tower(config: Mapping[str, Any]) -> Tower | None:
    """Return the tower that a config.json describes, with its parameters from its sizes; None for a language model."""
    found = config.get("vision_config")
    if not isinstance(found, dict):
        return None

    def size(*names: str, default: int) -> int:
        given = next((found[name] for name in names if isinstance(found.get(name), int)), default)
        return given if given > 0 else default

    hidden = size("embed_dim", "hidden_size", default=1152)
    if config.get("model_type") in ("qwen2_5_vl", "qwen3_vl"):
        hidden = size("hidden_size", default=hidden)
    intermediate = size("intermediate_size", default=size("mlp_ratio", default=4) * hidden)
    layers, patch = size("depth", "num_hidden_layers", default=12), size("patch_size", default=14)
    frames = size("temporal_patch_size", default=1 if "depth" not in found else 2)
    values = 3 * frames * patch * patch
    counted = layers * (4 * hidden * hidden + 2 * hidden * intermediate) + values * hidden
    return Tower(
        hidden=hidden,
        intermediate=intermediate,
        num_layers=layers,
        patch_values=values,
        num_parameters=counted,
    )
