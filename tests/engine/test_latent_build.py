"""`crosstune latents build` with an encoder: skipped and rejected texts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from latents import WORDS, write_encoder

from crosstune.cli.main import main
from crosstune.recipes.latent_diffusion.pair_folder import PairFolder, open_pairs

WITHOUT_TOKENS = "\u200b"
"""A zero-width space: no white space for Python, and nothing for BERT's tokenizer."""


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reads nothing but the tokens of a text."""
    return write_encoder(tmp_path_factory.mktemp("encoders") / "plain", template="$A", as_bert=True)


def build(folder: Path, encoder: Path, texts: list[str], *words: str) -> tuple[int, dict[str, Any]]:
    """Build folder / pairs; return the exit code, and the manifest if there is one."""
    (folder / "texts.txt").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    asked = ["latents", "build", str(folder / "texts.txt"), "--out", str(folder / "pairs")]
    code = main([*asked, "--encoder", str(encoder), "--device", "cpu", *words])
    manifest = folder / "pairs" / "manifest.json"
    return code, json.loads(manifest.read_text()) if manifest.is_file() else {}


def rows_of(pairs: PairFolder, split: str) -> list[bytes]:
    return [row.tobytes() for row in np.asarray(pairs.splits[split].tokens)]


def test_no_made_text_has_the_tokens_of_a_held_out_one(tmp_path: Path, encoder: Path) -> None:
    """A span `cat , sees` is the held-out `cat, sees` to a tokenizer that splits at commas, and `thé` is `the`."""
    short = [f"{a}, {b} {c}" for a, b, c in itertools.permutations(WORDS[4:9], 3)]
    long = [f"{a} , {b} {c} , {d} thé" for a, b, c, d in itertools.permutations(WORDS[4:8], 4)]
    options = ["--validation_share", "0.3", "--max_tokens", "10"]
    for folder in ("more", "plain"):
        (tmp_path / folder).mkdir()
    assert build(tmp_path / "plain", encoder, short + long, *options)[0] == 0
    code, manifest = build(tmp_path / "more", encoder, short + long, *options, "--crops=4", "--mixes=4")
    assert code == 0 and manifest["left_out"]["equal_in_tokens"] > 10
    pairs, plain = open_pairs(tmp_path / "more" / "pairs"), open_pairs(tmp_path / "plain" / "pairs")
    train, held_out = rows_of(pairs, "train"), rows_of(pairs, "validation")
    assert len(train) > 100 and len(held_out) > 10
    assert not {*train} & {*held_out} and len({*train}) == len(train)
    assert pairs.splits["validation"].texts == plain.splits["validation"].texts


def test_what_is_left_out_is_counted(
    tmp_path: Path, encoder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Texts without tokens, empty lines, and texts that the tokenizer does not tell apart."""
    same = ["the cat, a", "thé cat, a", "the cat , a", "the  CÁT ,a"]
    texts = [*same, WITHOUT_TOKENS, "", "a cat sees dogs", WITHOUT_TOKENS * 2, "  "]
    assert build(tmp_path, encoder, texts, "--validation_share=0", "--max_tokens=3")[0] == 2
    assert "the first is row 0, counted from 0, with 4 tokens" in capsys.readouterr().err
    code, manifest = build(tmp_path, encoder, texts, "--validation_share=0")
    assert code == 0 and manifest["splits"]["train"] == 2
    expected = {"equal_in_tokens": 3, "without_tokens": 2, "empty": 2, "duplicates": 0, "too_long": 0}
    assert manifest["left_out"] == expected
    assert "3 equal in tokens" in capsys.readouterr().out
    assert open_pairs(tmp_path / "pairs").splits["train"].texts == ["the cat, a", "a cat sees dogs"]


def test_a_count_that_no_token_reaches(
    tmp_path: Path, encoder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["the cat", "the dogs", "the cat sees"]
    code, _ = build(tmp_path, encoder, texts, "--validation_share=0", "--min_count=4")
    error = capsys.readouterr().err
    assert code == 2 and "--min_count 4 leaves no token" in error and "use --min_count 3" in error
    assert [path.name for path in tmp_path.iterdir()] == ["texts.txt"], "nothing is left behind"
    assert build(tmp_path, encoder, texts, "--validation_share=0", "--min_count=3")[0] == 0
    assert open_pairs(tmp_path / "pairs").vocabulary.decode_batch([[3]]) == ["the"]


@pytest.fixture
def unloadable(tmp_path: Path) -> Path:
    """An encoder whose weights nobody can load: what is refused with it is refused before a text is embedded."""
    folder = write_encoder(tmp_path / "unloadable", as_bert=True)
    (folder / "model.safetensors").write_bytes(b"no weights")
    return folder


@pytest.mark.parametrize(
    ("mine", "out", "why"),
    [
        ("pairs/thesis.txt", "pairs", "contains no pairs"),
        ("pairs", "pairs", "is not a folder"),
        ("file", "file/pairs", "Pairs cannot be written to"),
    ],
)
def test_a_place_that_is_taken_is_refused_before_a_text_is_embedded(
    tmp_path: Path, unloadable: Path, mine: str, out: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / mine).parent.mkdir(exist_ok=True)
    (tmp_path / mine).write_text("mine")
    asked = ["--validation_share=0", f"--out={tmp_path / out}"]
    assert build(tmp_path, unloadable, ["the cat"], *asked)[0] == 2
    assert why in capsys.readouterr().err and (tmp_path / mine).read_text() == "mine"


def test_a_text_of_which_the_encoder_reads_a_part_is_refused_before_one_is_embedded(
    tmp_path: Path, unloadable: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The encoder has 12 positions, and two of them are of special tokens."""
    texts = ["the cat", "the " * 11]
    assert build(tmp_path, unloadable, texts, "--validation_share=0", "--max_tokens=11")[0] == 2
    error = capsys.readouterr().err
    assert "1 texts are longer than the 10 tokens" in error and "--max_tokens 10 --too_long drop" in error
    whole = write_encoder(tmp_path / "whole", as_bert=True)
    code, manifest = build(tmp_path, whole, ["the cat", "the " * 10], "--validation_share=0")
    assert code == 0 and manifest["splits"]["train"] == 2


def test_a_line_that_is_no_text_is_named_instead_of_being_cut(
    tmp_path: Path, encoder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its parts would be texts of their own, and cut within a character."""
    texts = ["the cat", "é" * 2**20]
    assert build(tmp_path, encoder, texts, "--too_long=drop", "--validation_share=0")[0] == 2
    assert "Line 2 of" in (error := capsys.readouterr().err) and "is longer than 1,048,576 bytes" in error


def test_fewer_texts_than_the_vectors_that_are_given(
    tmp_path: Path, unloadable: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "vectors.npy", np.eye(2, 16, dtype=np.float32))
    asked = ["--max_texts=1", f"--vectors={tmp_path / 'vectors.npy'}"]
    assert build(tmp_path, unloadable, ["the cat", "a cat"], "--validation_share=0", *asked)[0] == 2
    assert "--max_texts cannot be combined with --vectors" in capsys.readouterr().err
