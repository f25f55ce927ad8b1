"""Track the layer that is running, in the forward pass, the backward pass and activation recomputation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

_MARK = "crosstune.layer"


class CurrentLayer:
    """A context manager that tracks the running layer of every model called inside the block.

    Autograd does not record which layer a node belongs to. So each layer marks the node that made its output, and in
    the backward pass the last mark that was passed tells the nearest layer.
    """

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._names: dict[int, str] = {}
        self._near = ""

    def __enter__(self) -> CurrentLayer:
        self._hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def follow(self) -> None:
        """Update the position; call it at every operator."""
        node = torch._C._current_autograd_node()
        if node is None:
            self._near = ""
        else:
            self._near = node.metadata.get(_MARK, self._near)

    def sentence(self) -> str:
        in_backward = torch._C._current_graph_task_id() != -1
        if self._stack:
            return (
                f", recomputed for the backward pass: {self._stack[-1]}"
                if in_backward
                else f": {self._stack[-1]}"
            )
        if in_backward:
            return f", backward: {f'near {self._near}' if self._near else 'at the loss'}"
        return ": outside the model"

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if not self._stack and id(module) not in self._names:
            self._names |= {id(part): name for name, part in module.named_modules() if name}
        self._stack.append(self._names.get(id(module), type(module).__name__))

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        name = self._stack.pop()
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.grad_fn.metadata.setdefault(_MARK, name)
