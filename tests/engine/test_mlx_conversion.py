"""Conversions to MLX: layers that stay dense, the original weights, and the names of the results."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="the mlx extra is not installed")

from crosstune.cli.main import main
from crosstune.files.safetensors_header import read_header
from crosstune.models.tiny import tiny_model as make_tiny
from crosstune.results.opened import open_engine


def report_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*words, "--json"]) == 0, capsys.readouterr().err
    return dict(json.loads(capsys.readouterr().out))


def num_quantized(folder: Path) -> int:
    names = [name for path in folder.glob("*.safetensors") for name in read_header(path)[0]]
    return sum(name.endswith(".scales") for name in names)


def test_layers_that_the_group_size_does_not_divide_are_reported(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tiny_model), "--to", "mlx", "--n_bits", "8", "--group_size", "128"]
    [said] = report_of(capsys, "convert", *words, "--out", str(tmp_path / "some"))["warnings"]
    assert "13 of 15 linear layers stay dense: their rows have 64 weights, which groups of 128" in said
    assert num_quantized(tmp_path / "some") == 2
    assert main(["export", *words, "--out", str(tmp_path / "exported")]) == 0
    assert f"warning  {said}" in capsys.readouterr().out


def test_a_group_size_that_divides_no_layer_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    narrow = make_tiny(tmp_path / "narrow", intermediate=64)
    for command in ("convert", "export"):
        words = ["--to", "mlx", "--n_bits", "8", "--group_size", "128", "--out", str(tmp_path / "out")]
        assert main([command, str(narrow), *words]) == 2
        assert "None of the 15 linear layers" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def same_weights(one: Path, other: Path) -> bool:
    first, second = read_arrays_of(one), read_arrays_of(other)
    return first.keys() == second.keys() and all(first[name] == second[name] for name in first)


def read_arrays_of(folder: Path) -> dict[str, bytes]:
    return {
        f"{path.name}/{name}": path.read_bytes()[len(raw) :][slice(*entry["data_offsets"])]
        for path in folder.glob("*.safetensors")
        for header, raw in [read_header(path)]
        for name, entry in header.items()
    }


@pytest.fixture(scope="module")
def two_bits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a model and its 2-bit conversion, whose error is large."""
    folder = tmp_path_factory.mktemp("two_bits")
    plain, two = make_tiny(folder / "plain"), folder / "two"
    assert main(["convert", str(plain), "--to", "mlx", "--n_bits", "2", "--out", str(two)]) == 0
    return plain, two


def test_bits_are_changed_from_the_original_weights(
    two_bits: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, two = two_bits
    direct = report_of(
        capsys, "convert", str(plain), "--to", "mlx", "--n_bits", "8", "--out", str(tmp_path / "direct")
    )
    words = ["convert", str(two), "--to", "mlx", "--n_bits", "8"]
    recorded = report_of(capsys, *words, "--out", str(tmp_path / "recorded"))
    assert (recorded["started_from"], recorded["reference"]) == ("original", str(plain))
    assert same_weights(tmp_path / "direct", tmp_path / "recorded")
    assert recorded["agreement"]["relative"] == pytest.approx(direct["agreement"]["relative"], rel=0.1)
    back = report_of(capsys, "convert", str(two), "--to", "hf", "--out", str(tmp_path / "back"))
    assert back["started_from"] == "original" and same_weights(plain, tmp_path / "back")
    again = json.loads((tmp_path / "recorded" / "crosstune.json").read_text())["converted"]
    assert again["original"]["path"] == str(plain) and again["source_identity"] == direct["source_identity"]

    through = report_of(capsys, *words, "--original", "none", "--out", str(tmp_path / "through"))
    assert (through["started_from"], through["reference"]) == ("dequantized", str(two))
    assert not same_weights(tmp_path / "direct", tmp_path / "through")

    moved = plain.rename(tmp_path / "moved")
    try:
        lost = report_of(capsys, *words, "--out", str(tmp_path / "lost"))
        assert lost["started_from"] == "dequantized"
        assert main([*words, "--original", str(moved), "--out", str(tmp_path / "named")]) == 0
        assert f"mlx -> mlx, from the original weights, compared with {moved}" in capsys.readouterr().out
        assert same_weights(tmp_path / "direct", tmp_path / "named")
    finally:
        moved.rename(plain)


def test_other_weights_are_not_the_original(
    two_bits: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = tmp_path / "two"
    shutil.copytree(two_bits[1], two)
    other, wide = make_tiny(tmp_path / "other", seed=9), make_tiny(tmp_path / "wide", intermediate=256)
    words = ["convert", str(two), "--to", "mlx", "--n_bits", "8", "--out", str(tmp_path / "no")]
    assert main([*words, "--original", str(other)]) == 2
    assert "does not contain the original" in capsys.readouterr().err
    assert main([*words, "--original", str(wide)]) == 2
    assert "(64, 256) there and (64, 128) here" in capsys.readouterr().err
    for name in ("crosstune.json", "SHA256SUMS"):
        (two / name).unlink()
    assert main([*words, "--original", str(other)]) == 2
    assert "(relative) from them" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
    assert main(["convert", str(two), "--to", "mlx", "--n_bits", "2"]) == 2
    assert "already quantized in exactly this way" in capsys.readouterr().err


def test_another_library_is_converted_from_the_original_weights(
    two_bits: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("hqq", reason="the hqq extra is not installed")
    plain, two = two_bits
    report_of(capsys, "convert", str(plain), "--to", "hqq", "--n_bits", "2", "--out", str(tmp_path / "hqq"))
    words = ["convert", str(tmp_path / "hqq"), "--to", "mlx", "--n_bits", "2", "--backend", "cpu"]
    report = report_of(capsys, *words)
    assert report["path"] == str(tmp_path / "hqq-mlx-2bit")
    assert (report["started_from"], report["from"]) == ("original", "hqq")
    assert same_weights(two, tmp_path / "hqq-mlx-2bit")
    through = report_of(capsys, *words, "--original", "none", "--out", str(tmp_path / "through"))
    assert through["started_from"] == "dequantized"
    assert not same_weights(two, tmp_path / "through")


def test_the_folder_name_has_the_bits_and_16_bits_are_dense(
    two_bits: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    plain, two = two_bits
    four = report_of(capsys, "convert", str(plain), "--to", "mlx")
    assert (four["path"], four["n_bits"]) == (f"{plain}-mlx-4bit", 4)
    dense = report_of(capsys, "convert", str(two), "--to", "mlx", "--n_bits", "16")
    assert (dense["path"], dense["n_bits"]) == (f"{two}-mlx", 16)
    assert num_quantized(Path(dense["path"])) == 0
    assert same_weights(plain, Path(dense["path"]))


def test_both_engines_measure_the_same_importance(tiny_model: Path) -> None:
    rows = [[1, 2, 3, 4, 5, 99], [7, 8, 9]]
    ours, theirs = (
        open_engine(name).input_squares(tiny_model, rows, show=lambda done, total: None)
        for name in ("mlx", "torch")
    )
    assert ours.keys() == theirs.keys() and len(ours) == 15
    for name, values in ours.items():
        np.testing.assert_allclose(values, theirs[name], rtol=1e-4, atol=1e-7)
