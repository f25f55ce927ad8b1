"""Folders for MLX: what stays dense is told, the original weights are found, and the name says the bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="the mlx extra is not installed")

from crosstune.cli.main import main
from crosstune.models.tiny import tiny_model as make_tiny
from crosstune.models.weights import read_header


def report_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*words, "--json"]) == 0, capsys.readouterr().err
    return dict(json.loads(capsys.readouterr().out))


def num_quantized(folder: Path) -> int:
    names = [name for path in folder.glob("*.safetensors") for name in read_header(path)[0]]
    return sum(name.endswith(".scales") for name in names)


@pytest.mark.parametrize("command", ["convert", "export"])
def test_layers_that_groups_do_not_divide_are_told(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    words = [command, str(tiny_model), "--to", "mlx", "--n_bits", "8", "--group_size", "128"]
    report = report_of(capsys, *words, "--out", str(tmp_path / "some"))
    [said] = report["warnings"]
    assert "13 of 15 linear layers stay dense: their rows have 64 weights, which groups of 128" in said
    assert num_quantized(tmp_path / "some") == 2
    assert main([*words, "--out", str(tmp_path / "seen")]) == 0
    assert f"warning  {said}" in capsys.readouterr().out


def test_bits_that_reach_no_layer_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    narrow = make_tiny(tmp_path / "narrow", intermediate=64)
    for command in ("convert", "export"):
        words = ["--to", "mlx", "--n_bits", "8", "--group_size", "128", "--out", str(tmp_path / "out")]
        assert main([command, str(narrow), *words]) == 2
        assert "None of the 15 linear layers" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
