"""Decisions of the guides' quantization_wrapper: what runs where, what is recommended, and the messages about the rest."""

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

# A profile, a backend, what is asked, and what must be said about it (nothing: it runs).
TABLE = [
    ("cpu-laptop", "cpu", {"method": M.BNB_NF4}, None),
    ("cpu-laptop", "cpu", {"method": M.HQQ_4BIT, "group_size": 128}, None),
    ("cpu-laptop", "cpu", {"method": M.NONE}, None),
    ("cpu-laptop", "cpu", {"method": M.MLX_INT4}, "MLX_INT4 with 4 bits does not run on cpu"),
    ("cpu-laptop", "cuda", {}, "not available"),
    ("cpu-laptop", "tpu", {}, "Unknown backend"),
    ("rtx-4090", "cuda", {"method": M.BNB_INT8, "bits": 8}, None),
    ("rtx-4090", Backend.CUDA, {"method": M.QUANTO_INT2, "compute_dtype": torch.bfloat16}, None),
    ("apple-m1-16gb", "mps", {"method": M.HQQ_4BIT, "bits": 4, "compute_dtype": torch.float16}, None),
    ("apple-m1-16gb", "mps", {"method": M.HQQ, "compute_dtype": torch.bfloat16}, "bfloat16 does not work"),
    ("apple-m1-16gb", "mps", {"method": M.BNB_NF4}, "does not run on mps"),
    ("apple-m2-max-64gb", "mps", {"method": M.BNB_NF4}, None),
    ("apple-m2-max-64gb", "mps", {"method": M.BNB_INT8}, "does not run on mps"),
    ("apple-m2-max-64gb", "mps", {"layer_configs": {"mlp": 8}}, "layer_configs['mlp']: BNB_INT8"),
    ("apple-m2-max-64gb", "mlx", {"method": M.MLX_INT8}, None),
    ("apple-m2-max-64gb", "mlx", {"method": M.HQQ}, "does not run on mlx"),
    ("cpu-laptop", "cpu", {"method": M.BNB_NF4, "bits": 8}, "use BNB_INT8"),
    ("cpu-laptop", "cpu", {"method": M.BNB_NF4, "bits": 2}, "use bits=4"),
    ("cpu-laptop", "cpu", {"method": M.HQQ, "bits": 16}, "use NONE"),
    ("cpu-laptop", "cpu", {"method": M.BNB_NF4, "block_size": 100}, "no blocks of 100"),
    ("cpu-laptop", "cpu", {"method": M.HQQ, "quant_type": "fp4"}, "no kind fp4"),
    ("cpu-laptop", "cpu", {"method": M.BNB_NF4, "group_size": 128}, "group_size=128 has no effect"),
    ("cpu-laptop", "cpu", {"method": M.QUANTO_INT8, "group_size": 128}, "group_size=128 has no effect"),
    ("cpu-laptop", "cpu", {"method": M.HQQ, "block_size": 128}, "block_size=128 has no effect"),
    ("cpu-laptop", "cpu", {"method": M.QUANTO_INT4, "quant_scale": True}, "quant_scale=True has no effect"),
    ("cpu-laptop", "cpu", {"method": M.HQQ, "storage_dtype": torch.bfloat16}, "storage_dtype"),
    ("cpu-laptop", "cpu", {"method": M.NONE, "storage_dtype": torch.bfloat16}, None),
    ("cpu-laptop", "cpu", {"method": M.HQQ, "group_size": 32, "layer_configs": {"mlp": 16}}, None),
    ("cpu-laptop", "cpu", {"method": M.HQQ, "layer_configs": {"mlp": {"block_size": 32}}}, "layer_configs['mlp']: block"),
    ("cpu-laptop", "cpu", {"backend_options": {"fast": True}}, "backend_options['fast'] has no effect"),
]  # fmt: skip


@pytest.mark.parametrize(("profile", "backend", "options", "said"), TABLE)
def test_validation(profile: str, backend: Any, options: dict[str, Any], said: str | None) -> None:
    problems = validate_quantization_config(
        QuantizationConfig(**options), backend, machine=load_machine(profile)
    )
    assert len(problems) == (0 if said is None else 1), problems
    if said is not None:
        assert said in problems[0]


def test_validation_finds_everything_at_once() -> None:
    config = QuantizationConfig(group_size=32, compute_dtype="bf16", backend_options={"a": 1})
    assert len(validate_quantization_config(config, "mps", machine=load_machine("apple-m1-16gb"))) == 4


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


def test_options_without_effect_are_warned_about_and_mistakes_refused() -> None:
    machine = load_machine("cpu-laptop")
    with pytest.warns(UserWarning, match="group_size=32 has no effect with BNB_NF4: block_size"):
        create_quantization_adapter("cpu", QuantizationConfig(group_size=32), machine=machine)
    with pytest.warns(UserWarning, match="block_size=32 has no effect with HQQ"):
        HQQAdapter(QuantizationConfig(method=M.HQQ, block_size=32))
    with pytest.warns(UserWarning, match="layer_configs has no effect"):
        FallbackAdapter(QuantizationConfig(layer_configs={"mlp": 8}))
    with pytest.raises(ValueError, match="use BNB_INT8"):
        create_quantization_adapter("cpu", QuantizationConfig(bits=8), machine=machine)
    with pytest.raises(ValueError, match="not available"):
        create_quantization_adapter("cuda", machine=machine)
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
    ("profile", "backend", "size_b", "memory_gb", "method"),
    [
        ("rtx-4090", "cuda", 7, 16, M.BNB_INT8),
        ("h200", "cuda", 7, 80, M.NONE),
        ("rtx-4090", "cuda", 13, 16, M.BNB_NF4),
        ("apple-m1-16gb", "mps", 13, 16, M.HQQ),
        ("apple-m1-16gb", "mlx", 13, 16, M.MLX_INT4),
        ("cpu-laptop", "cpu", 0.5, 16, M.NONE),
    ],
)
def test_recommendation_follows_memory(
    profile: str, backend: str, size_b: float, memory_gb: float, method: M
) -> None:
    machine = load_machine(profile)
    config = get_recommended_config(backend, size_b, memory_gb, machine=machine)
    assert config.method is method
    assert validate_quantization_config(config, backend, machine=machine) == []
    types = {("apple-m1-16gb", "mps"): torch.float16, ("cpu-laptop", "cpu"): torch.float32}
    assert config.compute_dtype is types.get((profile, backend), torch.bfloat16)


def test_recommendation_says_when_nothing_fits() -> None:
    with pytest.warns(UserWarning, match="not expected to train"):
        config = get_recommended_config("cpu", 70, 8, machine=load_machine("cpu-laptop"))
    assert config.bits == 2
    with pytest.raises(ValueError):
        get_recommended_config("cpu", 0, machine=load_machine("cpu-laptop"))


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
    """MLX on mps is the other engine's: it is refused there, and its own backend is on the same machine."""
    machine = load_machine(profile)
    for library in libraries:
        method = next(
            method for method in M if (method.library, method.bits) in ((library, 4), (library, None))
        )
        assert validate_quantization_config(QuantizationConfig(method=method), backend, machine=machine) == []
