"""Find the first layer, weight or gradient of a model that is not finite."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from crosstune.core.out_of_memory import OutOfMemory
from crosstune.process.ranks import Group
from crosstune.torch_engine.device import memory_errors, without_compiled
from crosstune.torch_engine.session.optimizer import Masters
from crosstune.torch_engine.session.state import export_random, import_random


@contextlib.contextmanager
def watch_outputs(model: nn.Module) -> Iterator[list[str]]:
    """Collect the names of layers whose output is not finite, in the order of the forward pass, innermost first."""
    bad: list[str] = []

    def check(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        checked = isinstance(first, torch.Tensor) and first.is_floating_point()
        if checked and not bool(torch.isfinite(first).all()):
            bad.append(name)

    modules = [(name, module) for name, module in model.named_modules() if name]
    hooks = [module.register_forward_hook(partial(check, name)) for name, module in modules]
    try:
        yield bad
    finally:
        for hook in hooks:
            hook.remove()


def find_nonfinite(
    model: nn.Module,
    masters: Masters,
    group: Group,
    *,
    device: torch.device,
    repeat: Callable[[], None],
) -> str:
    """Repeat a step with hooks on all layers, and describe the first non-finite value on any rank."""

    def first(bad: Sequence[str], *, of: Sequence[str]) -> str | None:
        counts = group.sum_numbers(*(name in bad[:1] for name in of))
        return next((name for name, count in zip(of, counts, strict=True) if count), None)

    tensors = masters.masters
    names, backwards = list(tensors), list(reversed(tensors))
    if broken := first([name for name in names if not _is_finite(tensors[name])], of=names):
        return f"the weight {broken} was not finite before the step"
    before = export_random(device)
    try:
        with without_compiled(model), memory_errors(device), watch_outputs(model) as layers:
            repeat()
        layer = first(layers, of=[name for name, _ in model.named_modules()])
        gradient = first([name for name in backwards if not _is_finite(tensors[name].grad)], of=backwards)
    except OutOfMemory:  # the general layers may need more memory than the fast layers
        return "there was not enough memory to find the layer"
    finally:
        masters.clear_gradients()
        import_random(device, before)
    if layer:
        return f"the first non-finite value was the output of {layer}"
    if gradient:
        return f"every output was finite; the first non-finite gradient was at {gradient}"
    return "every value was finite when the step was run again"


def _is_finite(tensor: torch.Tensor | None) -> bool:
    return tensor is None or bool(torch.isfinite(tensor).all())
