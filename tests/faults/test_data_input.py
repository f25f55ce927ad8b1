"""Bad data through the command line: exit code 2, the place of the fault, no traceback; and `crosstune data` itself."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from crosstune.cli.main import main
from crosstune.config.load import make_config
from crosstune.recipes.sft import SftRecipe

GOOD = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi there"}]}


def pairs(number: int) -> list[Any]:
    return [{"prompt": f"question {place}", "completion": f"answer {place}"} for place in range(number)]


def data(model: Path, path: Path | str, *words: str) -> int:
    return main(["data", str(path), "--model_name", str(model), *words])


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"instruction": "a", "output": "b"}, ["line 3", "a file has one format"]),
        ({"messages": [{"role": "assistant", "content": "a"}]}, ["line 3", "out of order"]),
        ({"messages": [{"role": "alien", "content": "a"}]}, ["line 3", "Unknown role 'alien'"]),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, ["line 3", "image"]),
        ({"message": []}, ["line 3", "Missing column messages"]),
    ],
)
def test_a_bad_row_is_named(
    tiny_model: Path, write_jsonl: Any, capsys: pytest.CaptureFixture[str], row: Any, words: list[str]
) -> None:
    path = write_jsonl([GOOD, GOOD, row, GOOD])
    assert data(tiny_model, path) == 2
    answer = capsys.readouterr().err
    for word in [path.name, *words]:
        assert word in answer
    assert "Traceback" not in answer


def test_empty_answers_are_left_out_and_said_unless_all_are(
    tiny_model: Path, write_jsonl: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = {"prompt": "a", "completion": ""}
    assert data(tiny_model, write_jsonl([empty, {"prompt": "a", "completion": "b"}])) == 0
    assert "1 rows have an empty answer" in capsys.readouterr().out
    assert data(tiny_model, write_jsonl([empty, empty])) == 2
    assert "have an empty answer" in capsys.readouterr().err


def test_an_image_column_is_refused(tiny_model: Path, write_jsonl: Any, capsys: Any) -> None:
    assert data(tiny_model, write_jsonl([GOOD | {"image": "photo.png"}])) == 2
    assert "not text: image" in capsys.readouterr().err


def test_a_bad_byte_in_a_table_is_named_by_its_line(tiny_model: Path, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"prompt,completion\n" + "ä,ö\n".encode() * 50 + b"caf\xe9,b\n" + b"a,b\n" * 50)
    assert data(tiny_model, path) == 2
    answer = capsys.readouterr().err
    assert "rows.csv, line 52 is not UTF-8 text" in answer
    assert "0xe9" in answer


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('never') }}", "never"),
        ("{{ messages | nothing }}", "nothing"),
        ("{% for i in range(99) %}{{ 'x' * 99999 }}{% endfor %}", "characters"),
    ],
)
def test_a_template_that_fails_is_named(
    tmp_path: Path, tiny_model: Path, write_jsonl: Any, capsys: Any, template: str, words: str
) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text(template)
    rows = write_jsonl([GOOD])
    assert data(tiny_model, rows, "--chat_template", str(path)) == 2
    answer = capsys.readouterr().err
    assert words in answer
    assert f"{rows}, line 1: The chat template {path}" in answer


def test_the_report_and_marked_examples(tiny_model: Path, write_jsonl: Any, capsys: Any) -> None:
    path = write_jsonl([GOOD] * 30)
    assert data(tiny_model, path, "--packing", "--show", "1", "--context_length", "128") == 0
    answer = capsys.readouterr().out
    assert "assistant\n[[Hi there<|im_end|>]]" in answer
    assert "example 2" not in answer
    for word in ("30 read", "supervised", "packed", "duplicates", "steps", "examples are duplicates"):
        assert word in answer


def test_the_report_as_json(tiny_model: Path, write_jsonl: Any, capsys: Any) -> None:
    assert data(tiny_model, write_jsonl(pairs(12)), "--json", "--show", "2") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["train"]["examples"] == 11
    config = make_config(model_name=str(tiny_model), dataset=report["dataset"])
    assert report["identity"] == SftRecipe(config, model_folder=tiny_model).data.identity(), "as in plan.json"
    assert report["eval"]["examples"] == 1
    assert len(report["shown"]) == 2


def test_escape_sequences_in_data_do_not_reach_the_terminal(
    tiny_model: Path, write_jsonl: Any, capsys: Any
) -> None:
    assert data(tiny_model, write_jsonl([{"prompt": "a", "completion": "\x1b[2Jb"}])) == 0
    answer = capsys.readouterr().out
    assert "\x1b" not in answer
    assert "\\x1b" in answer


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the peak of a process is read from Linux's /proc"
)
def test_a_large_file_needs_little_memory(tmp_path: Path, tiny_model: Path) -> None:
    """Tokenize 1 and then 7 MB from disk to disk in one process: its peak must not grow with the file."""
    line = json.dumps({"text": "the light in the kitchen is on and nobody is there " * 40}) + "\n"
    for megabytes in (1, 7):
        (tmp_path / f"{megabytes}.jsonl").write_text(line * (megabytes * 1_000_000 // len(line)))
    code = """
import re, sys
from pathlib import Path
from crosstune.data.read.sources import open_source
from crosstune.data.tokens.corpus import open_corpus
from crosstune.data.tokens.tokenizer import Tokenizer
model, folder = map(Path, sys.argv[1:])
for name in ("1.jsonl", "7.jsonl"):
    corpus = open_corpus(open_source(str(folder / name)), Tokenizer.from_folder(model), asked_format="auto", whole=False,
        context_length=512, truncation="cut", in_memory_bytes=0)
    assert len(corpus) > 400 and len(corpus[len(corpus) - 1].tokens) == 512, len(corpus)
    # Not getrusage, which starts from the size of the parent process.
    print(int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024)
"""
    command = [sys.executable, "-c", code, str(tiny_model), str(tmp_path)]
    environment = os.environ | {"CROSSTUNE_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=900)
    small, large = map(int, done.stdout.split())
    assert large < 300
    assert large < small + 20, (small, large)


def test_the_report_comes_before_the_errors_and_accounts_for_every_row(
    tiny_model: Path, tmp_path: Path, capsys: Any
) -> None:
    rows = [*pairs(40), {"prompt": "a", "completion": ""}, {"prompt": "b", "completion": "long " * 300}]
    lines = [json.dumps(row) for row in rows]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines))
    assert data(tiny_model, path, "--context_length", "128") == 2
    told = capsys.readouterr()
    assert "42 read = 37 to train on + 4 held out + 1 empty" in told.out
    assert "example 1" in told.out
    assert "1 of 42 rows" in told.err
    path.write_text("\n".join([*lines[:41], "{", json.dumps({"prompt": "a"}), lines[0]]))
    assert data(tiny_model, path) == 2
    told = capsys.readouterr()
    assert "44 read = 37 to train on + 4 held out + 1 empty + 2 unreadable" in told.out
    assert "rows.jsonl, line 42 is not JSON" in told.err
    assert "rows.jsonl, line 43: Missing column completion" in told.err
    assert data(tiny_model, path, "--skip_bad_rows", "--dedup", "--truncation", "drop") == 0
    told = capsys.readouterr()
    assert "44 read = 36 to train on + 4 held out + 1 empty + 1 duplicate + 2 unreadable" in told.out
    assert "2 rows cannot be read" in told.out


def test_the_middle_of_a_long_example_is_shown_in_the_json_only(
    tiny_model: Path, tmp_path: Path, capsys: Any
) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"Count to {n}.", "completion": " ".join(map(str, range(n)))} for n in range(491, 500)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert data(tiny_model, path, "--context_length", "2048") == 0
    told = capsys.readouterr().out
    assert "example 3" in told and "more characters]" in told and " 260 261 262 " not in told
    assert told.count("Count to") == 3 and told.count("[[0 1 2 ") == 3 and len(told) < 8000
    assert data(tiny_model, path, "--context_length", "2048", "--json") == 0
    assert all(" 260 261 262 " in text for text in json.loads(capsys.readouterr().out)["shown"])


def test_a_long_row_is_named_by_its_file_and_line(tiny_model: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs(5)))
    long = {"prompt": "q", "completion": "word " * 400}
    rows = [
        "",
        json.dumps({"prompt": "a", "completion": ""}),
        "{",
        *map(json.dumps, (*pairs(2), long, *pairs(3))),
    ]
    (tmp_path / "b.jsonl").write_text("\n".join(rows))
    assert data(tiny_model, tmp_path, "--skip_bad_rows", "--context_length", "128", "--dedup") == 2
    assert f"the longest, {tmp_path / 'b.jsonl'}, line 6, has" in capsys.readouterr().err
    (tmp_path / "c.json").write_text(json.dumps([*pairs(1), long]))
    assert data(tiny_model, tmp_path / "c.json", "--context_length", "128") == 2
    assert f"the longest, row 2 of {tmp_path / 'c.json'}, has" in capsys.readouterr().err


def test_all_bad_rows_are_in_the_json(tiny_model: Path, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*pairs(4), *[{"prompt": "a"}] * 14]))
    assert data(tiny_model, path, "--json") == 2
    told = capsys.readouterr()
    assert [row["line"] for row in json.loads(told.out)["bad_rows"]] == list(range(5, 19))
    assert "lines 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 and 3 more" in told.err
    assert "`bad_rows` of --json" in told.err


def test_what_training_rejects_is_not_called_cut(tiny_model: Path, write_jsonl: Any, capsys: Any) -> None:
    path = write_jsonl([{"prompt": f"q{n}", "completion": "word " * (1 + 400 * (n == 5))} for n in range(12)])
    words = ["--context_length", "128", "--eval_samples", "0"]
    assert data(tiny_model, path, *words) == 2
    told = capsys.readouterr().out
    assert (
        "too long    1, by " in told
        and "training stops unless --truncation" in told
        and " cut, by" not in told
    )
    assert data(tiny_model, path, *words, "--truncation", "cut") == 0
    told = capsys.readouterr().out
    assert "0 left out, 1 cut by " in told and "1 of 12 examples are cut, by" in told


@pytest.mark.parametrize("words", [[], ["--dataset_format", "text"]])
def test_the_advice_for_a_text_column_of_another_name_works(
    tiny_model: Path, write_jsonl: Any, capsys: Any, words: list[str]
) -> None:
    path = write_jsonl([{"content": f"Document {n}."} for n in range(12)])
    assert data(tiny_model, path, *words) == 2
    advice = "--columns content=text"
    assert advice in capsys.readouterr().err
    assert data(tiny_model, path, *words, *advice.split()) == 0
    assert "read as text" in capsys.readouterr().out


def test_skipped_rows_are_listed_in_the_run(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    good = [json.dumps(row) for row in pairs(6)]
    path.write_text("\n".join([*good[:3], "[1]", *good[3:], '{"prompt": 1, "completion": "x"}']))
    words = f"train --model_name {tiny_model} --dataset {path} --backend cpu --max_steps 1 --skip_eval --output_dir {tmp_path}"
    assert main([*words.split(), "--name", "stopped"]) == 2
    assert main([*words.split(), "--name", "run", "--skip_bad_rows"]) == 0
    listed = [json.loads(line) for line in (tmp_path / "run/skipped_rows.jsonl").read_text().splitlines()]
    assert [(row["file"], row["line"]) for row in listed] == [(str(path), 4), (str(path), 8)]
    assert "is not a row" in listed[0]["reason"]
    assert "must contain text" in listed[1]["reason"]
    assert main(["data", str(path), "--model_name", str(tiny_model)]) == 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '{"text": "a"}\nno\n{"text": "b"}\n'),
        ("a.json", '[{"text": "a"}, 1, {"text": "b"}]'),
        ("a.csv", "text\na\nno,no\nb\n"),
        ("a.tsv", "text\na\nno\tno\nb\n"),
    ],
)
def test_bad_rows_of_every_kind_of_file_are_skipped(
    tiny_model: Path, tmp_path: Path, capsys: Any, name: str, text: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert data(tiny_model, path, "--skip_bad_rows") == 0
    assert "3 read = 2 to train on + 1 unreadable" in capsys.readouterr().out
    path.write_text(text.replace('"text"', '"other"').replace("text\n", "other\n"))
    assert data(tiny_model, path, "--skip_bad_rows") == 2


@pytest.mark.parametrize(
    "contents",
    [
        json.dumps([{"text": "a"}, {"text": "b"}], indent=1).encode(),
        b"text,other\na,b\n",
        b"{'text': 'a'}\n",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
        gzip.compress(b'{"text": "a"}\n', mtime=0),
        '{"text": "a"}\n'.encode("utf-32"),
        b'"a"\n"b"\n',
    ],
)
def test_a_file_without_a_readable_row_is_not_called_empty(
    contents: bytes, tiny_model: Path, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "bad.jsonl").write_bytes(contents)
    assert data(tiny_model, tmp_path / "bad.jsonl") == 2
    told = capsys.readouterr()
    assert "No row of" in told.err and "the first: " in told.err and "line 1 is not" in told.err
    (tmp_path / "good.jsonl").write_text('{"text": "a"}\n')
    assert data(tiny_model, tmp_path, "--skip_bad_rows") == 0  # the rows of the other file are counted
    assert "1 to train on + " in (out := capsys.readouterr().out) and "unreadable" in out


def test_a_blank_source_is_one_error(capsys: Any) -> None:
    assert main(["data", " "]) == 2
    assert "SOURCE is blank" in (told := capsys.readouterr().err) and "backslash" not in told


@pytest.mark.parametrize("recipe", ["sft", "preference", "judge"])
def test_the_truncation_that_the_user_passed_is_not_advised(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = {"completion": "a"} if recipe == "sft" else {"chosen": "a", "rejected": "b"}
    rows = [{"prompt": f"{'word ' * 90}{n}"} | answers for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        "train",
        "--recipe",
        recipe,
        "--model_name",
        "tiny-random",
        "--dataset",
        str(tmp_path / "rows.jsonl"),
    ]
    words += ["--backend", "cpu", "--context_length", "64", "--output_dir", str(tmp_path / "runs")]
    for asked, ways in (("drop", ["cut"]), ("error", ["cut", "drop"])):
        ways = [way for way in ways if recipe != "judge" or way != "cut"]  # it would cut the verdict
        others = f", or pass --truncation {' or '.join(ways)}" if ways else ""
        assert main([*words, "--truncation", asked]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert re.fullmatch(rf"  do:  raise --context_length to \d+{others}", said), said
