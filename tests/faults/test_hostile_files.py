"""Damaged files of every format through the commands that read them: exit code 0 or 2, and the error names the file."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from injection.hostile_files import make_case, run_case
from injection.hostile_trained import TRAINED_KINDS
from injection.intact_files import Workshop

from crosstune.cli.main import main

CASES = 10


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    home = tmp_path_factory.mktemp("hostile")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CROSSTUNE_CACHE", str(home / "cache"))
        yield Workshop(home)


@pytest.mark.parametrize("first", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (11, 21))])
def test_damaged_files(shop: Workshop, first: int, capfd: pytest.CaptureFixture[str]) -> None:
    """`make fuzz` runs thousands."""
    for seed in range(first, first + CASES):
        case = make_case(shop, seed)
        problem = run_case(case, out=lambda: "".join(capfd.readouterr()))
        assert problem is None, f"seed {seed}, {case.kind}: {problem}\n{case.words}"


@pytest.mark.parametrize(
    "kind",
    ["imports", "benchmarks", "made pairs", "pictures"]
    + [pytest.param(kind, marks=pytest.mark.slow) for kind in ("tasks", *TRAINED_KINDS)],
)
def test_damaged_inputs_of_the_commands_around_a_run(
    kind: str, shop: Workshop, capfd: pytest.CaptureFixture[str]
) -> None:
    if kind == "tasks":
        pytest.importorskip("lm_eval")
    for seed in range(1, 9):
        case = make_case(shop, seed, only=kind)
        problem = run_case(case, out=lambda: "".join(capfd.readouterr()))
        assert problem is None, f"seed {seed}, {case.kind}: {problem}\n{case.words}"


def test_a_file_name_that_is_not_utf8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = os.fsdecode(bytes(tmp_path) + b"/d\xff.jsonl")
    assert main(["train", "--backend", "cpu", "--dataset", data]) == 2
    assert "UTF-8" in capsys.readouterr().err


def test_a_name_of_300_characters(shop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["--name", "x" * 300],
        ["--output_dir", str(tmp_path / ("x" * 300))],
        ["--config", "x" * 300],
    ):
        model = ["--model_name", str(shop.good / "model"), "--dataset", str(shop.good / "data.jsonl")]
        assert main(["train", "--backend", "cpu", *model, *words]) == 2
        assert "x" * 30 in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "words", "code", "said"),
    [
        ({"PYTHONIOENCODING": "ascii", "HOME": "/"}, ["report", "na\u00efve"], 2, r"na\xefve"),
        ({}, ["plan", "--model_name", "~nobody-here/x"], 2, "home folder"),
    ],
)
def test_terminals_and_accounts(
    variables: dict[str, str], words: list[str], code: int, said: str, tmp_path: Path
) -> None:
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONUTF8": "1",
    } | variables
    done = subprocess.run(
        [sys.executable, "-m", "crosstune", *words],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (code, False)
    assert said in done.stderr
