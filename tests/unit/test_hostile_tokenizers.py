"""Tokenizers that would hang, grow without bound or have settings of wrong types are refused by the name of their file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from crosstune.core.errors import UserError
from crosstune.data.tokens import trials
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.process.limited_child import run_limited


def hostile(tiny_model: Path, folder: Path, **parts: Any) -> Path:
    shutil.copytree(tiny_model, folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))
    return folder


GROW = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10_000}
ONE_SECOND = {"cpu_seconds": 1}
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"normalizer": {"type": "Sequence", "normalizers": [GROW] * 3}}, "tokenizer.json cannot be used"),
        ({"pre_tokenizer": SPLIT | {"pattern": {"Regex": r"(a*)*\d"}}}, "tokenizer.json cannot be used"),
        ({"pre_tokenizer": 5}, "an object or null at pre_tokenizer"),
        ({"added_tokens": [{"content": "x", "id": -1}]}, "at added_tokens"),
        ({"model": {"type": "BPE", "vocab": {"a": 2**31}, "merges": []}}, "a number that is not an integer"),
    ],
)
def test_a_tokenizer_that_would_hang_or_grow_is_refused(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: dict[str, Any], words: str
) -> None:
    monkeypatch.setenv("CROSSTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        trials, "run_limited", lambda *words, **limits: run_limited(*words, **limits | ONE_SECOND)
    )
    folder = hostile(tiny_model, tmp_path / "model", **parts)
    with pytest.raises(UserError, match=words) as caught:
        Tokenizer.from_folder(folder)
    assert str(folder / "tokenizer.json") in str(caught.value)


def test_a_tokenizer_with_its_own_pattern_is_tried_once(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CROSSTUNE_CACHE", str(tmp_path / "cache"))
    pattern = (
        r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    steps = [SPLIT | {"pattern": {"Regex": pattern}}, byte_level]
    folder = hostile(
        tiny_model, tmp_path / "model", pre_tokenizer={"type": "Sequence", "pretokenizers": steps}
    )
    assert Tokenizer.from_folder(folder).encode("Hello there").ids
    [verdict] = (tmp_path / "cache" / "tokenizers").iterdir()
    assert verdict.stat().st_size == 0
    monkeypatch.setattr("crosstune.data.tokens.trials.run_limited", None)  # a second trial would fail
    assert Tokenizer.from_folder(folder).encode("Hello there").ids


def test_a_token_without_an_embedding_is_named(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    with pytest.raises(UserError, match=r"vocab_size in config\.json is 100"):
        Tokenizer.from_folder(folder).encode("Hello there")


@pytest.mark.parametrize(
    ("file", "contents", "words"),
    [
        ("tokenizer_config.json", {"eos_token": 5}, "at eos_token, got 5"),
        ("tokenizer_config.json", {"chat_template": [{"name": "x"}]}, "at chat_template"),
        ("special_tokens_map.json", {"bos_token": {"text": "x"}}, "at bos_token"),
        ("generation_config.json", {"eos_token_id": "x"}, "at eos_token_id"),
    ],
)
def test_settings_of_a_tokenizer_with_wrong_types(
    tiny_model: Path, tmp_path: Path, file: str, contents: dict[str, Any], words: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / file).write_text(json.dumps(contents))
    with pytest.raises(UserError, match=words) as caught:
        Tokenizer.from_folder(folder)
    assert str(folder / file) in str(caught.value)
