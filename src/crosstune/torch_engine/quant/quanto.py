"""optimum-quanto: integers of 8, 4 and 2 bits, and 8-bit floats, with scales by row or by group."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from crosstune.core.errors import UserError

if TYPE_CHECKING:  # so that the constants can be read without torch
    import torch

    from crosstune.torch_engine.quantized import QuantSpec

LIBRARY = "optimum.quanto"
BITS = (8, 4, 2)
EXTRA = "quanto"
PREFERENCE = 30
PREFERENCE_ON = {"mps": 15}  # it has kernels for Metal
BITS_BY_ROW = (8,)
TAKES_KIND = True
DISTRIBUTION = "optimum-quanto"


def check(spec: QuantSpec, shape: tuple[int, int]) -> None:
    if spec.bits < 8 and shape[1] % spec.group_size:
        raise UserError(
            f"Groups of {spec.group_size} weights do not divide a layer with {shape[1]} inputs.",
            do="choose a --group_size that divides it, such as 64 or 32",
        )
    allowed = ("auto", "int", "float8") if spec.bits == 8 else ("auto", "int")
    if spec.kind not in allowed:
        raise UserError(
            f"quanto has no kind {spec.kind} with {spec.bits} bits.", do=f"use one of {', '.join(allowed)}"
        )


def quantize(weight: torch.Tensor, spec: QuantSpec, dtype: torch.dtype) -> QuantoWeight:
    from optimum import quanto

    unpack_without_compiler()
    weight = weight.to(dtype)
    kind = quanto.qfloat8 if spec.kind == "float8" else getattr(quanto, f"qint{spec.bits}")
    if spec.bits == 8:
        scale = quanto.AbsmaxOptimizer()(weight, qtype=kind, axis=0)
        stored = quanto.quantize_weight(weight, qtype=kind, axis=0, scale=scale, optimized=False)
    else:
        scale, shift = quanto.MaxOptimizer()(weight, qtype=kind, axis=0, group_size=spec.group_size)
        stored = quanto.quantize_weight(
            weight, qtype=kind, axis=0, scale=scale, shift=shift, group_size=spec.group_size, optimized=False
        )
    rows, columns = weight.shape
    return QuantoWeight(shape=(rows, columns), stored=stored)


@dataclass
class QuantoWeight:
    shape: tuple[int, int]
    stored: Any
    """quanto's own tensor subclass."""

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        return self.stored.dequantize().to(dtype)

    def tensors(self) -> dict[str, torch.Tensor]:
        names, _ = self.stored.__tensor_flatten__()
        parts = {name.strip("_"): getattr(self.stored, name) for name in names}
        return {name: getattr(part, "_data", part) for name, part in parts.items()}


def unpack_without_compiler() -> None:
    """Give quanto a plain torch function for unpacking 2 and 4 bits, where it would compile one on first use.

    Compiling takes up to two minutes, needs a compiler, and fails once something has imported Python's distutils.
    """
    from optimum.quanto.library.extensions import get_extension, is_extension_available

    for name in ("quanto_cpp", "quanto_cuda", "quanto_hip", "quanto_mps"):
        if is_extension_available(name) and get_extension(name)._lib is None:
            get_extension(name)._lib = SimpleNamespace(unpack=_unpack)


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Several numbers a byte, the lowest bits first, as one stretch of rows after the other."""
    import torch

    return torch.cat([(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)])
