"""Backend files, bundled profiles, and the choices based on them, including attention; without a framework."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from crosstune.backends import _host
from crosstune.core.backend import backend_specs
from crosstune.estimate.machine import BackendReport, Machine, choose_attention, choose_backend
from crosstune.machines import probe
from crosstune.machines.probe import load_machine

ORDER = ["cuda", "rocm", "xpu", "mlx", "mps", "cpu"]


def make_machine(**devices: str) -> Machine:
    """A machine whose named backends are available on the device given."""
    reports = {
        name: BackendReport(
            name=name,
            engine="mlx" if name == "mlx" else "torch",
            available=name in devices,
            reason="" if name in devices else "not here",
            device=devices.get(name, name),
        )
        for name in ORDER
    }
    return Machine(name="m", system="s", processor="p", num_cores=4, memory_total_bytes=1, backends=reports)


HIGH, LOW = "PYTORCH_MPS_HIGH_WATERMARK_RATIO", "PYTORCH_MPS_LOW_WATERMARK_RATIO"


@pytest.mark.parametrize(
    ("given", "high", "low"),
    [
        ({}, "0.7", "0.5"),
        ({HIGH: "0.3"}, None, "0.3"),
        ({HIGH: "0.0"}, None, "0.5"),
        ({LOW: "0.9"}, "0.9", None),
    ],
)
def test_mps_watermarks_stay_in_order_when_the_user_sets_one(
    given: dict[str, str], high: str | None, low: str | None
) -> None:
    missing = backend_specs()["mps"].missing_environment({**given, "HOME": "/"})
    assert (missing.get(HIGH), missing.get(LOW)) == (high, low)
    assert missing["PYTORCH_ENABLE_MPS_FALLBACK"] == "1"
    assert not missing.keys() & given.keys()


@pytest.mark.parametrize(
    ("system", "wanted"),
    [("Linux 6.1 x86_64", {"MLX_MAX_MB_PER_BUFFER": "100"}), ("Darwin 22.6.0 arm64", {}), ("", {})],
)
def test_mlx_cuts_its_buffers_on_linux_alone(system: str, wanted: dict[str, str]) -> None:
    assert backend_specs()["mlx"].missing_environment({}, system=system) == wanted


@pytest.mark.parametrize(
    ("devices", "chosen"),
    [
        ({"cuda": "cuda", "cpu": "cpu"}, "cuda"),
        ({"mlx": "gpu", "mps": "mps", "cpu": "cpu"}, "mlx"),
        ({"mlx": "cpu", "cpu": "cpu"}, "cpu"),
        ({"mlx": "cpu", "mps": "mps", "cpu": "cpu"}, "mps"),
    ],
)
def test_auto_takes_the_first_available_with_a_device_of_its_own(
    devices: dict[str, str], chosen: str
) -> None:
    assert choose_backend(make_machine(**devices), preference=ORDER) == chosen
    assert probe.fastest_backend(make_machine(**devices)) == chosen


@pytest.mark.parametrize("name", probe.bundled_profiles())
def test_profile_covers_every_backend(name: str) -> None:
    machine = probe.load_machine(name)
    assert machine.name == name
    assert list(machine.backends) == ORDER
    assert set(machine.versions.values()) == {"profile"}
    for key, report in machine.backends.items():
        assert report.name == key
        assert report.engine == backend_specs()[key].engine
        assert report.available != bool(report.reason)
        if report.available:
            assert "fp32" in report.dtypes
            assert 0 < report.memory_free_bytes <= report.memory_total_bytes
            assert report.quantizers


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        ("cuda", "a100-80gb"),
        ("mlx", "apple-m1-16gb"),
        ("mps", "apple-m1-16gb"),  # no profile has it as its fastest
        ("cpu", "cpu-laptop"),  # servers and Macs have it too, and come first by name
        ("xpu", None),
    ],
)
def test_the_machine_that_a_move_assumes(backend: str, name: str | None) -> None:
    found = probe.typical_machine(backend)
    assert (found and found.name) == (name and probe.load_machine(name).name)
    assert found is None or backend in found.available()


def test_a_machine_survives_its_json(tmp_path: Path) -> None:
    machine = probe.load_machine("apple-m2-max-64gb")
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(machine.to_json()))
    assert probe.load_machine(str(file)) == machine


@pytest.mark.parametrize(("limit", "used"), [("2000000000", "500000000"), ("max", "0")])
def test_container_limit_counts_when_there_is_one(tmp_path: Path, limit: str, used: str) -> None:
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text(used + "\n")
    total, free = _host.memory_bytes(cgroup=tmp_path)
    if limit == "max":
        assert (total, free > 0) == (_host.memory_bytes(cgroup=tmp_path / "none")[0], True)
    else:
        assert (total, free <= 1_500_000_000) == (2_000_000_000, True)


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
        ("with the package", True, "fp32", False, "sdpa", "flash_attn does not support fp32"),
        ("with the package", True, "bf16", True, "sdpa", "does not separate the documents of packed rows"),
        ("with the package", False, "bf16", False, "eager", "turned off"),
        ("without it", None, "bf16", False, "sdpa", "flash, efficient, math"),
        ("without it", True, "bf16", True, "sdpa", "torch's own"),
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
