"""Recomputed layers of long rows: tiles of the MLP and kept attention change nothing but memory and time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fast_models import fast_loss, gradients, make_model
from torch.utils._python_dispatch import TorchDispatchMode

from crosstune.estimate.fast_layers import TILE_TOKENS, fast_layer
from crosstune.estimate.model_shape import Step
from crosstune.models.folder import config_shape
from crosstune.torch_engine.kernels.decoder import FastDecoder
from crosstune.torch_engine.rehearse import CountStep
from crosstune.torch_engine.session.offload_activations import offload_activations


class CountAttention(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        self.times += "scaled_dot_product" in name and not name.endswith("_backward")
        return func(*args, **(kwargs or {}))


def run(name: str, *, tile: int | None, keeps: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    model, adapters = make_model(name)
    decoder = FastDecoder(model, dtype=torch.float32, recompute="full")
    decoder.tile_tokens = tile or decoder.tile_tokens
    decoder.keeps_from = 20 if keeps else None
    with CountAttention() as counted:
        loss = fast_loss(decoder, None)
        found = gradients(loss, adapters)
    return loss.detach(), found, counted.times


@pytest.mark.parametrize("name", ["llama, biases, tied head", "mistral, window", "gemma3", "qwen3, QK norms"])
def test_tiles_and_kept_attention_are_exact(name: str) -> None:
    loss, expected, times = run(name, tile=None, keeps=False)
    assert times == 6, "three layers, each computed twice"
    for tile, keeps in ((7, False), (None, True), (7, True)):
        same_loss, found, times = run(name, tile=tile, keeps=keeps)
        assert times == (3 if keeps else 6)
        torch.testing.assert_close(same_loss, loss, rtol=1e-6, atol=0)
        assert found.keys() == expected.keys()
        for key, gradient in expected.items():
            torch.testing.assert_close(
                found[key], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max())
            )


def test_the_memory_of_a_tiled_layer_is_as_predicted() -> None:
    """The peak of the backward pass, above what all layers keep."""
    length = 2048
    model, _ = make_model("llama", intermediate_size=448, num_hidden_layers=2, max_position_embeddings=length)
    shape = config_shape(model.config.to_dict())
    assert shape is not None
    step = Step(rank=8, context=length, compute_bits=32, weight_bits=32, on_gpu=False, fast=True)
    layer = fast_layer(shape, step)
    ids = torch.randint(3, 90, (1, length))

    def peak(tile: int) -> float:
        decoder = FastDecoder(model, dtype=torch.float32, recompute="full")
        decoder.tile_tokens = tile
        counter = CountStep(num_local=1)
        counter.add([*model.parameters(), *model.buffers()])
        with counter:
            hidden = decoder.hidden(ids)
            before = counter.held_bytes
            counter.restart_peak()
            hidden.sum().backward()
            return (counter.restart_peak() - before) / length

    whole = layer.kept().lean + layer.backward(in_fp8=False)
    tiled = layer.recomputed() + layer.backward(in_fp8=False, tile_share=1 / 16)
    assert peak(TILE_TOKENS) == pytest.approx(whole, rel=0.15)
    assert peak(length // 16) == pytest.approx(tiled, rel=0.15)
    assert tiled < 0.6 * whole


@pytest.mark.cuda
def test_kept_attention_goes_to_the_host_and_back() -> None:
    found = {}
    for keeps in (False, True):
        model, adapters = make_model(
            "llama", hidden_size=256, intermediate_size=512, max_position_embeddings=4096
        )
        model, ids = model.to("cuda", torch.bfloat16), torch.randint(3, 90, (1, 4096), device="cuda")
        decoder = FastDecoder(model, dtype=torch.bfloat16, recompute="full")
        decoder.tile_tokens, decoder.keeps_from = 512, 4096 if keeps else None
        with offload_activations(torch.device("cuda"), enabled=True):
            loss = decoder.loss(decoder.hidden(ids)[:-1], ids[0, 1:])
        found[keeps] = loss.detach(), gradients(loss, adapters)
    torch.testing.assert_close(found[True][0], found[False][0], rtol=0, atol=0)
    for key, gradient in found[False][1].items():
        torch.testing.assert_close(
            found[True][1][key], gradient, rtol=0, atol=1e-2 * float(gradient.abs().max())
        )
