"""How one layer is kept, and the stored weight that comes of it; HQQ's zero points and scales may be small too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from crosstune.core.errors import UserError
from crosstune.torch_engine.quant.hqq import HqqWeight
from crosstune.torch_engine.quantized import QuantSpec, StoredWeight, open_quantizer
from crosstune.torch_engine.stored_state import describe, restore

SCALES_IN_A_GROUP = 128


@dataclass(frozen=True, kw_only=True)
class LayerStorage:
    """How one layer is kept: everything its numbers depend on."""

    spec: QuantSpec | None = None
    """None keeps 16 bits."""
    compute: torch.dtype | None = None
    """The type products are computed in; None is that of their input."""
    kept_in: torch.dtype | None = None
    """The 16-bit type of a layer that is not quantized."""
    small_zeros: bool = False
    small_scales: bool = False
    """HQQ: zero points and scales in 8 bits too."""

    def to_json(self) -> dict[str, Any]:
        return {
            "spec": None if self.spec is None else asdict(self.spec),
            "compute": name_dtype(self.compute),
            "kept_in": name_dtype(self.kept_in),
            "small_zeros": self.small_zeros,
            "small_scales": self.small_scales,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LayerStorage:
        return cls(
            spec=None if data["spec"] is None else QuantSpec(**data["spec"]),
            compute=read_dtype(data["compute"]),
            kept_in=read_dtype(data["kept_in"]),
            small_zeros=data["small_zeros"],
            small_scales=data["small_scales"],
        )


def check_storage(recipe: LayerStorage, shape: tuple[int, int]) -> None:
    """Raise unless a layer of this shape can be kept so."""
    if recipe.spec is None:
        return
    open_quantizer(recipe.spec).check(recipe.spec, shape)
    num_scales = shape[0] * shape[1] // recipe.spec.group_size
    if recipe.small_scales and num_scales % SCALES_IN_A_GROUP:
        raise UserError(
            f"The {num_scales} scales of a layer of {shape[0]} x {shape[1]} cannot be quantized.",
            why=f"HQQ takes {SCALES_IN_A_GROUP} of them together.",
            do="leave quant_scale out, or choose a smaller group size",
        )


def make_stored(weight: torch.Tensor, recipe: LayerStorage, *, dtype: torch.dtype) -> StoredWeight:
    """Quantize a weight; `dtype` is that of the scales, where the library does not choose it."""
    assert recipe.spec is not None
    stored = open_quantizer(recipe.spec).quantize(weight.detach(), recipe.spec, dtype)
    names = [*["zero"] * recipe.small_zeros, *["scale"] * recipe.small_scales]
    return _shrink(stored, names) if names else stored


def describe_stored(stored: StoredWeight) -> dict[str, Any]:
    """What of a stored weight is not in its tensors, as JSON."""
    if not isinstance(stored, SmallMeta):
        return describe(stored)
    small = {name: describe(weight) for name, weight in stored.small.items()}
    return {"inner": describe(stored.inner), "small": small}


def restore_stored(facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> StoredWeight:
    """The stored weight that `describe_stored` described, bit for bit."""
    if "small" not in facts:
        return restore(facts, tensors)
    small = {}
    for name, each in facts["small"].items():
        parts = {part: tensors[f"{name}.{part}"] for part in ("packed", "scale", "zero")}
        small[name] = restore(each, parts)
    inner = restore(facts["inner"], {**dict.fromkeys(small, tensors["packed"]), **tensors})
    assert isinstance(inner, HqqWeight)
    for name in small:
        del inner.meta[name]
    return SmallMeta(inner.shape, inner, small)


def name_dtype(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def read_dtype(name: str | None) -> torch.dtype | None:
    dtype = None if name is None else getattr(torch, name, None)
    if name is not None and not isinstance(dtype, torch.dtype):
        raise UserError(f"'{name}' is no number format of torch.")
    return dtype


@dataclass
class SmallMeta:
    """An HQQ weight whose zero points or scales are stored in 8 bits, by HQQ's own quantizer."""

    shape: tuple[int, int]
    inner: HqqWeight
    small: dict[str, StoredWeight]

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        meta = {name: weight.dequantize(torch.float32) for name, weight in self.small.items()}
        return HqqWeight(self.shape, self.inner.packed, self.inner.meta | meta).dequantize(dtype)

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {"packed": self.inner.packed}
        found |= {name: self.inner.meta[name] for name in ("scale", "zero") if name in self.inner.meta}
        for name, weight in self.small.items():
            found |= {f"{name}.{part}": tensor for part, tensor in weight.tensors().items()}
        return found


def _shrink(stored: HqqWeight, names: list[str]) -> SmallMeta:
    from hqq.core.quantize import Quantizer

    # Zero points lie within one small range for the whole matrix; scales differ more, so they get groups.
    how: dict[str, dict[str, Any]] = {
        "zero": {"channel_wise": False, "group_size": None},
        "scale": {"channel_wise": True, "group_size": SCALES_IN_A_GROUP, "axis": 1},
    }
    small: dict[str, StoredWeight] = {}
    for name in names:
        dense = stored.meta.pop(name)
        packed, meta = Quantizer.quantize(dense, nbits=8, device=str(dense.device), **how[name])
        rows, columns = dense.shape
        small[name] = HqqWeight((rows, columns), packed, meta | {"compute_dtype": torch.float32})
    return SmallMeta(stored.shape, stored, small)
