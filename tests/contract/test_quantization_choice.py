"""Which quantizations quantization_wrapper accepts, replaces and recommends on each backend."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from quantization_cases import M, torch

from backend_manager import Backend
from crosstune.machines.probe import load_machine
from quantization_wrapper import (
    BitsAndBytesAdapter,
    FallbackAdapter,
    HQQAdapter,
    MLXAdapter,
    QuantizationConfig,
    QuantoAdapter,
    create_quantization_adapter,
    get_recommended_config,
    validate_quantization_config,
)

# A profile, a backend, a configuration, and its problem.
REFUSED = [
    ("cpu-laptop", "cuda", {}, "not available"),
    ("cpu-laptop", "tpu", {}, "Unknown backend"),
    ("apple-m1-16gb", "mps", {"method": M.HQQ, "compute_dtype": torch.bfloat16}, "bfloat16 does not work"),
    ("apple-m2-max-64gb", "mps", {"layer_configs": {"mlp": 8}}, "BNB_INT8 with 8 bits does not run on mps"),
    ("cpu-laptop", "cpu", {"method": M.BNB_NF4, "bits": 8}, "use BNB_INT8"),
    ("cpu-laptop", "cpu", {"method": M.BNB_NF4, "bits": 2}, "use bits=4"),
    ("cpu-laptop", "cpu", {"method": M.HQQ, "bits": 16}, "use NONE"),
    ("cpu-laptop", "cpu", {"method": M.BNB_NF4, "block_size": 100}, "does not support block size 100"),
    ("cpu-laptop", "cpu", {"method": M.HQQ, "quant_type": "fp4"}, "does not apply to hqq"),
]
WITHOUT_EFFECT = [
    ({"method": M.BNB_NF4, "group_size": 128}, "group_size=128 has no effect with BNB_NF4: block_size"),
    ({"method": M.QUANTO_INT8, "group_size": 128}, "group_size=128 has no effect"),
    ({"method": M.QUANTO_INT4, "quant_scale": True}, "quant_scale=True has no effect"),
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
        ("h200", "cuda", 7, 80, M.NONE, torch.bfloat16),
        ("rtx-4090", "cuda", 13, 16, M.BNB_NF4, torch.bfloat16),
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
