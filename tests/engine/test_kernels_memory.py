"""The bytes that the fast layers keep for the backward pass, as they are predicted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fast_models import VOCABULARY, make_model, make_rows
from torch.utils.flop_counter import FlopCounterMode

from crosstune.estimate.fast_layers import activation_bytes, fast_layer
from crosstune.estimate.model_shape import Step
from crosstune.models.folder import config_shape
from crosstune.torch_engine.kernels import decoder as decoder_module
from crosstune.torch_engine.kernels.choose import describe_layer
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


def test_a_recomputed_layer_keeps_what_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = make_model("llama")
    fast = FastDecoder(model, dtype=torch.float32, recompute="full")
    kept: list[int] = []
    inner = decoder_module.checkpoint

    def record(run: Any, total: torch.Tensor, *others: Any, **options: Any) -> Any:
        kept.append(total.nbytes)
        return inner(run, total, *others, **options)

    monkeypatch.setattr(decoder_module, "checkpoint", record)
    ids, rows, _ = make_rows()
    fast.hidden(ids, rows=rows)
    each = ids.numel() * describe_layer(fast, length=ids.shape[1]).kept().full
    assert kept == [each] * len(fast.layers)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_last_product_of_a_layer_is_not_computed_again(name: str) -> None:
    """A norm after it needs it, as in Gemma 3."""
    flops = {}
    for recompute in ("lean", "full"):
        model, _ = make_model(name)
        fast = FastDecoder(model, dtype=torch.float32, recompute=recompute)  # type: ignore[arg-type]
        ids, _, _ = make_rows()
        with FlopCounterMode(display=False) as counter:
            hidden = fast.hidden(ids)
            forward = counter.get_total_flops()
            hidden.sum().backward()
        flops[recompute] = counter.get_total_flops()
    down = [mlp.down for _, mlp in fast.layers if mlp.post_norm is None]
    left_out = sum(
        2 * ids.numel() * group.make_input(1).shape[1] * group.weights.num_outputs for group in down
    )
    assert bool(left_out) == (name == "llama")
    assert flops["full"] - flops["lean"] == forward - left_out
