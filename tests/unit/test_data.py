"""Rows to conversations, order of examples, batches, packed rows: exact at the level of tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crosstune.config.load import make_config
from crosstune.data.batches import packing
from crosstune.data.batches.packing import PackedOrder, pack
from crosstune.data.batches.row_order import RowOrder
from crosstune.data.batches.token_batch import (
    IGNORED,
    Example,
    TokenBatch,
    pack_rows,
    pad_rows,
    split_rows,
    without_padding,
)
from crosstune.data.named_datasets import NUM_HELD_OUT, NUM_TRAIN, make_commands
from crosstune.data.read.formats import detect_format, to_conversation
from crosstune.data.render.rendering import encode_conversation, encode_prompt
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.recipes.sft import SftRecipe

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Eins."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "Zwei. <b>ok</b>"},
]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_folder(tiny_model)


def test_train_on_prompt_supervises_everything(tokenizer: Tokenizer) -> None:
    assert encode_conversation(TURNS, tokenizer, index=0, whole=True).supervised.all()


def test_a_prompt_is_the_beginning_of_its_conversation(tokenizer: Tokenizer) -> None:
    prompt = encode_prompt(TURNS[:-1], tokenizer)
    whole = encode_conversation(TURNS, tokenizer, index=0, whole=False).tokens
    assert whole[: len(prompt)].tolist() == prompt


@pytest.mark.parametrize(
    ("row", "form"),
    [
        ({"messages": TURNS[1:3]}, "messages"),
        (
            {"conversations": [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "Eins."}]},
            "sharegpt",
        ),
        ({"instruction": "One?", "output": "Eins."}, "alpaca"),
        ({"prompt": "One?", "completion": "Eins."}, "prompt_completion"),
    ],
)
def test_formats_are_recognised_by_their_columns(row: dict[str, Any], form: str) -> None:
    assert detect_format(row, asked="auto", source="x") == form
    assert to_conversation(row, form) == TURNS[1:3]


def test_the_bundled_data_holds_out_pairs_that_training_never_shows() -> None:
    train, test = make_commands("train"), make_commands("test")
    assert (len(train), len(test)) == (NUM_TRAIN, NUM_HELD_OUT)
    assert make_commands("train") == train

    def pairs(rows: list[dict[str, Any]]) -> set[tuple[str, str]]:
        import json

        answers = [json.loads(row["messages"][1]["content"]) for row in rows]
        return {(answer["device"], answer["room"]) for answer in answers}

    assert not pairs(train) & pairs(test)


def order(num_examples: int, per_step: int, *, num_epochs: float, max_steps: int = -1) -> RowOrder:
    return RowOrder(
        num_examples=num_examples, rows_per_step=per_step, num_epochs=num_epochs, max_steps=max_steps, seed=1
    )


def all_rows(order: RowOrder) -> list[list[list[int]]]:
    return [order.rows(step) for step in range(order.num_steps())]


def test_order_covers_each_epoch_once_and_depends_on_position_alone() -> None:
    by_four, by_five = (
        [index for step in all_rows(order(10, size, num_epochs=2.5)) for [index] in step] for size in (4, 5)
    )
    assert by_four == by_five
    assert len(by_four) == 25
    assert sorted(by_four[:10]) == sorted(by_four[10:20]) == list(range(10))
    assert by_four[:10] != by_four[10:20]


def test_steps_follow_from_epochs_or_max_steps() -> None:
    cases = {(1, -1): 3, (2.5, -1): 7, (0, 50): 50, (1, 2): 2}
    for (num_epochs, max_steps), expected in cases.items():
        assert order(10, 4, num_epochs=num_epochs, max_steps=max_steps).num_steps() == expected


def example(tokens: list[int], supervised: list[int]) -> Example:
    return Example(
        tokens=np.array(tokens, dtype=np.int32), supervised=np.array(supervised, dtype=bool), index=0
    )


def test_targets_are_shifted_and_padding_carries_no_loss() -> None:
    batch = pad_rows([example([5, 6, 7], [0, 0, 1]), example([1, 2, 3, 4], [1, 1, 0, 1])], pad_id=9)
    assert batch.input_ids[0].tolist() == [5, 6, 7, 9, 9, 9, 9, 9]
    assert batch.targets[0].tolist() == [IGNORED, 7] + [IGNORED] * 6
    assert batch.targets[1].tolist() == [2, IGNORED, 4] + [IGNORED] * 5
    assert (batch.num_tokens, batch.weight) == (7, 3)
    assert [
        b.input_ids.shape[0] for b in split_rows([example([1, 2], [1, 1])] * 5, batch_size=2, pad_id=0)
    ] == [2, 2, 1]


@pytest.mark.parametrize("num_epochs", [0.05, 1, 1.3, 2.999])
@pytest.mark.parametrize("num_examples", [1, 8, 10])
def test_no_step_is_empty_whatever_the_epochs(num_examples: int, num_epochs: float) -> None:
    steps = all_rows(order(num_examples, 8, num_epochs=num_epochs))
    assert all(steps)
    assert sum(map(len, steps)) == math.ceil(num_examples * num_epochs)


LENGTHS = np.random.default_rng(3).integers(1, 100, size=1000)


def test_every_document_is_packed_once_and_rows_are_well_filled() -> None:
    packed = pack(np.arange(1000), LENGTHS, capacity=128)
    rows = [packed.row(number) for number in range(len(packed))]
    assert sorted(np.concatenate(rows).tolist()) == list(range(1000))
    assert max(int(LENGTHS[row].sum()) for row in rows) <= 128
    assert LENGTHS.sum() / (len(rows) * 128) > 0.95


def test_first_fit_in_the_order_of_the_stream() -> None:
    packed = pack(np.arange(7), np.array([6, 7, 3, 3, 9, 5, 10]), capacity=10, num_open=2)
    rows = [packed.row(number).tolist() for number in range(len(packed))]
    # 2 fits the first row and 3 the second; 5 needs a new row, so the oldest is completed.
    assert rows == [[1, 3], [0, 2], [4], [6], [5]]


def test_rows_depend_on_seed_and_position_alone() -> None:
    def rows(order: PackedOrder, first: int, last: int) -> list[list[int]]:
        return [row.tolist() for row in order.rows(first, last)]

    order = PackedOrder(LENGTHS, capacity=128, seed=5)
    total = order.num_rows(2.5)
    in_turn = [row for first in range(0, total, 7) for row in rows(order, first, min(first + 7, total))]
    fresh = PackedOrder(LENGTHS, capacity=128, seed=5)
    backwards = [rows(fresh, place, place + 1)[0] for place in reversed(range(total))][::-1]
    assert in_turn == backwards
    assert len(in_turn) == total
    per_epoch = order.num_rows(1)
    assert sorted(d for row in in_turn[:per_epoch] for d in row) == list(range(1000))
    assert in_turn[:10] != rows(PackedOrder(LENGTHS, capacity=128, seed=6), 0, 10)
    assert order.num_rows(1000, at_most=50) == 50


def test_segments_and_positions_start_again_and_no_target_crosses() -> None:
    def document(*tokens: int) -> Example:
        ids = np.array(tokens, dtype=np.int32)
        return Example(tokens=ids, supervised=np.ones(len(ids), dtype=bool), index=0)

    batch = pack_rows([[document(1, 2, 3), document(4, 5)], [document(6)]], pad_id=9)
    assert batch.input_ids[0].tolist() == [1, 2, 3, 4, 5, 9, 9, 9]
    assert batch.targets[0].tolist() == [2, 3, IGNORED, 5, IGNORED, IGNORED, IGNORED, IGNORED]
    assert batch.segments[0].tolist() == [1, 1, 1, 2, 2, 0, 0, 0]
    assert batch.positions[0].tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert batch.targets[1].tolist() == [IGNORED] * 8
    assert (batch.num_tokens, batch.weight) == (6, 3)


def test_a_packed_run_sees_each_example_once_an_epoch(tiny_model: Path, write_jsonl: Any) -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "word " * (n % 9 + 1)},
            ]
        }
        for n in range(40)
    ]
    options: dict[str, Any] = {
        "dataset": str(write_jsonl(rows)),
        "skip_eval": True,
        "context_length": 64,
        "batch_size": 2,
        "num_epochs": 2,
    }
    packed, plain = (
        SftRecipe(make_config(**options, packing=packing), model_folder=tiny_model)
        for packing in (True, False)
    )

    def totals(recipe: SftRecipe) -> tuple[int, int]:
        batches = [batch for step in range(recipe.num_steps()) for batch in recipe.micro_batches(step)]
        return sum(b.num_tokens for b in batches), sum(b.weight for b in batches)

    assert totals(packed) == totals(plain)
    assert packed.num_steps() < plain.num_steps()
    assert packed.longest_row() == 64
    assert packed.describe()["packed_fill"] > 0.8
    steps = SftRecipe(
        make_config(**(options | {"num_epochs": 0}), packing=True, max_steps=9), model_folder=tiny_model
    )
    assert steps.num_steps() == 9
    assert all(batch.input_ids.shape[0] == 2 for batch in steps.micro_batches(8))


def test_a_short_last_step_counts_the_rows_it_had() -> None:
    order = RowOrder(num_examples=7, seed=0, rows_per_step=4, num_epochs=1, max_steps=-1)
    assert order.num_steps() == 2
    assert order.position(1) == {"rows_done": 4, "epoch": 0, "row_in_epoch": 4, "epochs_done": 4 / 7}
    assert order.position(2) == {"rows_done": 7, "epoch": 1, "row_in_epoch": 0, "epochs_done": 1.0}
    longer = replace(order, num_epochs=2)
    assert longer.position(2) == {"rows_done": 8, "epoch": 1, "row_in_epoch": 1, "epochs_done": 8 / 7}


def test_epochs_are_counted_in_packed_rows() -> None:
    packed = PackedOrder(np.array([3, 3, 2, 2, 2]), capacity=4, seed=0)
    order = RowOrder(num_examples=5, seed=0, rows_per_step=1, num_epochs=2, max_steps=-1, packed=packed)
    rows = len(packed.epoch(0))
    assert order.position(1)["epochs_done"] == 1 / rows
    assert order.position(rows)["epochs_done"] == 1 and order.position(order.num_steps())["epochs_done"] == 2


def test_documents_stand_in_one_row_without_padding() -> None:
    rows = [
        [(1, 5), (1, 6), (0, 0), (0, 0)],
        [(1, 7), (2, 8), (2, 9), (0, 0)],
        [(1, 3), (1, 4), (1, 5), (1, 6)],
    ]
    segments, tokens = (np.array([[one[part] for one in row] for row in rows], np.int32) for part in (0, 1))
    positions = np.array([[0, 1, 0, 0], [0, 0, 1, 0], [0, 1, 2, 3]], np.int32)
    batch = TokenBatch(input_ids=tokens, targets=10 * tokens, segments=segments, positions=positions)
    found = without_padding(batch)
    assert batch.has_padding and not found.has_padding
    assert found.input_ids.tolist() == [[5, 6, 7, 8, 9, 3, 4, 5, 6]]
    assert found.targets.tolist() == [[50, 60, 70, 80, 90, 30, 40, 50, 60]]
    assert found.segments.tolist() == [[1, 1, 2, 3, 3, 4, 4, 4, 4]]
    assert found.positions.tolist() == [[0, 1, 0, 0, 1, 0, 1, 2, 3]]


@pytest.mark.parametrize("capacity", [16, 1000])
def test_rows_of_many_epochs_are_counted_once(capacity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.array([3, 9, 4, 12, 7, 5, 2, 8, 11, 6, 6, 10, 13, 3, 5])
    packed = PackedOrder(lengths, capacity=capacity, seed=3)
    counts = [len(packed.epoch(number)) for number in range(40)]
    assert len(set(counts)) > 1 or capacity == 1000
    for num_epochs in (0.3, 1, 7.5, 39.9):
        whole = int(num_epochs)
        expected = sum(counts[:whole]) + round(counts[whole] * (num_epochs - whole))
        assert packed.num_rows(num_epochs) == expected
        assert packed.num_rows(num_epochs, at_most=5) == min(expected, 5)
    flat = [row for number in range(40) for row in map(packed.epoch(number).row, range(counts[number]))]
    found = PackedOrder(lengths, capacity=capacity, seed=3).rows(11, 30)
    assert [row.tolist() for row in found] == [row.tolist() for row in flat[11:30]]
    places = [(number, row) for number in range(40) for row in range(counts[number])]
    assert [packed.place(row) for row in range(len(places))] == places

    calls: list[int] = []
    real = packing.pack
    monkeypatch.setattr(packing, "pack", lambda *args, **more: calls.append(1) or real(*args, **more))
    fresh = PackedOrder(lengths, capacity=capacity, seed=3)
    order = RowOrder(num_examples=15, seed=3, rows_per_step=1, num_epochs=300.5, max_steps=-1, packed=fresh)
    first_calls = order.num_steps() and len(calls)
    for step in range(20):
        order.rows(step)
        order.position(step)
    # A step packs its own epoch, not all epochs again.
    assert first_calls == (301 if capacity == 16 else 0)
    assert len(calls) - first_calls <= 20
