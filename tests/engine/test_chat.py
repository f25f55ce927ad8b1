"""`crosstune chat` and `crosstune generate` with a real tiny model."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from crosstune.cli.main import main

MODEL = ("--backend", "cpu", "--precision", "fp32", "--max_new_tokens", "4")


def test_commands_are_not_sent_to_the_model(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    typed = ["/sav x", "/etc/passwd", "/save", "hello", "/system Be brief.", "//etc is a folder"]
    typed += ["/save chat.jsonl", "/reset", "/load chat.jsonl", "/save again.jsonl", "/help", "/exit", "no"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(typed) + "\n"))
    assert main(["chat", str(tiny_model), *MODEL]) == 0
    said = capsys.readouterr().err
    assert "Unknown command /sav;" in said and "Unknown command /etc" in said
    assert "/save needs" in said and "/system TEXT" in said
    saved = json.loads((tmp_path / "chat.jsonl").read_text(encoding="utf-8"))["messages"]
    assert [(turn["role"], turn["content"]) for turn in saved if turn["role"] != "assistant"] == [
        ("system", "Be brief."),
        ("user", "hello"),
        ("user", "/etc is a folder"),
    ]
    assert (tmp_path / "again.jsonl").read_text() == (tmp_path / "chat.jsonl").read_text()


def test_a_file_of_prompts_is_answered_as_each_alone(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["Hello", "Turn on the lamp in the kitchen.", "What?"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    words = ["generate", str(tiny_model), *MODEL]
    output = tmp_path / "answers.jsonl"
    many = [*words, "--prompt_file", str(tmp_path / "prompts.txt"), "--output", str(output)]
    many += ["--batch_size", "2"]
    assert main(many) == 0
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [row["prompt"] for row in rows] == prompts
    capsys.readouterr()
    for row in rows:
        assert main([*words, "--prompt", row["prompt"], "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == row
    assert main(many) == 2
    assert "already exists" in capsys.readouterr().err
    assert main([*many, "--overwrite"]) == 0


def test_a_failed_start_leaves_no_output_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(tmp_path / "none"), "--prompt", "x", "--output", str(tmp_path / "answers.jsonl")]
    assert main(words) == 2
    assert not (tmp_path / "answers.jsonl").exists()
