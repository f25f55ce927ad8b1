"""The guides' quantization_wrapper: every documented name, over real quantizers on the processor."""

from __future__ import annotations

import warnings
from dataclasses import fields
from typing import Any

import pytest
from quantization_cases import IDS, REAL, M, relative_error, torch
from torch import nn

import quantization_wrapper
from backend_manager import Backend
from crosstune.core.errors import UserError
from crosstune.machines.probe import load_machine
from crosstune.torch_engine.quantized import QuantLinear
from quantization_wrapper import (
    BitsAndBytesAdapter,
    FallbackAdapter,
    HQQAdapter,
    MLXAdapter,
    QuantizationConfig,
    QuantizedLinear,
    QuantoAdapter,
    create_quantization_adapter,
    get_recommended_config,
    validate_quantization_config,
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
        {"group_size": 0},
        {"compute_dtype": torch.int8},
        {"layer_configs": {"mlp": {"bit": 4}}},
    ],
)
def test_impossible_values_are_refused_at_once(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        QuantizationConfig(**wrong)


@pytest.mark.parametrize(("kind", "options", "max_error", "most_bits"), REAL, ids=IDS)
def test_layers_are_really_quantized(kind: Any, options: Any, max_error: float, most_bits: float) -> None:
    adapter = kind(QuantizationConfig(**options))
    layer = adapter.create_quantized_linear(128, 256)
    assert isinstance(layer, QuantizedLinear) and isinstance(layer, nn.Module)
    weight = torch.randn(256, 128, generator=torch.Generator().manual_seed(1)) * 0.02
    layer.quantize_weights(weight)
    dense = layer.dequantize_weights(torch.float32)
    assert 0 < relative_error(dense, weight) < max_error
    held = 2 * weight.numel()
    if isinstance(layer, QuantLinear):
        held = sum(tensor.nbytes for tensor in layer.stored.tensors().values())
    # Two tables of bnb (1,088 bytes) are a matter of small layers only.
    assert (held - 1088 * (options["method"] is M.BNB_NF4)) * 8 / weight.numel() <= most_bits
    x = torch.randn(3, 128, requires_grad=True)
    wanted = nn.functional.linear(x, dense, layer.bias.float())
    assert relative_error(layer(x), wanted) < 1e-5
    with pytest.raises(UserError, match="does not match"):
        layer.quantize_weights(weight.T)


def test_small_zero_points_and_scales_take_less_room() -> None:
    sizes = []
    for zero, scale in ((False, False), (True, False), (True, True)):
        config = QuantizationConfig(method=M.HQQ, quant_zero=zero, quant_scale=scale)
        stored = HQQAdapter(config).create_quantized_linear(128, 256).stored
        sizes.append(sum(tensor.nbytes for tensor in stored.tensors().values()))
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


# A profile, a backend, a configuration, and its problem.
REFUSED = [
    ("cpu-laptop", "cuda", {}, "not available"),
    ("apple-m1-16gb", "mps", {"method": M.HQQ, "compute_dtype": torch.bfloat16}, "bfloat16 does not work"),
    ("apple-m2-max-64gb", "mps", {"layer_configs": {"mlp": 8}}, "BNB_INT8 with 8 bits does not run on mps"),
    ("cpu-laptop", "cpu", {"method": M.BNB_NF4, "bits": 8}, "use BNB_INT8"),
    ("cpu-laptop", "cpu", {"method": M.BNB_NF4, "block_size": 100}, "block size 100"),
    ("cpu-laptop", "cpu", {"method": M.HQQ, "quant_type": "fp4"}, "--quant_type does not apply"),
]
WITHOUT_EFFECT = [
    ({"method": M.BNB_NF4, "group_size": 128}, "group_size=128 has no effect with BNB_NF4"),
    ({"method": M.HQQ, "storage_dtype": torch.bfloat16}, "storage_dtype"),
    ({"method": M.HQQ, "layer_configs": {"mlp": {"block_size": 32}}}, r"layer_configs\['mlp'\]: block"),
    ({"backend_options": {"fast": True}}, r"backend_options\['fast'\] has no effect"),
]


@pytest.mark.parametrize(("profile", "backend", "options", "said"), REFUSED)
def test_refusals(profile: str, backend: Any, options: dict[str, Any], said: str) -> None:
    config, machine = QuantizationConfig(**options), load_machine(profile)
    with pytest.raises(ValueError, match=said):
        create_quantization_adapter(backend, config, machine=machine, strict=True)
    [problem] = validate_quantization_config(config, backend, machine=machine)
    assert said in problem


@pytest.mark.parametrize(("options", "said"), WITHOUT_EFFECT)
def test_options_without_effect_are_warned_about(options: dict[str, Any], said: str) -> None:
    config, machine = QuantizationConfig(**options), load_machine("cpu-laptop")
    with pytest.warns(UserWarning, match=said):
        create_quantization_adapter("cpu", config, machine=machine)
    assert len(validate_quantization_config(config, "cpu", machine=machine)) == 1


def test_validation_returns_all_problems() -> None:
    config = QuantizationConfig(group_size=32, compute_dtype="bf16", backend_options={"a": 1})
    assert len(validate_quantization_config(config, "mps", machine=load_machine("apple-m1-16gb"))) == 4


@pytest.mark.parametrize(
    ("profile", "backend", "size_b", "memory_gb", "method", "dtype"),
    [
        ("rtx-4090", "cuda", 7, 16, M.BNB_INT8, torch.bfloat16),
        ("apple-m1-16gb", "mps", 13, 16, M.HQQ, torch.float16),
        ("apple-m1-16gb", "mlx", 13, 16, M.MLX_INT4, torch.bfloat16),
        ("cpu-laptop", "cpu", 0.5, 16, M.NONE, torch.float32),
    ],
)
def test_recommendation_uses_the_most_bits_that_fit(
    profile: str, backend: str, size_b: float, memory_gb: float, method: M, dtype: torch.dtype
) -> None:
    machine = load_machine(profile)
    config = get_recommended_config(backend, size_b, memory_gb, machine=machine)
    assert (config.method, config.compute_dtype) == (method, dtype)
    assert validate_quantization_config(config, backend, machine=machine) == []


def test_recommendation_warns_if_nothing_fits() -> None:
    machine = load_machine("cpu-laptop")
    with pytest.warns(UserWarning, match="not expected to train"):
        assert get_recommended_config("cpu", 70, 8, machine=machine).bits == 2
    with pytest.raises(ValueError, match="greater than 0"):
        get_recommended_config("cpu", 0, machine=machine)


@pytest.mark.parametrize(
    ("profile", "backend", "options", "kind", "method"),
    [
        ("rtx-4090", "cuda", {"method": M.BNB_NF4, "block_size": 128}, BitsAndBytesAdapter, M.BNB_NF4),
        ("cpu-laptop", Backend.CPU, {"method": M.HQQ, "bits": 3}, HQQAdapter, M.HQQ),
        ("cpu-laptop", "auto", {"method": M.QUANTO_INT2}, QuantoAdapter, M.QUANTO_INT2),
        ("cpu-laptop", None, {"method": M.NONE}, FallbackAdapter, M.NONE),
        ("apple-m1-16gb", "mps", {"method": M.BNB_NF4, "block_size": 128}, HQQAdapter, M.HQQ),
        ("apple-m1-16gb", "mlx", {"method": M.BNB_INT8}, MLXAdapter, M.MLX_INT8),
        ("apple-m1-16gb", "mlx", {"method": M.QUANTO_INT2}, FallbackAdapter, M.NONE),
        ("cpu-laptop", "cpu", {"method": M.MLX_INT4, "group_size": 128}, BitsAndBytesAdapter, M.BNB_NF4),
    ],
)
def test_the_adapter_is_what_runs_there(
    profile: str, backend: Any, options: dict[str, Any], kind: Any, method: M
) -> None:
    config, machine = QuantizationConfig(**options), load_machine(profile)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adapter = create_quantization_adapter(backend, config, machine=machine)
    assert (type(adapter), adapter.config.method) == (kind, method)
    changed = config.method is not method
    assert len(adapter.adjustments) == len(caught) == changed
    if changed:
        assert f"{method.name} is used instead" in str(caught[0].message)
        with pytest.raises(ValueError, match="does not run"):
            create_quantization_adapter(backend, config, machine=machine, strict=True)
        if method is not M.NONE:
            size = config.block_size if config.method.library == "bnb" else config.group_size
            new = adapter.config
            assert size == (new.block_size if new.method.library == "bnb" else new.group_size)


def test_adapters_check_their_configuration() -> None:
    with pytest.warns(UserWarning, match="block_size=32 has no effect with HQQ"):
        HQQAdapter(QuantizationConfig(method=M.HQQ, block_size=32))
    with pytest.warns(UserWarning, match="layer_configs has no effect"):
        FallbackAdapter(QuantizationConfig(layer_configs={"mlp": 8}))
    with pytest.raises(ValueError, match="use HQQAdapter"):
        BitsAndBytesAdapter(QuantizationConfig(method=M.HQQ))
    with pytest.warns(UserWarning, match="float16 is used instead"):
        adapter = create_quantization_adapter(
            "mps",
            QuantizationConfig(method=M.HQQ, compute_dtype="bf16"),
            machine=load_machine("apple-m1-16gb"),
        )
    assert adapter.config.compute_dtype is torch.float16


@pytest.mark.parametrize(
    ("profile", "backend", "libraries"),
    [
        ("rtx-4090", "cuda", ["bnb", "hqq", "quanto"]),
        ("apple-m1-16gb", "mps", ["quanto"]),
        ("apple-m1-16gb", "mlx", ["mlx"]),
        ("cpu-laptop", "cpu", ["hqq"]),
    ],
)
def test_the_quantization_map_of_the_migration_guide(
    profile: str, backend: str, libraries: list[str]
) -> None:
    for library in libraries:
        method = next(
            method for method in M if (method.library, method.bits) in ((library, 4), (library, None))
        )
        config = QuantizationConfig(method=method)
        create_quantization_adapter(backend, config, machine=load_machine(profile), strict=True)
