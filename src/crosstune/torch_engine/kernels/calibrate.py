"""Leave groups of layers out of fp8 until the predictions of a model are near enough to those of its own weights.

The distance is the Kullback-Leibler divergence in nats per token, on text that the model writes itself: the loss over fp8
is about that much higher. Each group's share comes from one pass: an error e of its outputs changes the log probability of
the text by g e, where g is the gradient, and half the mean square of that is its divergence. Passes with and without a group
would show mostly how 16-bit numbers are rounded after it: with a small model, a divergence of its own of 0.002 to 0.005.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from crosstune.torch_engine.kernels.decoder import FastDecoder
from crosstune.torch_engine.kernels.stacked import Stacked
from crosstune.torch_engine.loading.adapters import AdaptedLinear
from crosstune.torch_engine.loading.stream import Place, find_tensors, read_tensor
from crosstune.torch_engine.quantized import QuantLinear

NUM_ROWS, NUM_TOKENS, NUM_TOKENS_ON_CPU = 8, 48, 8
"""The size of the text. A CPU computes fp8 products by making e4m3 numbers wide first, which takes seconds in a pass."""
_DENSE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """Name the groups of layers that left fp8, and tell how far predictions were off with them and are without them."""

    names: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    """The layers of these groups that have their original weights again, by their canonical names."""
    before: float = 0.0
    after: float = 0.0


def leave_out_of_fp8(decoder: FastDecoder, *, folder: Path | None, tolerance: float, seed: int) -> LeftOut:
    """Take the groups that cost most out of fp8, until the rest are within the tolerance, in nats per token; none with a
    tolerance of 0. They get the weights of `folder` back, where it has them, and multiply densely."""
    groups = {name: stacked for name, stacked in decoder.groups().items() if stacked.in_fp8}
    if not groups or not tolerance:
        return LeftOut()
    originals = Originals(decoder.model, dtype=decoder.dtype, device=decoder.device, folder=folder)
    shares = measure_shares(decoder, groups, originals, write_text(decoder, seed=seed))
    before = after = sum(shares.values())
    chosen: list[str] = []
    for name in sorted(shares, key=shares.__getitem__, reverse=True):
        if not after > tolerance:
            break
        chosen.append(name)
        after = sum(share for other, share in shares.items() if other not in chosen)
    for name in chosen:
        for base in groups[name].bases:
            originals.put_back(base)
    if chosen:
        decoder.leave_fp8(chosen)
    return LeftOut(names=tuple(chosen), kept=tuple(sorted(originals.put)), before=before, after=after)


def put_back_layers(
    model: nn.Module, names: Sequence[str], *, dtype: torch.dtype, device: torch.device, folder: Path | None
) -> None:
    """Give quantized layers with these canonical names their original weights, as another process has chosen."""
    originals = Originals(model, dtype=dtype, device=device, folder=folder)
    for name in names:
        layer = model.get_submodule(name)
        base = layer.base if isinstance(layer, AdaptedLinear) else layer
        if isinstance(base, QuantLinear):
            assert originals.put_back(base) is not base, "every process has the weights of the same model"


@torch.no_grad()
def write_text(decoder: FastDecoder, *, seed: int) -> torch.Tensor:
    """Return rows of tokens that the model draws itself, each after a random one."""
    draw = torch.Generator().manual_seed(seed)
    length = NUM_TOKENS_ON_CPU if decoder.device.type == "cpu" else NUM_TOKENS
    ids = torch.zeros(NUM_ROWS, length, dtype=torch.long)
    ids[:, 0] = torch.randint(0, decoder.model.config.vocab_size, (NUM_ROWS,), generator=draw)
    for place in range(1, length):
        # What stands after a token does not change it, and one shape needs no second choice of kernels.
        hidden = decoder.hidden(ids.to(decoder.device)).view(NUM_ROWS, length, -1)[:, place - 1]
        chances = decoder.logits(hidden).float().softmax(dim=-1).cpu()
        if not bool(chances.isfinite().all()):  # the first step will say what is wrong
            chances = torch.ones_like(chances)
        ids[:, place] = torch.multinomial(chances, 1, generator=draw)[:, 0]
    return ids.to(decoder.device)


def measure_shares(
    decoder: FastDecoder, groups: Mapping[str, Stacked], originals: Originals, ids: torch.Tensor
) -> dict[str, float]:
    """Return the divergence in nats per token that each group's rounding to e4m3 causes, on text of the model itself."""
    watches = {name: _Errors(stacked, originals) for name, stacked in groups.items()}
    # The gradient of the embeddings comes through all layers, adapted or not.
    first: nn.Parameter = decoder.inner.embed_tokens.weight
    was_trained, (count, length) = first.requires_grad, ids.shape
    try:
        first.requires_grad_(True)
        for name, watch in watches.items():
            groups[name].watch = watch
        with torch.enable_grad():
            hidden = decoder.hidden(ids).view(count, length, -1)[:, :-1]
            log_probs = decoder.logits(hidden).float().log_softmax(dim=-1)
            text = log_probs.gather(-1, ids[:, 1:, None]).sum()
            torch.autograd.grad(text, first)
    finally:
        first.requires_grad_(was_trained)
        for stacked in groups.values():
            stacked.watch = None
    return {name: float(watch.squares) / 2 / (count * (length - 1)) for name, watch in watches.items()}


class _Errors:
    """Square what the error of each row of a group's product changes in the log probability of the text."""

    def __init__(self, stacked: Stacked, originals: Originals) -> None:
        self.stacked, self.originals = stacked, originals
        self.squares: torch.Tensor | float = 0.0
        self._error: torch.Tensor | None = None

    def on_product(self, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        weights = torch.cat([self.originals.read(base) for base in self.stacked.bases])
        exact = inputs.to(weights.dtype) @ weights.t()
        self._error = (outputs.float() - exact.float()).to(outputs.dtype)

    def on_gradient(self, gradient: torch.Tensor) -> None:
        assert self._error is not None
        self.squares = (gradient.float() * self._error.float()).sum(dim=-1).square().sum()
        self._error = None


class Originals:
    """The weights that quantized layers were made from, read from the model's folder when they are asked for."""

    def __init__(
        self, model: nn.Module, *, dtype: torch.dtype, device: torch.device, folder: Path | None
    ) -> None:
        self.model, self.dtype, self.device = model, dtype, device
        self.put: list[str] = []
        """The canonical names of the layers that have their original weights again."""
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
        if base.bias is not None:
            dense.bias = nn.Parameter(base.bias.detach().to(self.dtype), requires_grad=False)
        parent, _, child = self._names[base].rpartition(".")
        setattr(self.model.get_submodule(parent), child, dense)
        self.put.append(self._name(base))
        return dense

    def _name(self, base: QuantLinear) -> str:
        return self._names[base].removesuffix(".base")

    def _place(self, base: QuantLinear) -> Place | None:
        """Return where the dense weight of a layer is. Weights of other quantizers are those that were asked for."""
        name = f"{self._name(base)}.weight"
        prefix = f"{getattr(self.model, 'base_model_prefix', '')}."
        place = self._places.get(name) or self._places.get(name.removeprefix(prefix))
        is_its = place is not None and place.dtype in _DENSE and place.shape == tuple(base.stored.shape)
        return place if is_its and base.stored.quantizer == "fp8" else None
