"""Folders for MLX: what stays dense is told, the original weights are found, and the name says the bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="the mlx extra is not installed")

from crosstune.cli.main import main
from crosstune.files.safetensors_header import read_header
from crosstune.models.tiny import tiny_model as make_tiny


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
    """A model, and the same in so few bits that the loss shows."""
    folder = tmp_path_factory.mktemp("bits")
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
    assert recorded["before"]["weights"] > 0.2
    again = json.loads((tmp_path / "recorded" / "crosstune.json").read_text())["converted"]
    assert again["original"]["path"] == str(plain) and again["source_identity"] == direct["source_identity"]

    through = report_of(capsys, *words, "--original", "none", "--out", str(tmp_path / "through"))
    assert (through["started_from"], through["reference"]) == ("dequantized", str(two))
    assert not same_weights(tmp_path / "direct", tmp_path / "through")

    moved = plain.rename(tmp_path / "moved")
    lost = report_of(capsys, *words, "--out", str(tmp_path / "lost"))
    assert lost["started_from"] == "dequantized"
    named = report_of(capsys, *words, "--original", str(moved), "--out", str(tmp_path / "named"))
    assert (named["started_from"], named["reference"]) == ("original", str(moved))
    assert same_weights(tmp_path / "direct", tmp_path / "named")
    assert main([*words, "--original", str(moved), "--out", str(tmp_path / "seen")]) == 0
    assert f"mlx -> mlx, from the original weights, compared with {moved}" in capsys.readouterr().out
    moved.rename(plain)


def test_plain_weights_are_the_original_ones_where_they_are_found(
    two_bits: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, two = two_bits
    report = report_of(capsys, "convert", str(two), "--to", "hf", "--out", str(tmp_path / "back"))
    assert report["started_from"] == "original"
    assert same_weights(plain, tmp_path / "back")


def test_other_weights_are_not_the_original(
    two_bits: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = Path(shutil.copytree(two_bits[1], tmp_path / "two"))
    other, wide = make_tiny(tmp_path / "other", seed=9), make_tiny(tmp_path / "wide", intermediate=256)
    words = ["convert", str(two), "--to", "mlx", "--n_bits", "8", "--out", str(tmp_path / "no")]
    assert main([*words, "--original", str(other)]) == 2
    assert "the record names weights" in capsys.readouterr().err
    assert main([*words, "--original", str(wide)]) == 2
    assert "(64, 256) there and (64, 128) here" in capsys.readouterr().err
    for name in ("crosstune.json", "SHA256SUMS"):
        (two / name).unlink()
    assert main([*words, "--original", str(other)]) == 2
    assert "(relative) from them" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
    assert main(["convert", str(two), "--to", "mlx", "--n_bits", "2"]) == 2
    assert "already quantized in exactly this way" in capsys.readouterr().err


def test_the_bits_of_another_library_give_way_to_the_original_weights(
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


@pytest.mark.parametrize("source", [0, 1], ids=["plain", "two"])
def test_the_name_says_the_bits_and_sixteen_are_dense(
    two_bits: tuple[Path, Path], capsys: pytest.CaptureFixture[str], source: int
) -> None:
    folder = str(two_bits[source])
    words = ["convert", folder, "--to", "mlx"]
    four = report_of(capsys, *words)
    assert four["path"] == f"{folder}-mlx-4bit" and four["n_bits"] == 4
    dense = report_of(capsys, *words, "--n_bits", "16")
    assert dense["path"] == f"{folder}-mlx" and dense["n_bits"] == 16
    assert num_quantized(Path(dense["path"])) == 0
    assert same_weights(two_bits[0], Path(dense["path"]))


def test_options_that_the_form_has_no_use_for_are_said(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mlx"
    words = ["--n_bits", "8", "--group_size", "32", "--quant_type", "nf4", "--out", str(out)]
    assert main(["convert", str(tiny_model), "--to", "mlx", *words, "--double_quant", "true"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert [line.split()[1] for line in said] == ["--quant_type", "--double_quant"]
    assert main(["convert", str(out), "--to", "hf", "--n_bits", "4", "--out", str(tmp_path / "plain")]) == 0
    assert "--n_bits has no effect with --to hf" in capsys.readouterr().out
