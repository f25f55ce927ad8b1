"""Describe how one layer is stored, and quantize its weight accordingly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from crosstune.core.errors import UserError
from crosstune.core.quantization import QuantSpec, read_spec
from crosstune.torch_engine.quant.hqq import SCALES_IN_A_GROUP, shrink
from crosstune.torch_engine.quantized import StoredWeight, open_quantizer


@dataclass(frozen=True, kw_only=True)
class LayerStorage:
    """The storage of one layer: everything that determines its values."""

    spec: QuantSpec | None = None
    """None stores 16 bits."""
    compute: torch.dtype | None = None
    """The dtype to compute in; None: the dtype of the input."""
    kept_in: torch.dtype | None = None
    """The 16-bit dtype of a layer that is not quantized."""
    small_zeros: bool = False
    small_scales: bool = False
    """HQQ: quantize zero points and scales to 8 bits."""

    def to_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "spec": None if self.spec is None else self.spec.to_json(),
            "compute": name_dtype(self.compute),
            "kept_in": name_dtype(self.kept_in),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LayerStorage:
        dtypes = {name: read_dtype(data[name]) for name in ("compute", "kept_in")}
        return cls(**{**data, **dtypes, "spec": read_spec(data["spec"])})


def check_storage(recipe: LayerStorage, shape: tuple[int, int]) -> None:
    """Check that a layer of this shape can be stored this way."""
    if recipe.spec is None:
        return
    open_quantizer(recipe.spec).check(recipe.spec, shape)
    num_scales = shape[0] * shape[1] // recipe.spec.group_size
    if recipe.small_scales and num_scales % SCALES_IN_A_GROUP:
        raise UserError(
            f"The {num_scales} scales of a layer of {shape[0]} x {shape[1]} cannot be quantized.",
            why=f"HQQ quantizes them in groups of {SCALES_IN_A_GROUP}.",
            do="leave quant_scale out, or choose a smaller group size",
        )


def make_stored(weight: torch.Tensor, recipe: LayerStorage, *, dtype: torch.dtype) -> StoredWeight:
    """Quantize a weight; `dtype` is the dtype of the scales, unless the library chooses one."""
    assert recipe.spec is not None
    tensors, facts = open_quantizer(recipe.spec).quantize(weight.detach(), recipe.spec, dtype)
    names = [*["zero"] * recipe.small_zeros, *["scale"] * recipe.small_scales]
    if names:
        tensors, facts = shrink(tensors, facts, names)
    return StoredWeight(recipe.spec.quantizer, tensors, facts)


def name_dtype(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def read_dtype(name: str | None) -> torch.dtype | None:
    dtype = None if name is None else getattr(torch, name, None)
    if name is not None and not isinstance(dtype, torch.dtype):
        raise UserError(f"'{name}' is not a dtype of torch.")
    return dtype
