"""The choice of a run's attention, made from the kernels that a probe found."""

from __future__ import annotations

import dataclasses

import pytest

from crosstune.estimate.machine import BackendReport, choose_attention
from crosstune.machines.probe import load_machine

KERNELS = {
    "with the package": ("flash", "efficient", "math", "flash_attn"),
    "without it": ("flash", "efficient", "math"),
    "math alone": ("math",),
}


def cuda(kernels: str) -> BackendReport:
    return dataclasses.replace(load_machine("h200").backends["cuda"], attention=KERNELS[kernels])


@pytest.mark.parametrize(
    ("kernels", "flash", "precision", "packing", "chosen", "why"),
    [
        ("with the package", None, "bf16", False, "flash_attn", "the package flash_attn"),
        ("with the package", True, "fp16_autocast", False, "flash_attn", "the package flash_attn"),
        ("with the package", True, "fp32", False, "sdpa", "flash_attn does not support fp32"),
        ("with the package", True, "bf16", True, "sdpa", "does not separate the documents of packed rows"),
        ("with the package", False, "bf16", False, "eager", "turned off"),
        (
            "without it",
            None,
            "bf16",
            False,
            "sdpa",
            "the kernels that ran on this machine: flash, efficient, math",
        ),
        ("without it", True, "bf16", True, "sdpa", "torch's own"),
        ("without it", False, "bf16", False, "eager", "turned off"),
        ("math alone", None, "fp32", False, "sdpa", "the kernels that ran on this machine: math"),
    ],
)
def test_choice(
    kernels: str, flash: bool | None, precision: str, packing: bool, chosen: str, why: str
) -> None:
    found, reason = choose_attention(cuda(kernels), flash=flash, precision=precision, packing=packing)
    assert found == chosen
    assert why in reason


def test_mlx_has_its_own() -> None:
    report = load_machine("apple-m2-max-64gb").backends["mlx"]
    assert choose_attention(report, flash=True, precision="bf16", packing=True)[0] == "mlx"


@pytest.mark.parametrize(
    ("machine", "backend", "has"),
    [
        ("h200", "cuda", True),
        ("cpu-laptop", "cpu", True),
        ("apple-m1-16gb", "mps", False),
        ("apple-m1-16gb", "mlx", True),
    ],
)
def test_flash_attention_is_known_by_its_kernel(machine: str, backend: str, has: bool) -> None:
    report = load_machine(machine).backends[backend]
    assert report.has_flash_attention is has
    assert not dataclasses.replace(report, attention=("math",)).has_flash_attention
