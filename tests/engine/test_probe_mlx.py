"""The MLX probe on this computer, be it a Mac or a Linux processor."""

from __future__ import annotations

import sys

import pytest

from crosstune.core.backend import backend_specs
from crosstune.mlx_engine import probe as probe_module
from crosstune.mlx_engine.probe import probe


def test_missing_mlx_is_reported_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx", None)
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    report = probe(backend_specs()["mlx"])
    assert (report.available, report.reason) == (False, "mlx is not installed")


def test_mlx_works_and_is_described() -> None:
    mx = pytest.importorskip("mlx.core", reason="mlx is an extra: pip install 'mlx[cpu]'")
    report = probe(backend_specs()["mlx"], quantizers=("bnb", "mlx"))
    assert report.available and report.engine == "mlx"
    assert report.device == ("gpu" if mx.default_device().type == mx.DeviceType.gpu else "cpu")
    assert report.dtypes == ("fp32", "fp16", "bf16")
    assert report.quantizers == {"mlx": (2, 3, 4, 5, 6, 8)}
    assert "ring" in report.collectives
    assert report.attention == ("sdpa",)
    assert 0 < report.memory_free_bytes <= report.memory_total_bytes
    assert report.bf16_speedup > 0


def test_bits_that_compute_nonsense_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlx.core", reason="mlx is an extra: pip install 'mlx[cpu]'")
    monkeypatch.setitem(probe_module._QUANTIZED_TOLERANCE, 2, 1e-6)
    report = probe(backend_specs()["mlx"], quantizers=("mlx",))
    assert report.quantizers == {"mlx": (3, 4, 5, 6, 8)}
    assert any(note.startswith("2-bit mlx does not run: a small matmul is off by") for note in report.notes)
