"""The guides' quantization_wrapper: every documented name, over real quantizers on the processor."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from quantization_cases import IDS, REAL, M, relative_error, torch
from torch import nn

import quantization_wrapper
from crosstune.core.errors import UserError
from crosstune.machines.probe import load_machine
from crosstune.torch_engine.quantized import QuantLinear, stored_bytes
from quantization_wrapper import (
    HQQAdapter,
    MLXAdapter,
    QuantizationConfig,
    QuantizedLinear,
    create_quantization_adapter,
)

NAMES = """BitsAndBytesAdapter FallbackAdapter HQQAdapter MLXAdapter QuantizationAdapter QuantizationConfig
    QuantizationMethod QuantizedLinear QuantoAdapter create_quantization_adapter
    get_recommended_config replace_linear_with_quantized validate_quantization_config"""
FIELDS = """method bits group_size compute_dtype storage_dtype double_quant quant_type block_size quant_zero quant_scale
    layer_configs skip_modules backend_options"""


def test_documented_names() -> None:
    assert sorted(quantization_wrapper.__all__) == sorted(NAMES.split())
    assert {
        "BNB_NF4", "BNB_INT8", "HQQ", "HQQ_4BIT", "MLX_INT4", "MLX_INT8",
        "QUANTO_INT2", "QUANTO_INT4", "QUANTO_INT8", "NONE",
    } == set(M.__members__)  # fmt: skip
    assert [item.name for item in fields(QuantizationConfig)] == FIELDS.split()


def test_defaults() -> None:
    config = QuantizationConfig()
    assert (config.method, config.bits, config.group_size, config.block_size) == (M.BNB_NF4, 4, 64, 64)
    assert (config.double_quant, config.quant_type) == (True, "nf4")
    assert (config.quant_zero, config.quant_scale) == (True, False)
    assert (config.skip_modules, config.layer_configs, config.backend_options) == (["lm_head"], {}, {})
    methods = (M.BNB_INT8, M.HQQ, M.QUANTO_INT2, M.NONE)
    assert [QuantizationConfig(method=method).bits for method in methods] == [8, 4, 2, 16]
    assert [QuantizationConfig(bits=bits).bits for bits in (2, 4, 8, 16)] == [2, 4, 8, 16]
    assert [QuantizationConfig(method=M.HQQ, bits=bits).bits for bits in (1, 3)] == [1, 3]


@pytest.mark.parametrize(
    "wrong",
    [
        {"bits": 3},
        {"method": M.HQQ, "bits": 6},
        {"method": "gptq"},
        {"group_size": 0},
        {"compute_dtype": torch.int8},
        {"layer_configs": {"mlp": {"bit": 4}}},
        {"layer_configs": {"mlp": {"bits": 5}}},
        {"layer_configs": {"mlp": "int4"}},
    ],
)
def test_impossible_values_are_refused_at_once(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        QuantizationConfig(**wrong)


@pytest.mark.parametrize(("kind", "options", "most_error", "most_bits"), REAL, ids=IDS)
def test_layers_are_really_quantized(kind: Any, options: Any, most_error: float, most_bits: float) -> None:
    adapter = kind(QuantizationConfig(**options))
    layer = adapter.create_quantized_linear(128, 256)
    assert isinstance(layer, QuantizedLinear) and isinstance(layer, nn.Module)
    weight = torch.randn(256, 128, generator=torch.Generator().manual_seed(1)) * 0.02
    layer.quantize_weights(weight)
    dense = layer.dequantize_weights(torch.float32)
    assert 0 < relative_error(dense, weight) < most_error
    held = stored_bytes(layer.stored) if isinstance(layer, QuantLinear) else 2 * weight.numel()
    # Two tables of bnb (1,088 bytes) are a matter of small layers only.
    assert (held - 1088 * (options["method"] is M.BNB_NF4)) * 8 / weight.numel() <= most_bits
    x = torch.randn(3, 128, requires_grad=True)
    wanted = nn.functional.linear(x, dense, layer.bias.float())
    assert relative_error(layer(x), wanted) < 1e-5
    with pytest.raises(UserError, match="does not fit"):
        layer.quantize_weights(weight.T)


def test_small_zero_points_and_scales_take_less_room() -> None:
    sizes = []
    for zero, scale in ((False, False), (True, False), (True, True)):
        config = QuantizationConfig(method=M.HQQ, quant_zero=zero, quant_scale=scale)
        sizes.append(stored_bytes(HQQAdapter(config).create_quantized_linear(128, 256).stored))
    assert sizes[0] > sizes[1] > sizes[2]


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16, None])
def test_compute_dtype(dtype: Any) -> None:
    layer = HQQAdapter(QuantizationConfig(method=M.HQQ, compute_dtype=dtype)).create_quantized_linear(64, 64)
    x = torch.randn(4, 64)
    used = torch.float32 if dtype is None else torch.bfloat16
    wanted = nn.functional.linear(x.to(used), layer.dequantize_weights(used), layer.bias.to(used)).float()
    assert layer(x).dtype == torch.float32
    torch.testing.assert_close(layer(x), wanted)


def test_mlx_says_where_to_go() -> None:
    adapter = create_quantization_adapter(
        "mlx", QuantizationConfig(method=M.MLX_INT4), machine=load_machine("apple-m2-max-64gb")
    )
    assert isinstance(adapter, MLXAdapter)
    for call in (
        lambda: adapter.create_quantized_linear(8, 8),
        lambda: adapter.quantize_model(None),
        lambda: adapter.save_quantized_model(None, "x"),
    ):
        with pytest.raises(UserError, match=r"--backend mlx(.|\n)*HQQ"):
            call()
