"""Data that several comparisons train on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import chat

from crosstune.models.tiny import tiny_model as make_tiny


@pytest.fixture(scope="session")
def data_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of very different lengths, so that a mean of means is far from the mean over tokens."""
    from test_peft_parity import ANSWERS, QUESTIONS

    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows = [chat(*pair) for pair in zip(QUESTIONS, ANSWERS, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Models of three layers, by whether the head is tied to the embeddings."""
    home = tmp_path_factory.mktemp("models")
    for tied in (False, True):
        make_tiny(home / str(tied), num_layers=3, tied=tied)
    return {tied: home / str(tied) for tied in (False, True)}
