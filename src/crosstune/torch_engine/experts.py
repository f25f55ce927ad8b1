"""Find the stacked weights of a mixture of experts."""

from __future__ import annotations

from torch import nn
from transformers.pytorch_utils import Conv1D

_SINGLE = (nn.Linear, Conv1D, nn.Embedding, nn.modules.conv._ConvNd)


def expert_weights(model: nn.Module) -> list[str]:
    """Return the names of all weights that hold several experts, one on top of the other."""
    return [
        f"{name}.{part}"
        for name, module in model.named_modules()
        if not isinstance(module, _SINGLE)
        for part, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3 or (parameter.ndim == 2 and "Expert" in type(module).__name__)
        if parameter.is_floating_point() and not part.endswith("bias")
    ]
