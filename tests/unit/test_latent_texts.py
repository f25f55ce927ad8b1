"""Texts of latent pairs: splits, crops, mixes, and the rows of tokens."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.recipes.latent_diffusion.build import BuildRequest, build
from crosstune.recipes.latent_diffusion.corpora import make_grammar_texts, write_grammar_tokenizer
from crosstune.recipes.latent_diffusion.pair_folder import open_pairs
from crosstune.recipes.latent_diffusion.texts import (
    EDITION,
    TextSplits,
    WriteOptions,
    add_made_texts,
    choose_rows,
    divide,
    text_key,
)
from crosstune.recipes.latent_diffusion.vocabulary import UNKNOWN, TokenRows, count_tokens, tokenize


def test_no_text_is_in_two_splits() -> None:
    texts = [f"Text {number % 60}" + " " * (number % 3) for number in range(200)]
    divided = divide(texts, validation_share=0.3, max_validation=1000)
    keys = {split: [text_key(texts[row]) for row in rows] for split, rows in divided.splits.items()}
    assert keys["validation"] and keys["train"]
    assert not set(keys["train"]) & set(keys["validation"])
    assert all(len(found) == len(set(found)) for found in keys.values())
    assert divided.left_out["duplicates"] == 140
    again = divide(texts[::-1], validation_share=0.3, max_validation=1000)
    assert {text_key(texts[::-1][row]) for row in again.splits["validation"]} == set(keys["validation"])


def test_a_text_of_both_given_splits_is_held_out() -> None:
    divided = divide(
        ["a b", "c", "A  B"],
        validation_share=0,
        max_validation=0,
        given={"train": [0, 1], "validation": [2]},
    )
    assert divided.splits == {"validation": [2], "train": [1]}


def test_crops_come_from_training_texts_and_are_no_held_out_text() -> None:
    texts = ["one two three four five six", "two three", "seven eight nine ten"]
    divided = TextSplits(splits={"train": [0], "validation": [1, 2]})
    longer = add_made_texts(texts, divided, crops=50)
    added = [longer[row] for row in divided.splits["train"][1:]]
    assert len(added) > 8 and all(text in texts[0] for text in added)
    assert "two three" not in added and len(set(added)) == len(added)


def mixed(seed: int = 0, mixes: int = 30) -> tuple[list[str], TextSplits]:
    """Texts whose words tell where they are from: a0 a1 a2 ..., b0 b1 ..."""
    sizes = {"a": 6, "b": 5, "c": 1, "d": 2, "held": 9}
    texts = [" ".join(f"{name}{n}" for n in range(size)) for name, size in sizes.items()]
    divided = TextSplits(splits={"train": [0, 1, 2, 3], "validation": [4, 5]})
    return add_made_texts([*texts, "a0 a1 b0 b1"], divided, mixes=mixes, seed=seed), divided


def test_mixes_join_spans_of_two_training_texts() -> None:
    texts, divided = mixed()
    made = [texts[row] for row in divided.splits["train"][4:]]
    assert len(made) > 40 and len(set(made)) == len(made) and "a0 a1 b0 b1" not in made
    assert divided.num_given == 6 and texts[6:] == made
    for text in made:
        names, numbers = zip(*((word[0], int(word[1:])) for word in text.split()), strict=True)
        cut = next(n for n in range(len(names)) if names[n] != names[0])
        first, second = numbers[:cut], numbers[cut:]
        assert {*names} < {*"abd"} and len({*names[cut:]}) == 1 and 4 <= len(names) <= 6, text
        for span in (first, second):
            assert len(span) >= 2 and list(span) == list(range(span[0], span[0] + len(span))), text
    assert {text[0] for text in made} == {*"abd"}
    assert mixed()[0] == texts and mixed(seed=1)[0] != texts


def test_there_are_no_mixes_of_one_text() -> None:
    divided = TextSplits(splits={"train": [0, 1], "validation": []})
    assert add_made_texts(["one two three", "four"], divided, mixes=9) == ["one two three", "four"]


def test_many_rows_are_reduced_counted_and_stacked_as_each_of_them(tmp_path: Path) -> None:
    request = BuildRequest(source="grammar", out=tmp_path / "pairs", max_texts=120)
    build(request)
    vocabulary = open_pairs(request.out).vocabulary
    lists = [[4, 9, 4], [], [7, 10**6], [5]]
    rows = TokenRows.from_lists(lists)
    one_by_one = [vocabulary.reduce(TokenRows.from_lists([row])).tolists()[0] for row in lists]
    assert vocabulary.reduce(rows).tolists() == one_by_one and one_by_one[2][1] == UNKNOWN
    assert rows.tolists() == lists and rows.lengths.tolist() == [3, 0, 2, 1] and rows[-1].tolist() == [5]
    some = rows.take(np.array([3, 0, 1, 0]))
    assert some.tolists() == [[5], [4, 9, 4], [], [4, 9, 4]]
    assert count_tokens(rows.take(np.array([0, 3])), min_count=1).tolist() == [4, 5, 9]
    assert count_tokens(rows.take(np.array([0, 3])), min_count=2).tolist() == [4]
    assert rows.take(np.array([0, 1])).stack(width=4).tolist() == [[4, 9, 4, 0], [0, 0, 0, 0]]
    assert TokenRows.from_lists([]).stack(width=4).shape == (0, 4)


def test_the_edition_tells_the_texts_that_are_made(tmp_path: Path) -> None:
    """When this fails for a change that is meant, increase EDITION too: pairs of the old code are then made again."""
    texts = make_grammar_texts(60)
    divided = divide(texts, validation_share=0.2, max_validation=10)
    longer = add_made_texts(texts, divided, crops=2, mixes=2)
    write_grammar_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    tokens = tokenize(tokenizer, longer)
    options = WriteOptions(max_tokens=10, too_long="drop")
    chosen = choose_rows(tokens, divided, tokenizer=tokenizer, options=options)
    found = {split: [longer[row] for row in rows] for split, rows in sorted(chosen.splits.items())}
    digest = hashlib.sha256(json.dumps(found).encode()).hexdigest()
    assert (EDITION, digest[:16]) == (1, "100e3b02845c2edc")
