"""A corpus is the same in memory and on disk; its identity and statistics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.data.read.sources import open_source
from crosstune.data.tokens.corpus import Corpus, open_corpus
from crosstune.data.tokens.store import FileArray
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.recipes.sft import SftRecipe


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


# Several chunks of rows, some of them longer than the context.
LENGTHS = [n // 2 if n % 200 == 0 else n % 20 for n in range(1, 900)]
ROWS = [
    chat(f"Count to {n}", " ".join(map(str, range(length))) + " 日本") for n, length in enumerate(LENGTHS)
]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_folder(tiny_model)


@pytest.fixture
def data(write_jsonl: Any) -> Path:
    path: Path = write_jsonl(ROWS)
    return path


def opened(data: Path, tokenizer: Tokenizer, cache: Path, **options: Any) -> Corpus:
    settings: dict[str, Any] = {
        "asked_format": "auto",
        "whole": False,
        "context_length": 512,
        "truncation": "cut",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CROSSTUNE_CACHE", str(cache))
        return open_corpus(open_source(str(data)), tokenizer, **(settings | options))


def test_in_memory_and_on_disk_are_the_same(data: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    memory = opened(data, tokenizer, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    disk = opened(data, tokenizer, tmp_path / "cache", in_memory_bytes=0)
    assert isinstance(disk.store.tokens, FileArray)
    np.testing.assert_array_equal(disk.num_supervised, [e.supervised[1:].sum() for e in memory])
    assert (memory.identity, memory.stats, len(memory)) == (disk.identity, disk.stats, len(disk))
    for one, other in zip(memory, disk, strict=True):
        assert one.index == other.index
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.supervised, other.supervised)


def test_tokens_on_disk_are_made_once(data: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    seen: list[tuple[int, int, int]] = []

    def opened_again(**options: Any) -> Corpus:
        seen.clear()
        show = lambda *numbers: seen.append(numbers)  # noqa: E731
        return opened(data, tokenizer, tmp_path, in_memory_bytes=0, progress=show, **options)

    first = opened_again()
    assert seen[-1] == (data.stat().st_size, data.stat().st_size, len(ROWS))
    assert opened_again().identity == first.identity
    assert not seen, "the second time nothing is tokenized"
    assert opened_again(context_length=64).identity != first.identity
    assert not seen, "another context needs no other tokens"
    opened_again(whole=True)
    assert seen
    [damaged] = [f for f in (tmp_path / "data").glob("*/store.json") if json.loads(f.read_text())["facts"]][
        :1
    ]
    (damaged.parent / "tokens.bin").write_bytes(b"torn")
    for whole in (False, True):
        opened_again(whole=whole)
    assert not list((tmp_path / "data").glob(f".*.{'[0-9a-f]' * 32}"))


def test_a_staging_folder_left_by_a_kill_is_replaced(
    data: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    key_folder = next(iter(_made(data, tokenizer, tmp_path / "one").iterdir()))
    stale = tmp_path / "two" / "data" / f".{key_folder.name}.{'0' * 32}"
    stale.mkdir(parents=True)
    (stale / "tokens.bin").write_bytes(b"half")
    made = _made(data, tokenizer, tmp_path / "two")
    assert (made / key_folder.name / "tokens.bin").read_bytes() == (key_folder / "tokens.bin").read_bytes()
    assert not stale.exists()


def _made(data: Path, tokenizer: Tokenizer, cache: Path) -> Path:
    opened(data, tokenizer, cache, in_memory_bytes=0)
    folder = cache / "data"
    for lock in folder.glob(".*.lock"):
        lock.unlink()
    return folder


def test_the_identity_follows_what_decides_the_tokens(
    tokenizer: Tokenizer, tmp_path: Path, write_jsonl: Any
) -> None:
    from dataclasses import replace

    rows = ROWS[:20]
    data = write_jsonl(rows, "few.jsonl")
    same = opened(data, tokenizer, tmp_path).identity
    assert opened(write_jsonl(rows, "copy.jsonl"), tokenizer, tmp_path).identity == same
    others = [
        opened(write_jsonl(rows[:-1], "less.jsonl"), tokenizer, tmp_path),
        opened(data, replace(tokenizer, chat_template=None), tmp_path),
        opened(data, replace(tokenizer, digest="other"), tmp_path),
        opened(data, tokenizer, tmp_path, whole=True),
        opened(data, tokenizer, tmp_path, context_length=511),
        opened(data, tokenizer, tmp_path, truncation="drop"),
    ]
    assert len({same, *(corpus.identity for corpus in others)}) == len(others) + 1


def test_what_is_cut_and_left_out_is_counted(write_jsonl: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [chat("one", "eins"), chat("one", "eins"), chat("two", " "), chat("long", "word " * 200)]
    path = write_jsonl(rows)
    cut = opened(path, tokenizer, tmp_path, context_length=64)
    full = opened(path, tokenizer, tmp_path, context_length=4096)
    assert cut.stats["cut_examples"] == cut.stats["duplicates"] == 1
    assert cut.stats["cut_tokens"] == full.stats["tokens"] - cut.stats["tokens"] > 0
    assert cut.store.facts["empty"] == 1
    assert [example.index for example in cut] == [0, 1, 3]
    assert cut.stats["longest"] == len(cut[2].tokens) == 64
    assert cut.num_supervised.tolist() == [int(example.supervised[1:].sum()) for example in cut]
    drop = opened(path, tokenizer, tmp_path, context_length=64, truncation="drop")
    assert (len(drop), drop.stats["dropped_examples"]) == (2, 1)
    with pytest.raises(UserError, match=r"1 of 4 rows .* longer than the context of 64"):
        opened(path, tokenizer, tmp_path, context_length=64, truncation="error")


def test_lengths_by_percentile(data: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    corpus = opened(data, tokenizer, tmp_path, context_length=100_000)
    lengths = sorted(len(example.tokens) for example in corpus)
    assert corpus.stats["length_p50"] == lengths[(len(lengths) + 1) // 2 - 1]
    assert corpus.stats["longest"] == lengths[-1]
    assert corpus.stats["tokens"] == sum(lengths)


def recipe(model: Path, **options: Any) -> SftRecipe:
    return SftRecipe(make_config(model_name=str(model), **options), model_folder=model)


def test_held_out_rows_are_not_trained_on_and_have_their_questions(data: Path, tiny_model: Path) -> None:
    made = recipe(tiny_model, dataset=str(data), context_length=4096, eval_samples=7)
    assert made.held_out is not None
    assert len(made.held_out) == len(made.questions) == 7
    assert len(made.train) == len(ROWS) - 7
    assert not set(made.train.rows().tolist()) & set(made.held_out.rows().tolist())
    for row, question in zip(made.held_out.rows().tolist(), made.questions, strict=True):
        assert question.reference == ROWS[row]["messages"][1]["content"]
    assert (
        made.held_out.rows().tolist()
        == recipe(tiny_model, dataset=str(data), context_length=4096, eval_samples=7).held_out.rows().tolist()
    )  # type: ignore[union-attr]


def test_a_question_of_several_turns_names_their_roles(tiny_model: Path, write_jsonl: Any) -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "I like blue."},
        {"role": "assistant", "content": "Noted."},
        {"role": "user", "content": "Which color?"},
        {"role": "assistant", "content": "Blue."},
    ]
    path = write_jsonl([{"messages": turns}, {"messages": turns[1:3]}] * 8)
    made = recipe(tiny_model, dataset=str(path), context_length=4096, eval_dataset=str(path))
    assert {question.text for question in made.questions} == {
        "system: Be brief.\nuser: I like blue.\nassistant: Noted.\nuser: Which color?",
        "I like blue.",
    }


def ask(question: str, answer: str) -> dict[str, str]:
    return {"prompt": question, "completion": answer}


@pytest.mark.parametrize(
    "rows",
    [
        [ask(f"q{n % 50}", f"a{n % 50}") for n in range(200)],
        [ask(f"q{n // 2}", f"a{n}") for n in range(200)],
        [{"text": f"text {n % 60}"} for n in range(200)],
        [*(ask(f"q{n}", f"a{n}") for n in range(100)), *[ask("same", f"a{n}") for n in range(100)]],
    ],
    ids=["equal rows", "equal prompts", "equal texts", "a frequent prompt"],
)
def test_duplicates_are_on_one_side_of_the_split(
    tiny_model: Path, write_jsonl: Any, rows: list[dict[str, str]]
) -> None:
    path = write_jsonl(rows)
    for seed in range(3):
        made = recipe(tiny_model, dataset=str(path), seed=seed)
        assert made.held_out is not None
        assert 10 <= len(made.held_out) <= 20
        sides = [
            {rows[row].get("prompt", rows[row].get("text")) for row in corpus.rows().tolist()}
            for corpus in (made.train, made.held_out)
        ]
        assert not sides[0] & sides[1]
        counts = made.describe()["rows"]
        assert counts["read"] == sum(counts.values()) - counts["read"] == 200
        old = recipe(tiny_model, dataset=str(path), seed=seed, data_rules=1)
        assert old.held_out is not None
        assert len(old.held_out) == 20


def test_one_prompt_for_all_rows_is_held_out_by_text(tiny_model: Path, write_jsonl: Any) -> None:
    path = write_jsonl([ask("Write a poem.", f"poem {n // 2}") for n in range(100)])
    made = recipe(tiny_model, dataset=str(path))
    assert made.held_out is not None
    assert len(made.held_out) == 10
    assert not set(made.held_out.hashes()) & set(made.train.hashes())


def test_a_split_without_duplicates_does_not_depend_on_the_rules(
    data: Path, tiny_model: Path, write_jsonl: Any
) -> None:
    for others in ("", f",{write_jsonl([ask(f'q{n}', 'a') for n in range(50)], 'others.jsonl')}"):
        dataset = str(data) + others
        made = [
            recipe(tiny_model, dataset=dataset, context_length=4096, data_rules=rules) for rules in (3, 2, 1)
        ]
        assert len({one.identity() for one in made}) == 1
        assert len({one.eval_identity() for one in made} - {None}) == 1


FROM_BEFORE = {
    (1, False): [16, 29, 34, 43, 49, 59, 66, 68, 76, 104, 108, 114],
    (1, True): [16, 29, 34, 43, 49, 59, 67, 69, 77, 109, 115],
    (2, False): [34, 35, 36, 37, 58, 59, 66, 68, 76, 104, 108, 114],
    (2, True): [34, 35, 36, 37, 58, 59, 67, 69, 77, 109, 115],
}  # fmt: skip


def prompts_of(made: SftRecipe, corpus: Any) -> set[str]:
    """The texts before the first supervised token."""
    return {
        made.tokenizer.decode(example.tokens[: int(example.supervised.argmax())].tolist())
        for example in corpus or ()
    }


@pytest.mark.parametrize(
    "others",
    [
        [ask(f"q{n}", f"b{n}") for n in range(100)],
        [ask(f"q{n // 4}", f"b{n}") for n in range(100)],
        [*(ask(f"q{n}", f"b{n}") for n in range(0, 100, 3)), *(ask(f"r{n}", f"b{n}") for n in range(50))],
        [ask(f"q{n // 8}", f"b{n}") for n in range(800)],
    ],
    ids=["the same prompts", "repeated prompts", "some prompts", "many times"],
)
@pytest.mark.parametrize("options", [{}, {"dedup": True, "dataset_samples": 50}, {"eval_fraction": 0.3}])
def test_a_prompt_is_on_one_side_of_the_split_in_all_sources(
    tiny_model: Path, write_jsonl: Any, others: list[dict[str, str]], options: dict[str, Any]
) -> None:
    first = write_jsonl([ask(f"q{n}", f"a{n}") for n in range(100)], "first.jsonl")
    sources = f"{first},{write_jsonl(others, 'second.jsonl')}"
    leaks = 0
    for seed in range(2):
        made = recipe(tiny_model, dataset=sources, seed=seed, **options)
        assert not prompts_of(made, made.train) & prompts_of(made, made.held_out)
        counts = made.describe()["rows"]
        assert counts["read"] == sum(counts.values()) - counts["read"]
        assert 0 < counts["held_out"] <= options.get("eval_fraction", 0.1) * counts["read"]
        old = recipe(tiny_model, dataset=sources, seed=seed, data_rules=2, **options)
        leaks += len(prompts_of(old, old.train) & prompts_of(old, old.held_out))
    assert leaks, "the case does not occur"


def test_a_frequent_prompt_in_one_source_does_not_affect_the_others(
    tiny_model: Path, write_jsonl: Any
) -> None:
    poems = write_jsonl([ask("Write a poem.", f"poem {n // 2}") for n in range(100)], "poems.jsonl")
    chats = write_jsonl([ask(f"q{n // 2}", f"a{n}") for n in range(100)], "chats.jsonl")
    book = chats.with_name("book.txt")
    book.write_text(" ".join(f"word{n}" for n in range(2000)))
    for order in (f"{poems},{chats}", f"{chats},{poems}", f"{book},{chats},{poems}"):
        made = recipe(tiny_model, dataset=order, context_length=256)
        assert len(made.held_out or ()) >= 20
        shared = prompts_of(made, made.train) & prompts_of(made, made.held_out) - {""}
        assert len(shared) == 1 and "poem" in shared.pop()
        assert made.held_out is not None
        assert not set(made.held_out.hashes()) & set(made.train.hashes())


def test_the_split_of_older_runs_does_not_change(tiny_model: Path, write_jsonl: Any) -> None:
    """Rows that were held out before version 3 of the rules; they follow from the seed alone."""
    first = write_jsonl([ask(f"q{n // 2}", f"a{n}") for n in range(60)], "first.jsonl")
    second = write_jsonl([ask(f"q{n}", f"a{n % 20}") for n in range(60)], "second.jsonl")
    found = {}
    for rules in (1, 2):
        for dedup in (False, True):
            options = {"dataset": f"{first},{second}", "data_rules": rules, "dedup": dedup}
            made = recipe(tiny_model, **options, dataset_samples=50)
            assert made.held_out is not None
            found[rules, dedup] = made.held_out.rows().tolist()
    assert found == FROM_BEFORE


def test_what_is_cut_does_not_make_rows_different(
    tiny_model: Path, tokenizer: Tokenizer, write_jsonl: Any, tmp_path: Path
) -> None:
    same = [ask("same", "common start " * 20 + f"tail {n}") for n in range(80)]
    cut = {"truncation": "cut", "context_length": 40}
    for rows in (same, [{"text": row["completion"]} for row in same]):
        path = write_jsonl(rows)
        described = recipe(tiny_model, dataset=str(path), **cut).describe()
        assert described["train"]["duplicates"] == 79
        assert any("nothing is evaluated" in line for line in described["warnings"])
        assert len(recipe(tiny_model, dataset=str(path), dedup=True, **cut).train) == 1
        old = recipe(tiny_model, dataset=str(path), data_rules=2, **cut)
        described = old.describe()
        assert described["train"]["duplicates"] == 71
        assert any(line.startswith("8 held-out examples are also") for line in described["warnings"])
        whole = recipe(tiny_model, dataset=str(path), context_length=4096)
        assert whole.describe()["train"]["duplicates"] == 0
        assert len(whole.held_out or ()) == 8
    # Only the long rows are cut: a short row is the same as itself, in memory and on disk.
    path = write_jsonl(
        [*same, ask("same", "short"), ask("same", "short"), *(ask(f"q{n}", "a") for n in range(30))]
    )
    for in_memory_bytes in (0, 1 << 20):
        corpus = opened(path, tokenizer, tmp_path, in_memory_bytes=in_memory_bytes, **cut)
        assert corpus.stats["duplicates"] == 80
        assert len(np.unique(corpus.hashes())) == 111, "the identity of the data includes what is cut"


def test_dedup_drops_rows_in_all_sources_and_held_out_rows(
    tiny_model: Path, write_jsonl: Any, tmp_path: Path
) -> None:
    first = write_jsonl([ask(f"q{n % 10}", "a") for n in range(15)], "first.jsonl")
    second = write_jsonl([ask(f"q{n}", "a") for n in range(5, 20)], "second.jsonl")
    held_out = write_jsonl([ask("q0", "a"), ask("q19", "a"), ask("q0", "a")], "other.jsonl")
    options = {"dataset": f"{first},{second}", "eval_dataset": str(held_out)}
    made = recipe(tiny_model, **options, dedup=True)
    described = made.describe()
    assert len(made.train) == 18
    assert len(made.held_out or ()) == 2
    assert described["train"]["duplicates"] == 0
    assert described["rows"]["duplicates"] == 12
    assert not any("--dedup" in line for line in described.get("warnings", ()))
    told = recipe(tiny_model, **options).describe()["warnings"]
    assert sum("--dedup" in line for line in told) == 2
    with pytest.raises(UserError, match="is a duplicate"):
        recipe(tiny_model, dataset=str(held_out), eval_dataset=str(held_out), dedup=True)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"eval_fraction": 0.5}, (100, 100)),
        ({"eval_fraction": 0.5, "eval_samples": 30}, (170, 30)),
        ({"eval_fraction": 0.25, "dataset_samples": 90}, (90, 30)),
        ({"eval_fraction": 0.5, "eval_samples": 0}, (200, 0)),
    ],
)
def test_the_fraction_held_out(
    tiny_model: Path, write_jsonl: Any, options: dict[str, Any], sizes: tuple[int, int]
) -> None:
    path = write_jsonl([ask(f"q{n}", "a") for n in range(200)])
    made = recipe(tiny_model, dataset=str(path), **options)
    assert (len(made.train), len(made.held_out or ())) == sizes


def test_a_sample_of_the_data(data: Path, tiny_model: Path) -> None:
    made = recipe(tiny_model, dataset=str(data), dataset_samples=30, context_length=4096)
    assert len(made.train) == 30
    assert made.train.store.facts["rows"] < 100


def test_dummy_rows_fill_the_context(tiny_model: Path) -> None:
    made = recipe(tiny_model, dataset="dummy", dataset_samples=5, context_length=32, batch_size=2)
    assert [
        batch.input_ids.shape for step in range(made.num_steps()) for batch in made.micro_batches(step)
    ] == [(2, 32), (2, 32), (1, 32)]
    assert made.describe()["train"]["supervised_tokens"] == 5 * 31
