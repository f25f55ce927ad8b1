"""The fast layers against transformers' own, in fp32: losses and the gradient of every adapter, for each family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from fast_models import (
    CONFIGS,
    SHAPE,
    fast_loss,
    general_loss,
    gradients,
    make_model,
    quantize_base,
    settings,
)

from crosstune.core.quantization import QuantSpec
from crosstune.torch_engine.kernels.choose_layers import why_general, why_other_adapters
from crosstune.torch_engine.kernels.decoder import FastDecoder
from crosstune.torch_engine.loading.adapters import add_adapters

PACKED = torch.cat([torch.arange(7), torch.arange(13)]).repeat(2, 1)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys() and expected
    for name, gradient in expected.items():
        distance = (found[name] - gradient).norm() / gradient.norm()
        assert distance < 1e-5, f"{name}: {distance:.1e}"


@pytest.mark.parametrize("packed", [False, True], ids=["whole rows", "packed rows"])
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradients_are_those_of_the_general_layers(name: str, packed: bool) -> None:
    model, adapters = make_model(name)
    positions = PACKED if packed else None
    loss = general_loss(model, positions)
    expected = gradients(loss, adapters)
    assert why_general(model) is None and why_other_adapters(adapters) is None
    for recompute in ("none", "lean", "full"):
        decoder = FastDecoder(model, dtype=torch.float32, recompute=recompute)  # type: ignore[arg-type]
        found = fast_loss(decoder, positions)
        assert found.item() == pytest.approx(loss.item(), rel=1e-5)
        assert_same(gradients(found, adapters), expected)
    # The modules' weights have become views; transformers still computes the same with them.
    assert torch.allclose(general_loss(model, positions), loss, rtol=1e-6)


@pytest.mark.parametrize(
    ("rank", "targets"), [(256, "all"), (3, "all"), (8, "default"), (8, "down_proj"), (8, "k_proj,gate_proj")]
)
def test_any_rank_and_any_layers_with_adapters(rank: int, targets: str) -> None:
    model, adapters = make_model("llama", rank=rank, targets=targets)
    loss = general_loss(model, None)
    expected = gradients(loss, adapters)
    found = fast_loss(FastDecoder(model, dtype=torch.float32), None)
    assert found.item() == pytest.approx(loss.item(), rel=1e-5)
    assert_same(gradients(found, adapters), expected)


def test_quantized_weights_are_made_dense() -> None:
    model, adapters = make_model("llama, biases, tied head")
    quantize_base(adapters, QuantSpec(quantizer="bnb", bits=4, group_size=64))
    loss = general_loss(model, None)
    expected = gradients(loss, adapters)
    decoder = FastDecoder(model, dtype=torch.float32)
    found = fast_loss(decoder, None)
    assert found.item() == pytest.approx(loss.item(), rel=1e-5)
    assert_same(gradients(found, adapters), expected)
    matrix = decoder.layers[0][0].qkv.weights.matrix()
    dense = torch.cat(
        [
            getattr(model.model.layers[0].self_attn, f"{p}_proj").base.stored.dequantize(torch.float32)
            for p in "qkv"
        ]
    )
    assert torch.equal(matrix[:, : dense.shape[1]], dense)


def test_a_stream_wider_than_the_products() -> None:
    """As with autocast: the residual stream in a wider dtype than weights and products."""
    model, adapters = make_model("llama")
    expected = gradients(general_loss(model, None), adapters)
    model.model.embed_tokens.double()
    for module in model.modules():
        if "RMSNorm" in type(module).__name__:
            module.double()
    found = gradients(fast_loss(FastDecoder(model, dtype=torch.float32), None), adapters)
    assert_same(found, expected)


def test_models_and_adapters_without_fast_layers_are_named() -> None:
    capped = hf.AutoModelForCausalLM.from_config(hf.Gemma2Config(**SHAPE, head_dim=24))
    assert "caps" in (why_general(capped) or "")
    other = hf.AutoModelForCausalLM.from_config(
        hf.OPTConfig(
            vocab_size=97,
            hidden_size=32,
            ffn_dim=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            word_embed_proj_dim=32,
        )
    )
    assert "opt" in (why_general(other) or "")
    dropping = hf.AutoModelForCausalLM.from_config(hf.LlamaConfig(**SHAPE, attention_dropout=0.1))
    assert "attention_dropout" in (why_general(dropping) or "")
    plain = hf.AutoModelForCausalLM.from_config(CONFIGS["llama"]())
    assert "dropout" in (
        why_other_adapters(add_adapters(plain, targets="all", settings=settings(dropout=0.1), seed=0)) or ""
    )
    plain = hf.AutoModelForCausalLM.from_config(CONFIGS["llama"]())
    assert "DoRA" in (
        why_other_adapters(add_adapters(plain, targets="all", settings=settings(dora=True), seed=0)) or ""
    )
    assert "no adapters" in (why_other_adapters({}) or "")


@pytest.mark.parametrize("recompute", ["none", "lean", "full"])
def test_activations_may_wait_on_the_host(recompute: Any) -> None:
    """What --use_activation_cpu_offload does: saved tensors become copies, and their memory is used for other things."""
    model, adapters = make_model("qwen3, QK norms")
    decoder = FastDecoder(model, dtype=torch.float32, recompute=recompute)
    expected = gradients(fast_loss(decoder, None), adapters)
    copied: list[int] = []

    def pack(tensor: torch.Tensor) -> Any:
        if isinstance(tensor, torch.nn.Parameter) or not tensor.is_floating_point():
            return tensor
        copied.append(tensor.nbytes)
        return tensor.numpy(force=True).copy()

    def unpack(found: Any) -> torch.Tensor:
        return found if isinstance(found, torch.Tensor) else torch.from_numpy(found.copy())

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = fast_loss(decoder, None)
    found = gradients(loss, adapters)
    assert copied and found.keys() == expected.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


@pytest.mark.parametrize("quantizer", ["bnb", "fp8"])
def test_a_group_may_have_quantized_and_dense_layers(quantizer: str) -> None:
    model, adapters = make_model("llama, biases, tied head")
    some = {name: adapter for name, adapter in adapters.items() if name.endswith(("k_proj", "gate_proj"))}
    assert some
    quantize_base(some, QuantSpec(quantizer=quantizer, bits=4 if quantizer == "bnb" else 8, group_size=64))
    loss = general_loss(model, None)
    expected = gradients(loss, adapters)
    found = fast_loss(FastDecoder(model, dtype=torch.float32, fp8=True), None)
    assert found.item() == pytest.approx(loss.item(), rel=1e-5)
    assert_same(gradients(found, adapters), expected)
