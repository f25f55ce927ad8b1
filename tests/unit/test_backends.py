"""Backend files, bundled profiles, and the choices made from them: no framework needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from crosstune.backends import _host
from crosstune.core.backend import backend_specs
from crosstune.core.errors import UserError
from crosstune.estimate.machine import BackendReport, Machine, auto_order, auto_reason, choose_backend
from crosstune.machines import probe

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
        ({HIGH: "0.0"}, None, "0.5"),  # no limit at all
        ({LOW: "0.9"}, "0.9", None),
        ({HIGH: "0.3", LOW: "0.9"}, None, None),  # the user's own words stay, wrong or not
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


def test_auto_says_why_and_in_which_order() -> None:
    machine = make_machine(mlx="cpu", cpu="cpu")
    assert auto_order(machine, preference=ORDER) == ["cpu", "mlx"]
    assert (
        auto_reason(machine, preference=ORDER)
        == "mlx would compute on the CPU of this machine, where cpu is faster"
    )
    assert auto_order(make_machine(mlx="gpu", mps="mps", cpu="cpu"), preference=ORDER) == [
        "mlx",
        "mps",
        "cpu",
    ]
    assert "before cpu" in auto_reason(make_machine(cuda="cuda", cpu="cpu"), preference=ORDER)
    assert "only" in auto_reason(make_machine(cpu="cpu"), preference=ORDER)


def test_no_backend_at_all_says_why_for_each() -> None:
    with pytest.raises(UserError, match="mps: not here") as caught:
        choose_backend(make_machine(), preference=ORDER)
    assert "pip install 'crosstune[torch]'" in str(caught.value)


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
    ("name", "backend", "mps_dtypes"),
    [
        ("apple-m1-16gb", "mlx", ("fp32", "fp16")),
        ("apple-m2-max-64gb", "mlx", ("fp32", "fp16", "bf16")),
        ("rtx-4090", "cuda", ()),
        ("cpu-laptop", "cpu", ()),
    ],
)
def test_profile_facts(name: str, backend: str, mps_dtypes: tuple[str, ...]) -> None:
    machine = probe.load_machine(name)
    assert probe.fastest_backend(machine) == backend
    assert machine.backends["mps"].dtypes == mps_dtypes
    assert machine.backends["mps"].collectives == ()


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


def test_unknown_machine_names_near_profiles_and_the_list() -> None:
    with pytest.raises(UserError) as caught:
        probe.load_machine("rtx-4900")
    text = str(caught.value)
    assert "Unknown machine 'rtx-4900'" in text
    assert "did you mean rtx-4090" in text
    assert "crosstune plan --machine list" in text and "apple-m1-16gb" not in text


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("h200", ["--backend cuda --train_type lora"]),
        ("rtx-4090", ["--backend cuda --train_type qlora --quantization_backend bnb"]),
        ("apple-m1-16gb", ["--backend mlx --train_type qlora", "--backend mps --train_type lora"]),
        (
            "cpu-laptop",
            [
                "  crosstune train --backend cpu",
                "OMP_NUM_THREADS=8 MKL_NUM_THREADS=8 crosstune train --backend cpu",
            ],
        ),
    ],
)
def test_advice_follows_the_hardware(name: str, wanted: list[str]) -> None:
    lines = probe.recommend(probe.load_machine(name))
    for part in wanted:
        assert any(part in line for line in lines), (part, lines)
    assert all(line.endswith((":", ".")) or line.startswith("  ") for line in lines)


def test_advice_for_a_bare_machine_is_to_install() -> None:
    assert any("pip install" in line for line in probe.recommend(make_machine()))


@pytest.mark.parametrize(("limit", "used"), [("2000000000", "500000000"), ("max", "0")])
def test_container_limit_counts_when_there_is_one(tmp_path: Path, limit: str, used: str) -> None:
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text(used + "\n")
    total, free = _host.memory_bytes(cgroup=tmp_path)
    if limit == "max":
        assert (total, free > 0) == (_host.memory_bytes(cgroup=tmp_path / "none")[0], True)
    else:
        assert (total, free <= 1_500_000_000) == (2_000_000_000, True)
