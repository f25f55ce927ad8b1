"""Parts of recurrences that are computed in chunks of tokens: rows cut into chunks, and matmuls on tensor cores."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812


def cut(x: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """Return rows x heads x chunks x tokens of a chunk, in fp32; zeros fill the last chunk."""
    fill = -x.shape[1] % chunk_size
    if fill:
        x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, fill))
    cut = x.unflatten(1, (-1, chunk_size)).movedim(3, 1)
    return cut.to(torch.float32, memory_format=torch.contiguous_format)


@contextlib.contextmanager
def tensor_cores(is_rounded: bool) -> Iterator[None]:
    """Multiply in TF32 if the inputs of the layer have 16 bits: it has more bits than bf16 and as many as fp16."""
    settings: Any = torch.backends.cuda.matmul
    name, value = ("fp32_precision", "tf32") if hasattr(settings, "fp32_precision") else ("allow_tf32", True)
    earlier = getattr(settings, name)
    if is_rounded:
        setattr(settings, name, value)
    try:
        yield
    finally:
        setattr(settings, name, earlier)


class Product(torch.autograd.Function):
    """A matmul, forward and backward with tensor cores if its inputs are rounded anyway."""

    @staticmethod
    def forward(ctx: Any, left: torch.Tensor, right: torch.Tensor, is_rounded: bool) -> torch.Tensor:
        ctx.save_for_backward(left, right)
        ctx.is_rounded = is_rounded
        with tensor_cores(is_rounded):
            return left @ right

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        left, right = ctx.saved_tensors
        with tensor_cores(ctx.is_rounded):
            return gradients[0] @ right.transpose(-1, -2), left.transpose(-1, -2) @ gradients[0], None


def multiply(left: torch.Tensor, right: torch.Tensor, *, is_rounded: bool) -> torch.Tensor:
    product: torch.Tensor = Product.apply(left, right, is_rounded)
    return product
