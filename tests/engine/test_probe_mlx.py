"""The MLX probe on this computer, a Mac or a Linux CPU."""

from __future__ import annotations

import sys

import pytest

from crosstune.core.backend import backend_specs
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
