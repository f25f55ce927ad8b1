"""Every kind of source gives the same rows; errors give the place of a row that cannot be read."""

from __future__ import annotations

import csv
import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from unprivileged import as_other_user, reachable_folder

from crosstune.core.errors import UserError
from crosstune.data.named_datasets import known_names
from crosstune.data.read import files
from crosstune.data.read.columns import pick_rows, split_by_format
from crosstune.data.read.files import FilePart
from crosstune.data.read.formats import detect_format, to_conversation
from crosstune.data.read.sources import HubPart, Source, check_name, open_source, split_of
from crosstune.files.hub_connection import why_unreachable

ROWS = [
    {"prompt": 'Say "hi", 日本', "completion": "hi\nthere, ünd 🙂"},
    {"prompt": "two", "completion": "zwei"},
    {"prompt": "three", "completion": "drei, vier"},
]


def rows_of(source: Source) -> list[dict[str, Any]]:
    return [found.row for _, found, _ in source.rows()]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    suffix = path.suffix
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    elif suffix == ".json":
        path.write_text(json.dumps(rows, indent=2), encoding="utf-8")
    elif suffix == ".parquet":
        pa = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow: pip install crosstune[data]")
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    else:
        with path.open("w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    return path


@pytest.mark.parametrize("suffix", [suffix for suffix in files.SUFFIXES if suffix != ".txt"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    source = open_source(str(write(tmp_path / f"data{suffix}", ROWS)))
    assert rows_of(source) == ROWS
    uniform = split_by_format(source, asked="auto", columns={})
    picked = [(ROWS[0], "prompt_completion", tmp_path), (ROWS[2], "prompt_completion", tmp_path)]
    assert pick_rows(uniform, [2, 0]) == picked
    assert [done for _, _, done in source.rows()][-1] <= source.size_bytes


def test_a_json_file_may_hold_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines.json"
    path.write_text("\n".join(json.dumps(row) for row in ROWS))
    assert rows_of(open_source(str(path))) == ROWS


def test_a_json_array_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_CHUNK_BYTES", 7)
    rows = [{"text": 'word, [x] {y} " ' * length} for length in (1, 50, 3)]
    for indent in (None, 2):
        path = tmp_path / "array.json"
        path.write_text(json.dumps(rows, indent=indent))
        assert rows_of(open_source(str(path))) == rows


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", '{"text": "a"}\n\n{"text": \n', "a.jsonl, line 3 is not JSON"),
        ("a.jsonl", '{"text": "a"}\n[1]\n', "line 2 is not a row"),
        ("a.json", '[{"text": "a"}, {"text": ]', "row 2 cannot be read"),
        ("a.json", '[{"text": "a"}] x', "follows the array"),
        ("a.json", '[{"text": "a"}', "cannot be read"),
        ("a.csv", "text\nfine\none,two\n", "a.csv, line 3 has 2 fields"),
        ("a.csv", 'text\n"open\n', "a.csv, line 2 cannot be read"),
        ("a.csv", "text,text\na,b\n", "does not list the columns"),
        ("a.parquet", "not parquet at all", "cannot be read as Parquet"),
        ("a.doc", "hello", "not a supported data file"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        rows_of(open_source(str(path)))


def test_bytes_that_are_not_text_are_named(tmp_path: Path) -> None:
    for name, start in (("a.jsonl", b'{"text": "'), ("a.json", b'[{"text": "'), ("a.csv", b"text\n")):
        path = tmp_path / name
        path.write_bytes(start + b"\xff\x81\n")
        with pytest.raises(UserError, match=r"line 1|line 2|UTF-8"):
            rows_of(open_source(str(path)))


TABLE = "prompt,completion\ncafé,naïve\nüber,Größe\n"


@pytest.mark.parametrize(
    ("name", "text", "encoding", "words"),
    [
        ("a.csv", TABLE, "latin-1", "Windows-1252"),
        ("a.csv", TABLE.replace("café", "“CAFÉ»"), "cp1252", "Windows-1252"),
        ("a.csv", TABLE, "utf-16", "UTF-16 text"),
        ("a.csv", TABLE.replace(",", ";"), "utf-8", "semicolons"),
        ("a.csv", '"prompt";"completion"\r\n"café";"naïve"\r\n', "cp1252", "Windows-1252 .* semicolons"),
        ("a.csv", TABLE.replace(",", "\t"), "utf-8-sig", "tabs"),
        ("a.csv", TABLE.replace("über", "a;b"), "utf-8", None),
        ("a.csv", TABLE, "utf-8-sig", None),
        ("a.tsv", TABLE.replace(",", "\t"), "utf-16", "UTF-16 text$"),
        ("a.jsonl", '{"prompt": "café", "completion": "naïve"}\n', "latin-1", "Windows-1252"),
        ("a.jsonl", '{"prompt": "café", "completion": "naïve"}\r\n', "utf-16", "UTF-16"),
        ("a.json", '[{"prompt": "café", "completion": "naïve"}]', "utf-16", "UTF-16"),
        ("a.json", '{"prompt": "café", "completion": "naïve"}', "utf-8", None),
        ("a.json", '{"data": [{"prompt": "café", "completion": "naïve"}]}', "utf-8", '"data" list'),
        ("a.json", '{"version": "1.0", "n": 2,\n "rows": [\n{"prompt": "café", "completion": "naïve"}], "x": [1]}', "utf-8", '"rows" list'),
        ("a.txt", "café naïve", "cp1252", "Windows-1252"),
    ],
)  # fmt: skip
def test_how_a_file_is_written_is_recognised_and_said(
    tmp_path: Path, name: str, text: str, encoding: str, words: str | None
) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode(encoding))
    source = open_source(str(path))
    [part] = source.parts
    assert isinstance(part, FilePart)
    assert re.search(words, part.remark()) if words else not part.remark()
    first = rows_of(source)[0]
    assert list(first.values()) in (["café", "naïve"], ["“CAFÉ»", "naïve"], ["café naïve"])


def test_text_after_wrapped_rows_is_not_json(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"data": [{"text": "a"}]')
    with pytest.raises(UserError, match="is not JSON"):
        rows_of(open_source(str(path)))


def test_a_folder_is_read_in_order_and_its_splits_are_known(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", ROWS[1:2])
    write(tmp_path / "a.csv", ROWS[:1])
    (tmp_path / "validation").mkdir()
    write(tmp_path / "validation" / "x.json", ROWS[2:])
    write(tmp_path / "test.jsonl", ROWS)
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / ".hidden.jsonl").write_text("broken")
    source = open_source(str(tmp_path))
    assert rows_of(source) == ROWS[:2]
    assert rows_of(source.own_held_out()) == ROWS[2:]


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("test-00000-of-00002.parquet", "test"),
        ("validation/part.csv", "validation"),
        ("judge_test.json", "test"),
        ("my-eval-3.csv", "eval"),
        ("train_val.jsonl", "train"),
        ("attest.jsonl", "train"),
        ("my_test_questions.jsonl", "train"),
    ],
)
def test_names_of_files_tell_their_split(path: str, split: str) -> None:
    assert split_of(Path(path)) == split


def test_unknown_names_answer_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="did you mean commands") as caught:
        open_source("comands")
    for name in ("alpaca", "alpaca_sample", "guanaco", "sql", "orca_math", "dummy", "commands"):
        assert name in known_names()
        assert name in str(caught.value)


def test_the_hub_out_of_reach_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the hub switched off, as `datasets` and `huggingface_hub` know it."""
    datasets = pytest.importorskip("datasets", reason="pip install crosstune[data]")
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name in ("no-such-org/no-such-data", "alpaca"):
        with pytest.raises(UserError, match="cannot be fetched from the hub"):
            open_source(name)


@pytest.fixture
def unused_address() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_an_address_that_answers_or_is_behind_a_proxy_is_not_unreachable(
    monkeypatch: pytest.MonkeyPatch, unused_address: str
) -> None:
    monkeypatch.delenv("http_proxy", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert why_unreachable(f"http://127.0.0.1:{server.getsockname()[1]}") is None
    assert why_unreachable(unused_address)
    assert "no-such-host.invalid" in str(why_unreachable("https://no-such-host.invalid"))
    monkeypatch.setenv("http_proxy", "http://proxy.invalid:1")
    monkeypatch.setenv("no_proxy", "")
    assert why_unreachable(unused_address) is None


def test_rows_of_a_hub_data_set() -> None:
    datasets = pytest.importorskip("datasets", reason="pip install crosstune[data]")
    parts = [
        HubPart(repo="a/b", split="train", data=datasets.Dataset.from_list(rows)) for rows in (ROWS, ROWS[:2])
    ]
    assert [found.row for found in parts[0].rows()] == ROWS
    assert parts[0].digest() != parts[1].digest()
    assert parts[0].place(2) == "Row 2 of a/b (train)"


def test_digests_follow_the_contents(tmp_path: Path) -> None:
    one, other = write(tmp_path / "a.jsonl", ROWS), write(tmp_path / "b.jsonl", ROWS)
    assert open_source(str(one)).digest() == open_source(str(other)).digest()
    write(other, ROWS[:2])
    assert open_source(str(one)).digest() != open_source(str(other)).digest()


@pytest.mark.parametrize(
    ("row", "form", "turns"),
    [
        ({"question": "q", "answer": "a"}, "question_answer", ["q", "a"]),
        ({"question": "q", "answer": "a", "context": "c"}, "question_answer", ["c\n\nq", "a"]),
        ({"text": "### Human: q one### Assistant: a### Human: r### Assistant: b"}, "guanaco", ["q one", "a", "r", "b"]),
        ({"messages": '[{"role": "user", "content": "q"}]'}, "messages", ["q"]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}]}, "messages", ["q"]),
    ],
)  # fmt: skip
def test_more_formats(row: dict[str, Any], form: str, turns: list[str]) -> None:
    assert [turn["content"] for turn in to_conversation(row, form)] == turns


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([("wizard", "a")], "Unknown role 'wizard'.*assistant"),
        ([("assistant", "a"), ("user", "b")], "before any question"),
        ([("user", "a"), ("system", "b")], "system is turn 2.*do: .*first turn"),
        ([("user", [{"type": "image_url", "image_url": "x"}])], "found .*image_url"),
        ([("user", None)], "must be text"),
    ],
)
def test_conversations_that_make_no_sense(messages: list[tuple[str, Any]], words: str) -> None:
    row = {"messages": [{"role": role, "content": content} for role, content in messages]}
    with pytest.raises(UserError, match="(?s)" + words):
        to_conversation(row, "messages")


def test_images_and_mixed_formats_are_refused() -> None:
    with pytest.raises(UserError, match="not text: image"):
        to_conversation({"image": {"bytes": b"x"}, "text": "a"}, "text")
    with pytest.raises(UserError, match="not text: video"):
        detect_format({"video": "a.mp4", "text": "a"}, asked="auto", source="x")
    with pytest.raises(UserError, match=r"(?s)looks like alpaca.*--dataset_format alpaca .* one format"):
        to_conversation({"instruction": "a", "output": "b"}, "messages")
    with pytest.raises(UserError, match=r"(?s)no turns .*### Human:.*--dataset_format text"):
        to_conversation({"text": "a"}, "guanaco")


@pytest.mark.parametrize(("needs_training", "option"), [(True, "--dataset"), (False, "--eval_dataset")])
def test_what_cannot_be_data_is_named_with_its_option(
    tmp_path: Path, needs_training: bool, option: str
) -> None:
    (tmp_path / "empty").mkdir()
    for name in (str(tmp_path / "empty"), "/dev/null"):
        with pytest.raises(UserError) as caught:
            open_source(name, needs_training=needs_training)
        assert name in caught.value.message
        assert option in caught.value.message or (needs_training and "dataset" in caught.value.message)


@pytest.mark.parametrize(("name", "is_told"), [("more", True), (".hidden", False), ("lost+found", False)])
def test_data_in_a_folder_that_cannot_be_read_is_not_left_out_in_silence(name: str, is_told: bool) -> None:
    with reachable_folder() as data:
        (data / "rows.jsonl").write_text(json.dumps({"text": "one"}) + "\n")
        locked = data / name
        locked.mkdir(mode=0o000)
        with as_other_user():
            if is_told:
                with pytest.raises(UserError, match="cannot be read") as caught:
                    open_source(str(data))
                assert f"{locked}: Permission denied" in caught.value.why
            else:
                assert [part.path.name for part in open_source(str(data)).parts] == ["rows.jsonl"]


def test_pipes_devices_and_broken_links_are_named_for_what_they_are(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "broken.jsonl").symlink_to("nowhere")
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    kinds = {"pipe.jsonl": "a named pipe", "broken.jsonl": "a broken link", "loop.jsonl": "a broken link"}
    for name, kind in kinds.items():
        for open_or_check in (open_source, check_name):
            with pytest.raises(UserError, match=f"{name} cannot be read as data") as caught:
                open_or_check(str(tmp_path / name))
            assert caught.value.why == f"it is {kind}." and "did you mean" not in caught.value.do
        folder = tmp_path / f"folder-{name}"
        folder.mkdir()
        (folder / "rows.jsonl").write_text(json.dumps({"text": "one"}) + "\n")
        (tmp_path / name).rename(folder / name)
        with pytest.raises(UserError, match=f"{name} cannot be read as data"):  # not left out in silence
            open_source(str(folder))
    with pytest.raises(UserError, match="/dev/null cannot be read as data") as caught:
        check_name("/dev/null")
    assert caught.value.why == "it is a device."
