"""What benchmarks/latent_text.py takes over from an earlier call: pairs that would be the same, and no damaged notes."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from latent_encoders import WORDS, write_encoder

from crosstune.recipes.latent_diffusion.texts import EDITION, add_made_texts

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tiny benchmark, which `main` would make of --tiny --prepare."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    (tmp_path / "carry").mkdir()
    (tmp_path / "out").mkdir()
    write_encoder(tmp_path / "carry" / "encoder")
    texts = [f"{' '.join(words)}\n" for words in itertools.permutations(WORDS[4:9], 4)]
    (tmp_path / "carry" / "texts.txt").write_text("".join(texts))
    own = argparse.Namespace(
        carry=tmp_path / "carry", out=tmp_path / "out", work=tmp_path / "work", tiny=True, prepare=True
    )
    for name, value in {"budget_s": 60.0, "decode_s": 1.0, "max_texts": -1, "crops": 1, "mixes": 1}.items():
        setattr(own, name, value)
    own.set = [["backend", '"cpu"']]
    return importlib.import_module("latent_text").Bench(own)


def test_what_is_taken_over(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = bench.own.work / "prepared.json"
    assert bench.prepare() > 0
    assert "took over" not in capsys.readouterr().out
    bench.prepare()
    assert "took over the pairs" in capsys.readouterr().out

    whole = notes.read_text()
    notes.write_text(whole[: len(whole) // 2])  # as a full disk or a kill may leave it
    assert bench.prepare() > 0
    said = capsys.readouterr().out
    assert f"nothing is taken over from {notes}: it is not JSON" in said and "took over" not in said
    assert json.loads(notes.read_text())["request"] == json.loads(whole)["request"]

    monkeypatch.setattr(sys.modules[add_made_texts.__module__], "EDITION", EDITION + 1)
    bench.prepare()
    assert "took over" not in capsys.readouterr().out, "pairs of other code are made again"


def test_notes_are_replaced_as_a_whole(bench: Any) -> None:
    """While they are written, the old ones are there."""
    bench.own.work.mkdir()
    bench._keep({"request": "old"})
    folders = (bench.own.work, bench.own.out)
    before = [(folder / "prepared.json").stat().st_ino for folder in folders]
    bench._keep({"request": "new"})
    for folder, number in zip(folders, before, strict=True):
        assert json.loads((folder / "prepared.json").read_text()) == {"request": "new"}
        assert (folder / "prepared.json").stat().st_ino != number, "another file was renamed over it"
        assert [path.name for path in folder.iterdir()] == ["prepared.json"]
