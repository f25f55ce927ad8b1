"""Run convolutions and recurrent layers on each document of a packed row alone, so that no state crosses a border."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from crosstune.torch_engine.tasks.model_input import added_mask


class SeparateDocuments:
    """The `forward` of a layer that has a state along the row. It sees one document per row, padded on the right.

    Attention separates documents by its mask. A convolution or a recurrence has no mask, and only some kernels of some
    families can reset their state inside a row; with a row per document, all of them are exact.
    """

    def __init__(self, layer: Any) -> None:
        self.forward: Callable[..., Any] = layer.forward
        layer.forward = self
        self.lengths: list[int] | None = None
        """The lengths of the documents of the micro-batch, row by row; None if its rows are not packed."""

    def __call__(self, hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if self.lengths is None:
            return self.forward(hidden_states, *arguments, **options)
        documents = hidden_states.flatten(0, 1).split(self.lengths)
        computed: dict[int, torch.Tensor] = {}
        for group in group_by_length(self.lengths):
            output = self.forward(pad_sequence([documents[i] for i in group], True), *arguments, **options)
            if isinstance(output, tuple):  # some return a cache with it
                output = output[0]
            for number, row in zip(group, output, strict=True):
                computed[number] = row[: self.lengths[number]]
        together = torch.cat([computed[number] for number in range(len(documents))])
        return together.view(*hidden_states.shape[:2], -1)


def group_by_length(lengths: list[int]) -> list[list[int]]:
    """Return groups of documents in which the longest is at most twice as long as the shortest."""
    groups: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if not groups or 2 * lengths[number] < lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(number)
    return groups


def stateful_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that carry a state along the row: in all families, they contain a causal convolution."""
    return [
        module
        for module in model.modules()
        if any(isinstance(child, nn.Conv1d) and child.kernel_size[0] > 1 for child in module.children())
    ]


def document_lengths(positions: torch.Tensor) -> list[int]:
    """Return the lengths of the documents of packed rows, row by row: positions restart with each document."""
    flat = positions.flatten()
    starts = (flat[1:] != flat[:-1] + 1).nonzero().flatten() + 1
    row_starts = torch.arange(0, len(flat), positions.shape[1], device=flat.device)
    edges = torch.cat([starts, row_starts]).unique().tolist()
    return [end - start for start, end in zip(edges, [*edges[1:], len(flat)], strict=True)]


def separate_documents(model: nn.Module) -> None:
    """Make the stateful layers of a model compute packed rows document by document."""
    layers = [SeparateDocuments(layer) for layer in stateful_layers(model)]
    if not layers:
        return

    def set_lengths(_: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        lengths = document_lengths(options["position_ids"]) if is_packed(options) else None
        for (
            layer
        ) in layers:  # kept until the next call: recomputation runs the layers again in the backward pass
            layer.lengths = lengths

    model.register_forward_pre_hook(set_lengths, with_kwargs=True)


def give_masks(model: nn.Module) -> None:
    """Pass the masks of packed rows to a model that ignores positions when it makes its own (Granite 4, gpt-oss)."""
    config: Any = model.config
    windows = {"full_attention": None, "sliding_attention": getattr(config, "sliding_window", None)}
    kinds = set(config.layer_types)

    def add_mask(
        _: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if is_packed(options) and options.get("attention_mask") is None:
            positions = options["position_ids"]
            masks = {
                kind: added_mask(positions, model, window=window)
                for kind, window in windows.items()
                if kind in kinds or kind == "full_attention"
            }
            options = options | {"attention_mask": {"linear_attention": None} | masks}
        return arguments, options

    model.register_forward_pre_hook(add_mask, with_kwargs=True)


def is_packed(options: dict[str, Any]) -> bool:
    """Return True for the call of a model with packed rows; generation has positions and a cache."""
    return options.get("position_ids") is not None and options.get("use_cache") is False
