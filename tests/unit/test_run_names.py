"""A run can be specified by its name in every command that takes a run; a path comes before a name."""

from __future__ import annotations

from pathlib import Path

import pytest

from crosstune.cli.main import load_command, main
from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.files.paths import named_run
from crosstune.report.comparison import compare_runs
from crosstune.runs.resume import unpack_run


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (run := Path("runs") / "first").mkdir(parents=True)
    (run / "plan.json").write_text('{"name": "first", "options": {}}')
    return run


@pytest.mark.parametrize(
    ("command", "words", "field"),
    [
        ("report", "first", "run"),
        ("generate", "first", "model"),
        ("chat", "first", "model"),
        ("merge", "first", "target"),
        ("export", "first --to hf", "target"),
        ("checkpoint", "list first", "target"),
        ("move", "first --to cpu", "target"),
    ],
)
def test_commands_take_the_name_of_a_run(first: Path, command: str, words: str, field: str) -> None:
    own = load_command(command, "make_parser")().parse_args(words.split())
    assert Path(getattr(own, field)) == first


def test_resume_compare_and_report_take_the_name_of_a_run(
    first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert unpack_run(make_config(resume="first"))[0] == first
    assert unpack_run(make_config(resume="first", output_dir="."))[0] == Path("first")
    with pytest.raises(UserError, match="only one run"):
        compare_runs(["first", "runs/first"], parent=Path("runs"))
    assert main(["report", "first"]) == 0
    assert capsys.readouterr().out.strip() == str(first / "report.html")
    for words in ("judge eval first", "latents sample first"):
        assert main(words.split()) == 2
        assert str(first) in capsys.readouterr().err


def test_a_name_that_does_not_exist_is_answered_with_the_runs(
    first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (first / "metrics.jsonl").write_text('{"step": 1}\n')
    for wrong in ("firts", "other"):
        assert main(["plan", "--model_name", "tiny-random", "--resume", wrong]) == 2
        assert str(first) in capsys.readouterr().err


def test_a_path_and_a_bundled_model_come_before_a_name(first: Path) -> None:
    Path("first").mkdir()
    assert named_run("first") == "first"
    (first.parent / "tiny-random").mkdir()
    own = load_command("generate", "make_parser")().parse_args(["tiny-random"])
    assert own.model == "tiny-random"
    for target in ("org/first", "./first", "absent", "", "."):
        assert named_run(target) == target


def test_a_folder_before_a_run_of_its_name_is_answered_with_the_run(
    first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("first").mkdir()
    Path("second").mkdir()
    for words in ("report first", "compare first second"):
        assert main(words.split()) == 2
        assert f"specify {first}\n" in capsys.readouterr().err
    Path("other").mkdir()
    assert main(["report", "other"]) == 2
    assert "such as runs/<name>" in capsys.readouterr().err
