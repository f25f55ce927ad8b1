"""Data that several comparisons train on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import chat


@pytest.fixture(scope="session")
def data_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of very different lengths, so that a mean of means is far from the mean over tokens."""
    from test_peft_parity import ANSWERS, QUESTIONS

    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows = [chat(*pair) for pair in zip(QUESTIONS, ANSWERS, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
