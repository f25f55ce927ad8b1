"""A quantized weight as torch code outside crosstune reads it: a dense tensor that cannot be written to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from crosstune.core.errors import UserError


class DenseView(torch.Tensor):
    """A dequantized copy of a weight. Operations on it give plain tensors; changing it raises.

    PEFT merges adapters by assigning to `weight.data`, and the merged weight would be lost with the copy.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if args and isinstance(args[0], cls) and _changes(func):
            raise UserError(
                "A quantized weight cannot be changed in place, as PEFT does to merge an adapter.",
                why="the layer holds packed bits; what PEFT reads is a copy.",
                do="save the adapter and merge it with: crosstune merge; or replace the weight with the layer's "
                "quantize_weights",
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _changes(func: Any) -> bool:
    """Return whether a function of torch.Tensor changes its first argument: x.data = y, x += y, x[0] = y, x.add_(y)."""
    name = getattr(func, "__name__", "")
    if func == torch.Tensor.data.__set__ or name == "__setitem__":
        return True
    if name.startswith("__"):
        return name.startswith("__i") and hasattr(torch.Tensor, f"__{name[3:]}")
    return name.endswith("_") and name != "requires_grad_"


def view_dense(weight: torch.Tensor) -> torch.Tensor:
    return weight.as_subclass(DenseView)
