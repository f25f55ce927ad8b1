"""Readers of external files: regular files only, limits on size and depth, errors that give file and field."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crosstune.config.load import load_config
from crosstune.core.errors import UserError
from crosstune.core.names import match_names
from crosstune.files.json_fields import TEXT, check_fields, list_of, object_with, real, whole
from crosstune.files.json_files import parse_json, read_json, read_jsonl, read_object, to_json, write_json
from crosstune.files.plain_files import MissingFile, UnreadableFile, is_file_name, open_plain, read_plain
from crosstune.files.yaml_files import read_yaml
from crosstune.models.folder import check_config


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (os.mkfifo, "a named pipe"),
        (Path.mkdir, "a folder"),
        (lambda path: path.symlink_to("/dev/zero"), "a device"),
        (make_socket, "a socket"),
    ],
)
def test_what_is_not_a_regular_file_is_refused_at_once(make: Callable[[Path], None], word: str) -> None:
    with tempfile.TemporaryDirectory() as folder:  # the path of a socket must be short
        path = Path(folder) / "config.json"
        make(path)
        for read in (open_plain, read_object, read_json, read_yaml, read_jsonl):
            with pytest.raises(UnreadableFile, match=word) as caught:
                read(path)
            assert str(path) in str(caught.value)


def test_links_are_followed_unless_a_reader_says_no(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "b").symlink_to("a")
    assert read_plain(tmp_path / "b", limit=10) == b"x"
    with pytest.raises(UnreadableFile, match="a symbolic link"):
        read_plain(tmp_path / "b", limit=10, follow_links=False)


def test_sizes_and_names(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * 11)
    with pytest.raises(UnreadableFile, match="the limit for such a file"):
        read_plain(path, limit=10)
    with pytest.raises(MissingFile):
        read_plain(tmp_path / "none", limit=10)
    with pytest.raises(UnreadableFile, match="File name too long"):
        read_plain(tmp_path / ("x" * 300), limit=10)
    with pytest.raises(UnreadableFile, match="no file can have this name"):
        read_plain(Path("a\0b"), limit=10)
    assert is_file_name("a b.c")
    assert not any(map(is_file_name, ["", ".", "..", "a/b", "a\\b", "a\0", "\x1b", "\ud800", "é" * 130]))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"a": 1', "Expecting"),
        (b'{"a": "\xff"}', "not UTF-8 text: byte 7 is 0xff"),
        (b"[" * 100_000, "nested deeper"),
        (b'{"a": ' + b"1" * 5000 + b"}", "5,000 digits"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": 1, "a": 2}', "'a' occurs twice"),
        (b"[1]", "does not contain a JSON object"),
    ],
)
def test_what_is_not_json_is_said(tmp_path: Path, text: bytes, why: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text)
    with pytest.raises(UnreadableFile) as caught:
        read_json(path)
    assert why in caught.value.why
    assert str(path) in caught.value.message


def test_files_of_other_tools_may_repeat_keys_and_hold_nan() -> None:
    assert parse_json(b'{"a": 1, "a": Infinity}', foreign=True) == {"a": float("inf")}
    with pytest.raises(ValueError, match="unpaired surrogate"):
        parse_json(rb'{"a": "\ud800"}', foreign=True)
    assert parse_json(rb'{"a": "\ud83d\ude00"}', foreign=True) == {"a": "😀"}


def test_what_utf8_cannot_encode_is_written_as_ascii(tmp_path: Path) -> None:
    value = {"path": "d\udcff.jsonl", "é": 1}
    write_json(tmp_path / "plan.json", value)
    assert read_json(tmp_path / "plan.json") == value
    assert to_json({"é": 1}) == '{"é": 1}'


@pytest.mark.parametrize(
    ("value", "rule", "words"),
    [
        (0, whole(1), "an integer of 1 or more at heads, got 0"),
        (True, whole(1), "got True"),
        (10**12, whole(1, 10_000), "at most 10,000"),
        (float("inf"), real(), "a finite number"),
        (["a", 5], list_of(TEXT), "every item is a string"),
        ({"a": 5}, object_with({"a": TEXT}), "an object with a string at a"),
    ],
)
def test_a_field_is_named_with_what_it_needs(value: Any, rule: Any, words: str) -> None:
    with pytest.raises(UnreadableFile) as caught:
        check_fields({"heads": value}, {"heads": rule}, source="config.json")
    assert words in caught.value.why
    assert len(str(caught.value)) < 400


def yaml_of(tmp_path: Path, text: str) -> Any:
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return read_yaml(path)


def test_plain_yaml(tmp_path: Path) -> None:
    text = "lr: 1.0e-4\nname: 2024-01-01\nlist: &a [1, x, null]\nagain: *a\nbase: &b {lr: 2}\nmore: {<<: *b, seed: 3}\n"
    assert yaml_of(tmp_path, text) == {
        "lr": 1e-4,
        "name": "2024-01-01",
        "list": [1, "x", None],
        "again": [1, "x", None],
        "base": {"lr": 2},
        "more": {"lr": 2, "seed": 3},
    }
    assert yaml_of(tmp_path, "") is None


def test_numbers_of_old_yaml_do_not_change_their_value(tmp_path: Path) -> None:
    text = "a: 10:30\nb: 1:30.5\nc: 017\nd: -017\ne: 0\nf: 0.5\ng: -3\nh: 1_000\ni: 0x10\nj: 08\nk: .inf\n"
    assert yaml_of(tmp_path, text) == {
        "a": "10:30",
        "b": "1:30.5",
        "c": "017",
        "d": "-017",
        "e": 0,
        "f": 0.5,
        "g": -3,
        "h": 1000,
        "i": 16,
        "j": "08",
        "k": float("inf"),
    }
    (tmp_path / "c.yaml").write_text("max_steps: 10:30\n")
    with pytest.raises(UserError, match="max_steps cannot be '10:30'"):
        load_config(file=tmp_path / "c.yaml")
    (tmp_path / "c.yaml").write_text("seed: 017\nname: 007\n")
    found = load_config(file=tmp_path / "c.yaml")
    assert (found.seed, found.name) == (17, "007") == (load_config(["--seed", "017"]).seed, "007")


@pytest.mark.parametrize(
    "text",
    [
        "lr: !!int abc",
        "lr: !!binary aGk=",
        "lr: " + "7" * 5000,
        "lr: !!python/object/apply:os.system [echo]",
        "lr: " + "[" * 200 + "]" * 200,
        'lr: "\\ud800"',
        "lr: &a [*a]",
        "lr: 1\nlr: 2",
        "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"{chr(98 + n)}: &{chr(98 + n)} [{','.join(['*' + chr(97 + n)] * 9)}]\n" for n in range(9)),
        "".join(f"a{n}: &a{n} [{'*a' + str(n - 1) if n else 1}]\n" for n in range(100)),
        "x: " + "y" * (2 << 20),
    ],
)
def test_yaml_that_expands_or_fails_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UnreadableFile) as caught:
        yaml_of(tmp_path, text)
    assert "c.yaml" in caught.value.message
    assert len(str(caught.value)) < 1000


def test_patterns_match_whole_names() -> None:
    names = ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"]
    assert match_names([r".*\.(q|v)_proj", r".*\.[0-9]+\..*_attn.*", "("], names)[:2] == [
        {names[0]},
        {names[0]},
    ]
    with pytest.raises(UserError, match="exponential time"):
        match_names(["(.*)*(.*)*(.*)*x"], names)
    assert isinstance(match_names(["("], names)[0], str)
    with pytest.raises(UserError, match="more than 100,000 characters"):
        match_names(["x" * 200_000], names)


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 99,
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads, got 0"),
        ({"num_attention_heads": 65}, "65 heads at num_attention_heads"),
        ({"num_key_value_heads": 3}, "3 kv heads"),
        ({"hidden_size": "many"}, "hidden_size, got 'many'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers, got 1000000000"),
        (
            {"rope_parameters": {"factor": float("inf")}},
            "finite numbers, and a factor that is not 0 or null at rope_parameters",
        ),
        ({"rope_scaling": {"full": {"beta_slow": float("nan")}}}, "finite numbers"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "a factor that is not 0"),
        ({"text_config": {"hidden_size": -1}}, "text_config.hidden_size, got -1"),
        ({"quantization": {"group_size": 64}}, "it lacks quantization.bits"),
    ],
)
def test_sizes_that_no_model_has(changes: dict[str, Any], words: str) -> None:
    check_config(LLAMA, path=Path("config.json"))
    with pytest.raises(UnreadableFile) as caught:
        check_config(LLAMA | changes, path=Path("config.json"))
    assert words in str(caught.value)
    assert "config.json" in str(caught.value)
