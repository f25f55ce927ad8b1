"""Rows to conversations, order of examples, batches: exact at the level of tokens."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crosstune.core.errors import UserError
from crosstune.data.batches.row_order import RowOrder
from crosstune.data.batches.token_batch import IGNORED, Example, pad_rows, split_rows
from crosstune.data.bundled.commands import NUM_HELD_OUT, NUM_TRAIN, make_commands
from crosstune.data.read.formats import recognise, to_conversation
from crosstune.data.render.rendering import encode_conversation, encode_prompt, render
from crosstune.data.tokens.tokenizer import Tokenizer

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


def supervised_texts(example: Example, tokenizer: Tokenizer) -> list[str]:
    """The supervised stretches of an example, decoded."""
    texts: list[list[int]] = []
    previous = False
    for token, marked in zip(example.tokens, example.supervised, strict=True):
        if marked and not previous:
            texts.append([])
        if marked:
            texts[-1].append(int(token))
        previous = bool(marked)
    return [tokenizer.decode(tokens, keep_special=True) for tokens in texts]


def test_exactly_the_answers_and_their_end_tokens_are_supervised(tokenizer: Tokenizer) -> None:
    example = encode_conversation(TURNS, tokenizer, index=0, whole=False)
    assert supervised_texts(example, tokenizer) == [
        f"Eins.{tokenizer.eos_token}",
        f"Zwei. <b>ok</b>{tokenizer.eos_token}",
    ]
    assert tokenizer.decode(example.tokens, keep_special=True) == render(
        TURNS, tokenizer, add_generation_prompt=False
    )


def test_the_plain_template_serves_models_without_one(tokenizer: Tokenizer) -> None:
    from dataclasses import replace

    bare = replace(tokenizer, chat_template=None)
    example = encode_conversation(TURNS, bare, index=0, whole=False)
    assert supervised_texts(example, bare) == [f" Eins.{bare.eos_token}", f" Zwei. <b>ok</b>{bare.eos_token}"]
    prompt = encode_prompt(TURNS[:-1], bare)
    assert example.tokens[: len(prompt)].tolist() == prompt, "what generation sees must be how training began"


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
    assert recognise(row, asked="auto", source="x") == form
    assert to_conversation(row, form) == TURNS[1:3]


def test_alpaca_input_joins_the_instruction() -> None:
    [user, _] = to_conversation({"instruction": "Add.", "input": "1 2", "output": "3"}, "alpaca")
    assert user["content"] == "Add.\n\n1 2"


def test_wrong_columns_are_named() -> None:
    with pytest.raises(UserError, match="question, reply"):
        recognise({"question": "a", "reply": "b"}, asked="auto", source="x")
    with pytest.raises(UserError, match="Missing column completion"):
        to_conversation({"prompt": "a"}, "prompt_completion")


@pytest.mark.parametrize(
    "row",
    [
        {"messages": []},
        {"messages": "hello"},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": ["an", "image"]}]},
    ],
)
def test_conversations_that_are_none_are_refused(row: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        to_conversation(row, "messages")


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


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"Prompt": "a", "Completion": "b"}, "--columns Prompt=prompt,Completion=completion"),
        ({"Question;Answer": "a;b"}, "save the file with commas"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "--columns chosen=completion"),
        ({"a": 1}, "--columns query=prompt,reply=completion"),
    ],
)
def test_columns_that_fit_no_format_are_explained(row: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        recognise(row, asked="auto", source="data.csv")
    assert expected in caught.value.do
