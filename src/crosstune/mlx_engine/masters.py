"""Keep fp32 masters of the trained weights and write them into the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from crosstune.mlx_engine.adapters import canonical_name, model_path


class Masters:
    """Weights the optimizer updates, by canonical name. `published` holds them in the dtype of the model."""

    def __init__(self, model: Any | None) -> None:
        self.model = model
        found = tree_flatten(model.trainable_parameters()) if model is not None else []
        self.published: dict[str, mx.array] = {canonical_name(name): array for name, array in found}
        self.arrays = {name: array.astype(mx.float32) for name, array in self.published.items()}

    def replace(self, arrays: Mapping[str, mx.array]) -> None:
        """Replace the masters and write them into the model."""
        self.arrays = {name: arrays[name] for name in self.arrays}
        self.published = {
            name: array.astype(self.published[name].dtype) for name, array in self.arrays.items()
        }
        put(self.model, self.published)


def put(model: Any, arrays: Mapping[str, mx.array]) -> None:
    """Write arrays into a model, by canonical name."""
    model.update(tree_unflatten([(model_path(name), array) for name, array in arrays.items()]))
