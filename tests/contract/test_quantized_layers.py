"""Layers quantized by the guides' quantization_wrapper: the choice of layers, their bits, and training through them."""

from __future__ import annotations

from typing import Any

import pytest
from quantization_cases import ADAPTERS, Block, M, inputs, quantized_names, relative_error, torch
from torch import nn

from crosstune.core.errors import UserError
from crosstune.torch_engine.loading.adapters import AdapterSettings, add_adapters
from quantization_wrapper import (
    FallbackAdapter,
    HQQAdapter,
    QuantizationConfig,
    QuantoAdapter,
    replace_linear_with_quantized,
)


def test_lora_trains_through_a_plain_torch_model(block: Block) -> None:
    adapter = HQQAdapter()
    model = adapter.prepare_model_for_training(adapter.quantize_model(block))
    assert model is block and not any(parameter.requires_grad for parameter in model.parameters())
    assert type(model.lm_head) is nn.Linear
    assert_lora_trains(model, lambda: model(inputs()).square().mean(), "enter,leave")


@pytest.mark.parametrize(("kind", "options"), ADAPTERS)
def test_lora_trains_through_a_transformers_model(kind: Any, options: Any, llama: Any) -> None:
    tokens = torch.arange(24).reshape(2, 12) % 100
    adapter = kind(QuantizationConfig(**options | {"quant_scale": False}))
    adapter.prepare_model_for_training(adapter.quantize_model(llama), use_gradient_checkpointing=True)
    assert len(quantized_names(llama)) == (0 if kind is FallbackAdapter else 14)
    assert_lora_trains(llama, lambda: llama(input_ids=tokens, labels=tokens).loss, "all")


def assert_lora_trains(model: Any, loss_of: Any, targets: str) -> None:
    settings = AdapterSettings(rank=4, alpha=8.0, dropout=0.0, rank_stabilized=False, magnitudes=False)
    adapters = add_adapters(model, targets=targets, settings=settings, seed=0)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(trained) == 2 * len(adapters) > 0
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for _ in range(4):
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        for adapter in adapters.values():
            assert adapter.lora_B.grad is not None and float(adapter.lora_B.grad.abs().sum()) > 0
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


def test_gradient_checkpointing_is_refused_where_there_is_none(block: Block) -> None:
    with pytest.raises(UserError, match="recompute"):
        HQQAdapter().prepare_model_for_training(block, use_gradient_checkpointing=True)


def test_layers_have_their_own_bits(llama: Any) -> None:
    config = QuantizationConfig(
        method=M.HQQ,
        layer_configs={
            "self_attn": 8,
            "layers.1.self_attn.q_proj": {"bits": 3, "group_size": 32},
            "*.down_proj": {"method": M.BNB_NF4, "quant_type": "fp4"},
            "layers.0.mlp.up_proj": {"bits": 16},
        },
    )
    HQQAdapter(config).quantize_model(llama)
    specs = {
        name.removeprefix("model.layers."): llama.get_submodule(name).recipe.spec
        for name in quantized_names(llama)
    }
    widths = {name: (spec.quantizer, spec.bits, spec.group_size, spec.kind) for name, spec in specs.items()}
    assert widths["0.self_attn.q_proj"] == ("hqq", 8, 64, "auto")
    assert widths["1.self_attn.q_proj"] == ("hqq", 3, 32, "auto")
    assert widths["0.mlp.down_proj"] == ("bnb", 4, 64, "fp4")
    assert widths["1.mlp.up_proj"] == ("hqq", 4, 64, "auto")
    assert "0.mlp.up_proj" not in widths and llama.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert type(llama.lm_head) is nn.Linear and llama.lm_head.weight.dtype == torch.float32


def test_words_that_mean_no_layer(block: Block) -> None:
    with pytest.raises(ValueError, match="no linear layer"):
        HQQAdapter(QuantizationConfig(method=M.HQQ, layer_configs={"mlp": 8})).quantize_model(block)
    with pytest.raises(ValueError, match="no linear layer that is quantized"):
        HQQAdapter(QuantizationConfig(method=M.HQQ, layer_configs={"lm_head": 8})).quantize_model(block)
    assert not quantized_names(block)
    with pytest.warns(UserWarning, match="'gate'"):
        HQQAdapter(QuantizationConfig(method=M.HQQ, skip_modules=["gate", "lm_head"])).quantize_model(block)


def test_skipping(block: Block) -> None:
    model = replace_linear_with_quantized(block, QuantoAdapter(), skip_modules=["leave", "lm_head"])
    assert quantized_names(model) == {"enter"}
    with pytest.raises(ValueError, match="No layer"):
        replace_linear_with_quantized(model, QuantoAdapter(), skip_modules=["leave", "lm_head"])


def test_torch_parts_that_read_weights_themselves_still_work() -> None:
    """In evaluation torch's encoder layer hands the weights of its linear layers to one fused kernel."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    with torch.no_grad():
        before = model(inputs())
        after = HQQAdapter(QuantizationConfig(method=M.HQQ, bits=8)).quantize_model(model)(inputs())
    assert quantized_names(model) == {"linear1", "linear2"}
    assert 0 < relative_error(after, before) < 0.01


def test_a_group_that_does_not_divide_leaves_the_model_alone(block: Block) -> None:
    adapter = QuantoAdapter(QuantizationConfig(method=M.QUANTO_INT4, group_size=96))
    with pytest.raises(UserError, match=r"enter: --group_size 96"):
        adapter.quantize_model(block)
    assert not quantized_names(block)


def test_shared_layers_and_shared_weights() -> None:
    model = nn.ModuleDict(
        {"a": nn.Linear(64, 64), "embedding": nn.Embedding(64, 64), "head": nn.Linear(64, 64)}
    )
    model["b"] = model["a"]
    model["head"].weight = model["embedding"].weight
    with pytest.warns(UserWarning, match="head is not quantized"):
        HQQAdapter().quantize_model(model)
    assert model["a"] is model["b"] and quantized_names(model) == {"a"}


def test_a_quantized_layer_follows_casts_and_refuses_to_lose_its_weights(block: Block) -> None:
    model = HQQAdapter().quantize_model(block).to(torch.bfloat16)
    assert model(inputs().bfloat16()).dtype == torch.bfloat16
    with pytest.raises(UserError, match="meta"):
        model.to("meta")
