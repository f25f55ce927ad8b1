"""Rows in memory become an equivalent file."""

from __future__ import annotations

import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.data.read.in_memory import write_in_memory
from crosstune.data.read.sources import open_source
from crosstune.files.json_files import read_jsonl
from crosstune.recipes.sft import SftRecipe

ROWS: list[dict[str, Any]] = [{"prompt": f"ä {n}", "completion": [n, None, 0.5]} for n in range(5)]


def write(data: object, cache: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CROSSTUNE_CACHE", str(cache))
        return write_in_memory(data, option="dataset")


def test_the_rows_are_those_of_a_file(tmp_path: Path, write_jsonl: Any) -> None:
    written, file = write(ROWS, tmp_path), write_jsonl(ROWS)
    assert read_jsonl(written) == ROWS
    assert open_source(str(written)).digest() == open_source(str(file)).digest()


def test_the_name_is_that_of_the_contents(tmp_path: Path) -> None:
    first = write(ROWS, tmp_path)
    before = first.read_bytes()
    assert write(tuple(MappingProxyType(row) for row in ROWS), tmp_path) == first
    assert first.read_bytes() == before
    assert write(ROWS[::-1], tmp_path) != first
    assert sorted(path.name for path in first.parent.iterdir() if path.name.startswith(".")) == []


def test_splits_are_the_files_of_a_folder(tmp_path: Path) -> None:
    folder = write({"train": ROWS, "test": ROWS[:1]}, tmp_path)
    source = open_source(str(folder))
    assert [found.row for _, found, _ in source.rows()] == ROWS
    assert [found.row for _, found, _ in source.own_held_out().rows()] == ROWS[:1]


@pytest.mark.parametrize("as_splits", [False, True])
def test_the_report_says_that_rows_were_in_memory(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_splits: bool
) -> None:
    monkeypatch.setenv("CROSSTUNE_CACHE", str(tmp_path / "a cache"))
    rows = [{"Query": f"q {n}", "Reply": f"a {n}"} for n in range(5)]
    written = write({"train": rows} if as_splits else rows, tmp_path / "a cache")
    config = make_config(model_name=str(tiny_model), dataset=str(written))
    described = SftRecipe(config, model_folder=tiny_model).describe()
    assert described["dataset"] == "rows in memory"
    place = "rows in memory/train.jsonl" if as_splits else "rows in memory"
    assert described["notes"] == [f"{place}: Query as prompt, Reply as completion; --columns chooses others"]


def test_a_dataset_gives_its_rows(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f"q {n}", "completion": f"a {n}"} for n in range(5)]
    table = datasets.Dataset.from_list(rows)
    assert write(table, tmp_path) == write(rows, tmp_path)
    assert write(table.select([3, 1]), tmp_path) == write([rows[3], rows[1]], tmp_path)
    splits = table.train_test_split(test_size=2, shuffle=False)
    assert write(splits, tmp_path) == write({"train": rows[:3], "test": rows[3:]}, tmp_path)


def test_values_of_other_libraries_are_plain_ones(tmp_path: Path) -> None:
    row = {
        "text": np.str_("x"),
        "score": np.float32(0.5),
        "ids": np.arange(2),
        "day": datetime.date(2024, 5, 1),
    }
    [found] = read_jsonl(write([row], tmp_path))
    assert found == {"text": "x", "score": 0.5, "ids": [0, 1], "day": "2024-05-01"}


class Streamed:
    """As `datasets.IterableDataset`: with columns, and without a length."""

    column_names = ("text",)

    def __iter__(self) -> Any:
        return iter(ROWS)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ((row for row in ROWS), "list(rows)"),
        (Streamed(), "rows.take(1000)"),
        ({"prompt": ["a"], "completion": ["b"]}, "Dataset.from_dict"),
        ([], "has no rows"),
        ([ROWS[0], {1: "a"}], "Row 2 of dataset is not a row"),
        ([{"text": object()}], "a column contains a builtins.object"),
    ],
)
def test_what_is_refused(tmp_path: Path, data: object, words: str) -> None:
    with pytest.raises(UserError) as caught:
        write(data, tmp_path)
    assert words in str(caught.value)
    assert not list((tmp_path / "data").iterdir())
