"""Attention by batched matmuls against torch's own: values and gradients, with documents, windows and shared keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import transformers as hf

from crosstune.estimate.fast_layers import LONGEST_KEPT_ROW
from crosstune.models.adapter_choice import AdapterSettings
from crosstune.torch_engine.kernels.attention import Documents
from crosstune.torch_engine.kernels.decoder import FastDecoder
from crosstune.torch_engine.kernels.short_rows import attend_short_rows
from crosstune.torch_engine.loading.adapters import add_adapters

HEADS = [(9, 3, 16), (4, 4, 8), (6, 1, 24)]


def draw(
    length: int, heads: tuple[int, int, int], dtype: torch.dtype
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return queries, keys and values that are views of packed rows, as those of a layer, and an upstream gradient."""
    torch.manual_seed(length)
    num_queries, num_keys, size = heads
    packed = torch.randn(2, length, num_queries + 2 * num_keys, size, dtype=dtype)
    parts = packed.split([num_queries, num_keys, num_keys], dim=2)
    return [part.detach().requires_grad_() for part in parts], torch.randn(2, length, num_queries, size).to(
        dtype
    )


def documents(length: int, *, packed: bool) -> Documents:
    if not packed:
        return Documents(2, length)
    cuts = (
        (length // 3, 1),
        (5, length // 2),
    )  # bounds that differ between rows, and a document of one token
    rows = []
    for first, second in cuts:
        rest = length - first - second
        rows.append(torch.cat([torch.arange(first), torch.arange(second), torch.arange(rest)]))
    return Documents(2, length, torch.stack(rows))


def expect(parts: list[torch.Tensor], given: Documents, *, scale: float, window: int | None) -> torch.Tensor:
    q, k, v = (part.transpose(1, 2) for part in parts)
    mask = given.mask(window, q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True).transpose(
        1, 2
    )


@pytest.mark.parametrize(
    ("heads", "packed", "window", "keep"),
    [
        (HEADS[0], False, None, True),
        (HEADS[1], True, None, False),
        (HEADS[2], False, 40, False),
        (HEADS[0], True, 40, True),
        (HEADS[1], False, 1, True),
        (HEADS[2], True, 300, False),
    ],
)
def test_values_and_gradients_are_those_of_torch(
    heads: tuple[int, int, int], packed: bool, window: int | None, keep: bool
) -> None:
    for dtype, bound in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        for length in (150, 64, 3):  # whole blocks and parts of one
            if length == 3 and packed:
                continue
            parts, upstream = draw(length, heads, dtype)
            given = documents(length, packed=packed)
            wanted = expect(parts, given, scale=0.3, window=window)
            gradients = torch.autograd.grad(wanted, parts, upstream)
            mask = given.mask(window, wanted.device) if given.needs_mask(window) else None
            found = attend_short_rows(*parts, mask=mask, window=window, scale=0.3, keep=keep)
            assert found.dtype == dtype and found.shape == wanted.shape
            for value, expected in zip(
                (found, *torch.autograd.grad(found, parts, upstream)), (wanted, *gradients), strict=True
            ):
                assert (value - expected).abs().max() <= bound * max(1.0, expected.abs().max().item())


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on a CPU without products in bf16
def test_16_bit_rows_are_near_those_of_fp32() -> None:
    parts, upstream = draw(130, (4, 2, 16), torch.bfloat16)
    wide = [part.detach().float().requires_grad_() for part in parts]
    wanted = expect(wide, Documents(2, 130), scale=0.25, window=None)
    found = attend_short_rows(*parts, mask=None, window=None, scale=0.25, keep=True)
    assert found.dtype == torch.bfloat16
    pairs = zip(
        (found, *torch.autograd.grad(found, parts, upstream)),
        (wanted, *torch.autograd.grad(wanted, wide, upstream.float())),
        strict=True,
    )
    for value, expected in pairs:
        assert value.dtype == torch.bfloat16
        assert (value.float() - expected).norm() / expected.norm() < 1e-2


@pytest.mark.parametrize("packed", [False, True], ids=["whole rows", "packed rows"])
@pytest.mark.parametrize("length", [LONGEST_KEPT_ROW - 20, LONGEST_KEPT_ROW + 20])
def test_a_model_with_short_rows_trains_as_its_general_layers(length: int, packed: bool) -> None:
    torch.manual_seed(0)
    shape = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
    config = hf.MistralConfig(**shape, num_attention_heads=4, num_key_value_heads=2, sliding_window=100)
    model: Any = hf.AutoModelForCausalLM.from_config(config)
    settings = AdapterSettings(rank=4, alpha=8, dropout=0.0, rank_stabilized=False, magnitudes=False)
    adapters = add_adapters(model, targets="all", settings=settings, seed=0)
    for adapter in adapters.values():
        adapter.lora_B.data.normal_(0, 0.1)
    trained = [part for adapter in adapters.values() for part in adapter.trained().values()]
    ids, targets = torch.randint(0, 50, (2, length)), torch.randint(0, 50, (2 * length,))
    positions = documents(length, packed=packed).positions
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits.flatten(0, 1)
    wanted = F.cross_entropy(logits, targets, reduction="sum")
    expected = torch.autograd.grad(wanted, trained)
    for recompute in ("none", "lean", "full"):
        decoder = FastDecoder(model, dtype=torch.float32, recompute=recompute)  # type: ignore[arg-type]
        loss = decoder.loss(decoder.hidden(ids, positions=positions), targets)
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
        for found, gradient in zip(torch.autograd.grad(loss, trained), expected, strict=True):
            assert (found - gradient).norm() < 1e-5 * gradient.norm()
