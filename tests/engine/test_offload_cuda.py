"""Activations in host memory on an NVIDIA GPU: the same gradients with less memory, also with recomputed layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from crosstune.torch_engine.session.offload_activations import offload_activations

pytestmark = pytest.mark.cuda
WIDTH, ROWS, NUM_LAYERS = 512, 4096, 12
LAYER_BYTES = WIDTH * ROWS * 4


def make_layers() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(NUM_LAYERS)]
    return nn.Sequential(*layers).cuda()


def run(layers: Any, inputs: torch.Tensor, *, enabled: bool, recompute: bool) -> tuple[torch.Tensor, int]:
    """Return the output of a pass and the bytes that are held for its backward pass."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with offload_activations(torch.device("cuda"), enabled=enabled):
        x = inputs
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
    torch.cuda.synchronize()
    return x, torch.cuda.memory_allocated() - before


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_gradients_are_the_same_bits_in_less_memory(recompute: bool) -> None:
    layers = make_layers()
    inputs = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
    found, held = {}, {}
    for enabled in (False, True):
        for _ in range(2):  # the second pass reuses the memory of the first one
            layers.zero_grad()
            inputs.grad = None
            out, held[enabled] = run(layers, inputs, enabled=enabled, recompute=recompute)
            (out * out).mean().backward()
        found[enabled] = [inputs.grad, *(parameter.grad for parameter in layers.parameters())]
    assert all(torch.equal(one, other) for one, other in zip(found[False], found[True], strict=True))
    assert held[True] < held[False] - (NUM_LAYERS - 2) * LAYER_BYTES


def test_gradients_hold_while_memory_is_used_for_other_things() -> None:
    """A copy that is still under way must not be overwritten, nor read before it has arrived."""
    layers = make_layers()
    inputs = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
    out, _ = run(layers, inputs, enabled=False, recompute=False)
    expected = torch.autograd.grad(out.square().mean(), inputs)[0]
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(5):
        x = inputs
        with offload_activations(torch.device("cuda"), enabled=True):
            for layer in layers:
                x = layer(x)
                for _ in range(3):
                    torch.full((ROWS, WIDTH), torch.nan, device="cuda")
                    busy @ busy
        assert torch.equal(torch.autograd.grad(x.square().mean(), inputs)[0], expected)
