"""Find the first layer, weight or gradient of a model that is not finite."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from crosstune.core.out_of_memory import OutOfMemory
from crosstune.core.protocols import PreparedBatch
from crosstune.torch_engine.device import memory_errors, without_compiled
from crosstune.torch_engine.session.state import export_random, import_random
from crosstune.torch_engine.task import HasFastLayers

if TYPE_CHECKING:
    from crosstune.torch_engine.session.session import TorchSession


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


def find_nonfinite(session: TorchSession, window: Sequence[PreparedBatch]) -> str:
    """Repeat a step with hooks on all layers, and describe the first non-finite value."""
    model, masters = session.model, session.masters.masters
    bad_weights = [name for name, tensor in masters.items() if not _is_finite(tensor)]
    if broken := _first(session, bad_weights, of=list(masters)):
        return f"the weight {broken} was not finite before the step"
    before = export_random(session.device)
    try:
        with (
            session.task.general_layers()
            if isinstance(session.task, HasFastLayers)
            else contextlib.nullcontext(),
            session.connected("a step"),
            without_compiled(model),
            memory_errors(session.device),
            watch_outputs(model) as layers,
        ):
            session.compute_gradients(window)
        layer = _first(session, layers, of=[name for name, _ in model.named_modules()])
        backwards = list(reversed(masters))
        bad = [name for name in backwards if not _is_finite(masters[name].grad)]
        gradient = _first(session, bad, of=backwards)
    except OutOfMemory:  # the general layers may need more memory than the fast layers
        return "there was not enough memory to find the layer"
    finally:
        session.masters.clear_gradients()
        import_random(session.device, before)
    if layer:
        return f"the first non-finite value was the output of {layer}"
    if gradient:
        return f"every output was finite; the first non-finite gradient was at {gradient}"
    return "every value was finite when the step was run again"


def _first(session: TorchSession, bad: Sequence[str], *, of: Sequence[str]) -> str | None:
    """Return the first bad name across all ranks, in the order of `of`."""
    counts = session.group.sum_numbers(*(name in bad[:1] for name in of))
    return next((name for name, count in zip(of, counts, strict=True) if count), None)


def _is_finite(tensor: torch.Tensor | None) -> bool:
    return tensor is None or bool(torch.isfinite(tensor).all())
