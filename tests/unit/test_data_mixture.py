"""Several sources: parsing of --dataset, the fraction of each, and an order that depends on seed and step only."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crosstune.config.load import load_config, make_config
from crosstune.core.errors import UserError
from crosstune.data.batches.epoch_order import Mixture
from crosstune.data.batches.row_order import RowOrder
from crosstune.data.read.dataset_list import DatasetEntry, join_entries, parse_dataset
from crosstune.recipes.sft import SftRecipe
from crosstune.runs.move import pack_files
from crosstune.runs.resume import unpacked_value


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("a.jsonl:0.7,b.jsonl:0.3", [("a.jsonl", 0.7), ("b.jsonl", 0.3)]),
        ("a.jsonl, b.jsonl", [("a.jsonl", None), ("b.jsonl", None)]),
        ("C:\\data\\x.jsonl:0.5,a.jsonl:0.5", [("C:\\data\\x.jsonl", 0.5), ("a.jsonl", 0.5)]),
        ("odd, name:1.jsonl:3,a.jsonl:1", [("odd, name:1.jsonl", 3.0), ("a.jsonl", 1.0)]),
        ("half:0.5:2,a.jsonl:1", [("half:0.5", 2.0), ("a.jsonl", 1.0)]),
    ],
)
def test_sources_and_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, entries: list[Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl", "odd, name:1.jsonl", "half:0.5"):
        (tmp_path / name).touch()
    found = parse_dataset(text)
    assert [(entry.name, entry.weight) for entry in found] == entries
    assert parse_dataset(join_entries(found)) == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a.jsonl:x,b.jsonl:1", "weight of a.jsonl .* cannot be 'x'"),
        ("a.jsonl:0,b.jsonl:1", "cannot be '0'"),
        ("a.jsonl:nan,b.jsonl:1", "cannot be 'nan'"),
        ("a.jsonl:1e308,b.jsonl:1e308", "cannot be '1e308'"),
        ("a.jsonl:1,b.jsonl:1e-300", "cannot be '1e-300'"),
        ("a.jsonl:inf,b.jsonl:1", "cannot be 'inf'"),
        ("a.jsonl:0.5,b.jsonl", "b.jsonl in --dataset has no weight"),
        ("a.jsonl:1,a.jsonl:2", "lists a.jsonl twice"),
    ],
)
def test_lists_that_make_no_sense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "b.jsonl").touch()
    with pytest.raises(UserError, match=words):
        parse_dataset(text)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("dataset: [a.jsonl, b.jsonl]", "a.jsonl,b.jsonl"),
        ("dataset: {a.jsonl: 0.7, b.jsonl: 0.3}", "a.jsonl:0.7,b.jsonl:0.3"),
        ("dataset:\n  - a.jsonl: 0.7\n  - b.jsonl: 1", "a.jsonl:0.7,b.jsonl:1"),
    ],
)
def test_a_file_may_hold_lists(tmp_path: Path, written: str, value: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(written)
    assert load_config(file=path, environment={}).dataset == value


def test_shares_are_exact_and_no_row_repeats_before_all_are_used() -> None:
    mixture = Mixture(sizes=(100, 30, 7), weights=(2, 1, 1))
    assert sum(mixture.counts()) == 137
    assert all(
        abs(count - share * 137) < 1 for count, share in zip(mixture.counts(), mixture.shares, strict=True)
    )
    drawn = [mixture.epoch(number, seed=3) for number in range(6)]
    edges = np.cumsum([0, *mixture.sizes])
    for epoch in drawn:
        assert np.histogram(epoch, bins=edges)[0].tolist() == mixture.counts()
    for source, size in enumerate(mixture.sizes):
        stream = np.concatenate([e[(e >= edges[source]) & (e < edges[source + 1])] for e in drawn])
        for start in range(0, len(stream) - size + 1, size):
            assert len(set(stream[start : start + size].tolist())) == size


def test_an_epoch_depends_on_seed_and_number_alone() -> None:
    mixture = Mixture(sizes=(50, 20), weights=(0.5, 0.5))
    late = mixture.epoch(9, seed=1)
    [mixture.epoch(number, seed=seed) for seed in range(4) for number in range(12)]
    np.testing.assert_array_equal(late, Mixture(sizes=(50, 20), weights=(1, 1)).epoch(9, seed=1))
    assert late.tolist() != mixture.epoch(9, seed=2).tolist() != mixture.epoch(8, seed=2).tolist()


def test_steps_are_those_of_the_mixture() -> None:
    mixture = Mixture(sizes=(60, 20), weights=(1, 3))
    order = RowOrder(num_examples=80, seed=5, rows_per_step=8, num_epochs=2, max_steps=-1, mixture=mixture)
    assert order.num_steps() == 20
    first = [row[0] for step in range(10) for row in order.rows(step)]
    assert sorted(first) == sorted(mixture.epoch(0, seed=5).tolist())
    assert Counter(index >= 60 for index in first) == {True: 60, False: 20}
    assert "mixture" in order.identity()
    plain = RowOrder(num_examples=80, seed=5, rows_per_step=8, num_epochs=2, max_steps=-1)
    assert "mixture" not in plain.identity()


def _write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def two_files(tmp_path: Path) -> tuple[Path, Path]:
    short = [{"prompt": f"one {n}", "completion": f"eins {n}"} for n in range(40)]
    other = [{"messages": [{"role": "user", "content": f"two {n}"}, {"role": "assistant", "content": "zwei"}]} for n in range(20)]  # fmt: skip
    return _write(tmp_path / "a.jsonl", short), _write(tmp_path / "b.jsonl", other)


@pytest.mark.parametrize("packing", [False, True])
def test_a_recipe_mixes_its_sources(tiny_model: Path, two_files: tuple[Path, Path], packing: bool) -> None:
    one, two = two_files
    options = {"skip_eval": True, "packing": packing, "context_length": 256, "batch_size": 2}
    recipe = SftRecipe(make_config(dataset=f"{one}:1,{two}:3", **options), model_folder=tiny_model)
    assert len(recipe.train) == 60
    assert recipe.train.form == "prompt_completion, messages"
    seen = [index for step in range(recipe.num_steps()) for index in recipe.rows(step)]
    assert Counter(index >= 40 for index in seen) == {True: 45, False: 15}
    described = recipe.describe()
    assert [source["rows_per_epoch"] for source in described["sources"]] == [15, 45]
    assert any("75.0% of an epoch" in note for note in described["notes"])
    assert "two 3" in recipe.tokenizer.decode(recipe.train[43].tokens)
    other = SftRecipe(make_config(dataset=f"{one}:2,{two}:3", **options), model_folder=tiny_model)
    assert other.identity() == recipe.identity()
    assert other.order() != recipe.order()
    assert other.describe()["identity"] != described["identity"]


def test_sources_without_weights_are_read_once(tiny_model: Path, two_files: tuple[Path, Path]) -> None:
    recipe = SftRecipe(make_config(dataset=[str(path) for path in two_files]), model_folder=tiny_model)
    seen = [index for step in range(recipe.num_steps()) for index in recipe.rows(step)]
    assert len(set(seen)) == len(seen) == len(recipe.train) == 60 - 4 - 2
    assert recipe.held_out is not None
    assert sum(index >= 40 for index in recipe.held_out.rows()) == 2
    assert "mixture" not in recipe.order()
    limited = make_config(dataset=[str(path) for path in two_files], dataset_samples=5, skip_eval=True)
    assert len(SftRecipe(limited, model_folder=tiny_model).train) == 10


def test_weights_of_evaluation_data_are_refused(tiny_model: Path, two_files: tuple[Path, Path]) -> None:
    one, two = two_files
    config = make_config(dataset=str(one), eval_dataset=f"{one}:1,{two}:2")
    with pytest.raises(UserError, match="eval_dataset does not accept weights"):
        SftRecipe(config, model_folder=tiny_model)


def test_several_sources_move_with_a_run(tmp_path: Path, two_files: tuple[Path, Path]) -> None:
    one, two = two_files
    files, packed_options = pack_files(make_config(dataset=f"{one}:1,{two}:3,commands:2"), with_data=True)
    assert set(files.values()) == {one, two}
    for name, path in files.items():
        target = tmp_path / "run" / "data" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    found = parse_dataset(unpacked_value(tmp_path / "run", packed_options["dataset"]))
    assert [entry.weight for entry in found] == [1, 3, 2]
    assert [Path(entry.name).read_bytes() for entry in found[:2]] == [one.read_bytes(), two.read_bytes()]
    assert found[2] == DatasetEntry(name="commands", weight=2)
