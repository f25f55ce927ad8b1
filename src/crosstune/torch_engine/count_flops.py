"""Count the floating-point operations of an operator from the shapes of its inputs: matrix products and attention."""

from __future__ import annotations

import math
from collections.abc import Sequence

Shape = Sequence[int]

_BACKWARD_FACTOR = 2.5
"""The backward pass of fused attention computes five products where the forward pass has two."""
_FIRST_FACTOR = {
    "aten::mm": 0,
    "aten::bmm": 0,
    "aten::_scaled_mm": 0,
    "aten::_int_mm": 0,
    "aten::addmm": 1,
    "aten::baddbmm": 1,
}
"""Operator -> the place of its left factor; the right one follows."""
_ATTENTION = "aten::_scaled_dot_product_"


def count_flops(name: str, shapes: Sequence[Shape] | None) -> float:
    """Return the operations of one call; 0 for an operator without products, or one that calls another counted here.

    The masked half of causal attention counts in full, as it does in published figures.
    """
    if not shapes:
        return 0.0
    if name in _FIRST_FACTOR:
        left = _FIRST_FACTOR[name]
        return _product(shapes[left : left + 2])
    if name.startswith(_ATTENTION) and "math" not in name:
        if name.endswith("_backward"):
            return _BACKWARD_FACTOR * _attention(shapes[1:3])
        return _attention(shapes[:2])
    return 0.0


def _product(factors: Sequence[Shape]) -> float:
    if len(factors) < 2 or min(map(len, factors)) < 2:
        return 0.0
    left, right = factors
    return 2.0 * math.prod(left) * right[-1]


def _attention(shapes: Sequence[Shape]) -> float:
    """Return the operations of q @ k and of the weights @ v, for a head size that is the same in all."""
    if len(shapes) < 2 or min(map(len, shapes)) < 3:
        return 0.0
    query, key = shapes
    return 4.0 * math.prod(query) * key[-2]
