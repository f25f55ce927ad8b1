"""The bytes that the fast layers keep for the backward pass equal the prediction."""

from __future__ import annotations

import pytest
import torch
from fast_models import VOCABULARY, make_model

from crosstune.estimate.fast_layers import activation_bytes, fast_layer
from crosstune.estimate.model_shape import Step
from crosstune.models.folder import config_shape
from crosstune.torch_engine.kernels.choose_layers import describe_layer
from crosstune.torch_engine.kernels.decoder import FastDecoder


def saved_bytes(decoder: FastDecoder, ids: torch.Tensor, targets: torch.Tensor) -> int:
    """Return the bytes of the tensors that autograd saves in a forward pass, besides parameters; shared ones count once."""
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() and not isinstance(tensor, torch.nn.Parameter):
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        decoder.loss(decoder.hidden(ids), targets)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.parametrize(
    ("name", "rank", "targets", "length"),
    [
        ("llama", 8, "all", 7),
        ("llama", 200, "all", 7),
        ("llama", 8, "all", 128),  # attends by products, and keeps the probabilities
        ("llama", 8, "all", 264),  # computes them again
        ("llama, biases, tied head", 3, "attention", 7),
        ("llama, one head per key", 20, "q_proj,down_proj", 192),
        ("qwen3, QK norms", 8, "all", 7),
        ("gemma", 8, "all", 7),
        ("gemma2 without caps", 8, "all", 7),
        ("gemma3", 8, "all", 7),
    ],
)
def test_a_layer_keeps_what_is_predicted(name: str, rank: int, targets: str, length: int) -> None:
    """Exactly: the plan of a run and the choice of what is recomputed rest on it."""
    model, _ = make_model(name, rank=rank, targets=targets)
    shape = config_shape(model.config.to_dict())
    assert shape is not None and not shape.why_general
    step = Step(
        rank=rank,
        targets=targets,
        batch=2,
        context=length,  # less than a window, which would be a mask on a CPU, and autograd saves masks too
        compute_bits=32,
        weight_bits=32,
        on_gpu=False,
        fast=True,
        recomputes_by_memory=False,
    )
    torch.manual_seed(0)
    ids, wanted = torch.randint(3, VOCABULARY, (2, length)), torch.randint(0, VOCABULARY, (2 * length,))
    for recompute in ("none", "lean"):
        decoder = FastDecoder(model, dtype=torch.float32, recompute=recompute)  # type: ignore[arg-type]
        assert describe_layer(decoder, length=length) == fast_layer(shape, step)
        activations, _ = activation_bytes(shape, step, decoder.recompute)
        head = (
            2 * length * shape.hidden * 4
        )  # the gradient of the hidden states, which counts as part of the loss
        assert saved_bytes(decoder, ids, wanted) == activations + head
