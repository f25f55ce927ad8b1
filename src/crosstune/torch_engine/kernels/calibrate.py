"""Leave groups of layers out of fp8 whose products would be too far from the exact ones."""

from __future__ import annotations

import torch

from crosstune.torch_engine.kernels.decoder import FastDecoder
from crosstune.torch_engine.kernels.stacked import OnProduct, Stacked

LARGEST_ERROR = 0.1
"""Relative error of a group's outputs. Gaussian weights and inputs give 0.037; a row with values far apart gives more."""
NUM_TOKENS = 64


@torch.no_grad()
def leave_out_of_fp8(decoder: FastDecoder, *, seed: int) -> list[tuple[str, float]]:
    """Run random tokens, and multiply densely wherever the error is too large. Return those groups with their errors."""
    groups = {name: stacked for name, stacked in decoder.groups().items() if stacked.in_fp8}
    if not groups:
        return []
    draw = torch.Generator().manual_seed(seed)
    vocabulary = decoder.model.config.vocab_size
    ids = torch.randint(0, vocabulary, (1, NUM_TOKENS), generator=draw).to(decoder.device)
    errors: dict[str, torch.Tensor] = {}
    for name, stacked in groups.items():
        stacked.on_product = _measure(name, errors)
    decoder.hidden(ids)
    for stacked in groups.values():
        stacked.on_product = None
    left_out = [(name, float(error)) for name, error in errors.items() if not float(error) <= LARGEST_ERROR]
    for name, _ in left_out:
        groups[name].make_dense()
    return left_out


def _measure(name: str, errors: dict[str, torch.Tensor]) -> OnProduct:
    def compare(stacked: Stacked, inputs: torch.Tensor, found: torch.Tensor) -> None:
        exact = (inputs.to(stacked.dtype) @ stacked.weights.dense().t()).float()
        errors[name] = (found.float() - exact).norm() / exact.norm().clamp_min(1e-30)

    return compare
