"""Capture the forward and backward pass of batches whose shapes repeat in a CUDA graph, which the host starts with one call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

Tensors = Mapping[str, torch.Tensor]
Compute = Callable[[Tensors], torch.Tensor]
Key = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]

SEEN_BEFORE = 3
"""Passes of a shape before it is captured: they compile kernels, and show that the shape repeats."""
MOST_GRAPHS = 2
MOST_SHAPES = 64
"""With more shapes than this, few of them will come again."""
SPARE_TIMES = 2.2
"""A graph keeps the memory of its pass for itself, so a pass of another shape needs as much again."""


@dataclass(frozen=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    inputs: Tensors
    factor: torch.Tensor
    loss: torch.Tensor
    gradients: Sequence[torch.Tensor]

    def replay(self, tensors: Tensors, factor: float) -> torch.Tensor:
        """Compute the loss and the gradients of a batch, which the next call overwrites."""
        for name, place in self.inputs.items():
            place.copy_(tensors[name], non_blocking=True)
        self.factor.fill_(factor)
        self.graph.replay()
        return self.loss


class PassGraphs:
    """The captured passes of a training, by the shapes of their batch."""

    def __init__(self, parameters: Sequence[nn.Parameter], *, bytes_per_token: int) -> None:
        """Keep the trained parameters; a pass keeps `bytes_per_token` for its backward half."""
        self._parameters, self._bytes_per_token = list(parameters), bytes_per_token
        self._seen: Counter[Key] = Counter()
        self._captured: dict[Key, Captured] = {}
        self.refused: str | None = None
        """Why a pass could not be captured, after which none is."""

    def add_gradients(
        self, compute: Compute, tensors: Tensors, *, factor: float, more: bool
    ) -> torch.Tensor | None:
        """Add the gradients of a batch, times `factor`, to those of the parameters, and return its loss. Return None,
        having done nothing, where its shape is not captured. `more` tells whether other batches follow before the
        gradients are used."""
        key = shapes_of(tensors)
        found = self._captured.get(key)
        if found is None:
            if self.refused is not None or not (self._repeats(key) and self._fits(tensors)):
                return None
            try:
                found = self._captured[key] = capture(compute, tensors, self._parameters)
            except torch.OutOfMemoryError:
                raise
            except (
                RuntimeError
            ) as error:  # a model that reads from the device in its pass, such as dynamic RoPE
                self.refused = str(error).splitlines()[0]
                return None
        loss = found.replay(tensors, factor)
        waiting = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if waiting:
            torch._foreach_add_(waiting, list(found.gradients))
        else:
            for parameter, gradient in zip(self._parameters, found.gradients, strict=True):
                parameter.grad = gradient.clone() if more else gradient
        return loss

    def clear(self) -> None:
        """Free the memory of all graphs."""
        self._captured.clear()
        self._seen.clear()

    def _repeats(self, key: Key) -> bool:
        if len(self._captured) >= MOST_GRAPHS or (key not in self._seen and len(self._seen) >= MOST_SHAPES):
            return False
        self._seen[key] += 1
        return self._seen[key] > SEEN_BEFORE

    def _fits(self, tensors: Tensors) -> bool:
        device = tensors["input_ids"].device
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        free -= torch.cuda.memory_allocated(device)
        return SPARE_TIMES * tensors["input_ids"].numel() * self._bytes_per_token < free


def shapes_of(tensors: Tensors) -> Key:
    return tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in sorted(tensors.items()))


def capture(compute: Compute, tensors: Tensors, parameters: Sequence[nn.Parameter]) -> Captured:
    """Capture a pass. Kernels, their workspaces and cuBLAS must have run with these shapes before."""
    device = tensors["input_ids"].device
    inputs = {name: tensor.clone() for name, tensor in tensors.items()}
    factor = torch.ones((), device=device)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # what passes have left is needed in the memory of the graph
    stream = torch.cuda.current_stream(device)
    try:
        # Other threads, such as the one that prepares batches, may call CUDA meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            loss = compute(inputs)
            gradients = torch.autograd.grad(loss, parameters, grad_outputs=factor.to(loss.dtype))
    finally:
        torch.cuda.set_stream(stream)  # torch stays on the stream of a capture that failed
    return Captured(graph, inputs, factor, loss.detach(), gradients)
