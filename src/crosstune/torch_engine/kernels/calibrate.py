"""Leave groups of layers out of fp8 until the predictions of a model are near enough to those of its own weights.

The distance is the Kullback-Leibler divergence in nats per token, on text that the model writes itself: the loss over fp8
is about that much higher.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from crosstune.torch_engine.kernels.decoder import FastDecoder
from crosstune.torch_engine.kernels.operations import Rows
from crosstune.torch_engine.kernels.stacked import Stacked
from crosstune.torch_engine.quantized import QuantLinear
from crosstune.torch_engine.stream import Place, find_tensors, read_tensor

FARTHEST = 0.005
"""The largest distance in nats per token."""
NUM_ROWS, NUM_TOKENS = 8, 48
_DENSE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """Which groups of layers do not multiply in fp8, and how far the predictions were off with them and are without."""

    names: tuple[str, ...] = ()
    before: float = 0.0
    after: float = 0.0


@torch.no_grad()
def leave_out_of_fp8(decoder: FastDecoder, *, folder: Path | None, seed: int) -> LeftOut:
    """Take the groups that cost most out of fp8, as many as it takes. They get the weights of `folder` back, where it has
    them, and multiply densely."""
    groups = {name: stacked for name, stacked in decoder.groups().items() if stacked.in_fp8}
    if not groups:
        return LeftOut()
    originals = Originals(decoder, folder)
    ids = write_text(decoder, seed=seed)
    with multiplying_exactly(groups.values(), originals):
        exact = _predict(decoder, ids)
    rounded = _predict(decoder, ids)
    before = after = divergence(exact, rounded)
    if not before > FARTHEST:
        return LeftOut(before=before, after=after)
    shares = {}
    for name, stacked in groups.items():
        with multiplying_exactly([stacked], originals):
            shares[name] = divergence(_predict(decoder, ids), rounded)
    waiting = sorted(shares, key=shares.__getitem__, reverse=True)
    chosen: list[str] = []
    while waiting and after > FARTHEST:
        # Shares add up only roughly, so what is left is measured each time.
        ratio = after / max(sum(shares[name] for name in waiting), 1e-30)
        expected = after
        while waiting and expected > FARTHEST:
            expected -= ratio * shares[waiting[0]]
            chosen.append(waiting.pop(0))
        with multiplying_exactly([groups[name] for name in chosen], originals):
            after = divergence(exact, _predict(decoder, ids))
    for name in chosen:
        groups[name].leave_fp8([originals.put_back(base) for base in groups[name].bases])
    return LeftOut(names=tuple(chosen), before=before, after=after)


def write_text(decoder: FastDecoder, *, seed: int) -> torch.Tensor:
    """Return rows of tokens that the model draws itself, each after a random one."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.zeros(NUM_ROWS, NUM_TOKENS, dtype=torch.long)
    ids[:, 0] = torch.randint(0, decoder.model.config.vocab_size, (NUM_ROWS,), generator=draw)
    for place in range(1, NUM_TOKENS):
        # What stands after a token does not change it, and one shape needs no second choice of kernels.
        hidden = decoder.hidden(ids.to(decoder.device)).view(NUM_ROWS, NUM_TOKENS, -1)[:, place - 1]
        chances = decoder.logits(hidden).float().softmax(dim=-1).cpu()
        ids[:, place] = torch.multinomial(chances, 1, generator=draw)[:, 0]
    return ids.to(decoder.device)


def divergence(exact: torch.Tensor, found: torch.Tensor) -> float:
    """Return the mean Kullback-Leibler divergence of log probabilities from the exact ones."""
    return float((exact.exp() * (exact - found)).sum(dim=-1).mean())


def _predict(decoder: FastDecoder, ids: torch.Tensor) -> torch.Tensor:
    return decoder.logits(decoder.hidden(ids)).float().log_softmax(dim=-1)


class Originals:
    """The weights that quantized layers were made from, read from the model's folder when they are asked for."""

    def __init__(self, decoder: FastDecoder, folder: Path | None) -> None:
        self.model, self.dtype, self.device = decoder.model, decoder.dtype, decoder.device
        self._names = {module: name for name, module in self.model.named_modules()}
        self._places: Mapping[str, Place] = find_tensors(folder) if folder is not None else {}

    def read(self, base: QuantLinear) -> torch.Tensor:
        """Return the weight of a layer; where the folder has only its quantized form, that in the dtype of products."""
        place = self._place(base)
        found = base.stored.dequantize(self.dtype) if place is None else read_tensor(place)
        return found.to(self.device, self.dtype)

    def put_back(self, base: QuantLinear) -> nn.Module:
        """Replace a quantized layer of the model by a dense one with its original weight, if the folder has it."""
        if self._place(base) is None:
            return base
        dense = nn.Linear(base.in_features, base.out_features, bias=False, device="meta")
        dense.weight = nn.Parameter(self.read(base), requires_grad=False)
        dense.bias = base.bias
        parent, _, child = self._names[base].rpartition(".")
        setattr(self.model.get_submodule(parent), child, dense)
        return dense

    def _place(self, base: QuantLinear) -> Place | None:
        """Return where the dense weight of a layer is. Weights of other quantizers are those that were asked for."""
        place = self._places.get(f"{self._names[base].removesuffix('.base')}.weight")
        is_its = place is not None and place.dtype in _DENSE and place.shape == tuple(base.stored.shape)
        return place if is_its and base.stored.quantizer == "fp8" else None


class _ExactWeights:
    """The weights of a group before they were rounded to e4m3, read at each use: those of all layers need not fit."""

    row_scales: torch.Tensor | None = None

    def __init__(self, stacked: Stacked, originals: Originals) -> None:
        self.bases, self.originals, self.num_outputs = stacked.bases, originals, stacked.weights.num_outputs

    def product(self, inputs: Rows) -> torch.Tensor:
        matrix = torch.cat([self.originals.read(base) for base in self.bases])
        return inputs.values.to(matrix.dtype) @ matrix.t()


@contextlib.contextmanager
def multiplying_exactly(groups: Iterable[Stacked], originals: Originals) -> Iterator[None]:
    """Multiply with the original weights in the block instead of in fp8."""
    kept: list[tuple[Stacked, Any]] = [(stacked, stacked.weights) for stacked in groups]
    try:
        for stacked, _ in kept:
            stacked.weights = _ExactWeights(stacked, originals)
        yield
    finally:
        for stacked, weights in kept:
            stacked.weights = weights
