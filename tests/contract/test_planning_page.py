"""Run the commands of docs/guide/planning.md and clusters.md, and compare the output with the pages."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from pages import Page

from crosstune.cli.main import main
from crosstune.files.json_files import read_json

PAGE = Page("planning.md")
PLANS = [command for command in PAGE.commands() if command.startswith("crosstune plan")]
TRAIN = next(command for command in PAGE.commands() if command.startswith("crosstune train"))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(shlex.split(command)[1:]) == 0
    return capsys.readouterr().out


def test_the_plans_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    here, small, as_json, cluster, names, longest = (run(command, capsys) for command in PLANS)
    for title in ("parameters", "memory", "of which", "steps"):
        assert f"\n{title}" in here
    for line in PAGE.text.splitlines():
        if line.startswith(("parameters  ", "memory  ")):
            assert line in small
    planned = json.loads(as_json)
    assert (
        not planned["prediction"]["fits"]
        and "--train_type qlora" in planned["prediction"]["change_that_fits"]
    )
    assert sum(planned["memory_parts"].values()) == planned["estimated_bytes"]
    assert "4 x 8, full_shard" in cluster and "at 30 an hour" in cluster
    assert {"h200", "rtx-4090"} <= set(names.split())
    assert "\nlongest " in longest and "tokens in one row" in longest


def test_the_search_of_the_page(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    assert main(shlex.split(TRAIN)[1:]) == 0
    said = capsys.readouterr()
    assert "batch_size:" in said.out + said.err
    assert read_json(home / "runs" / "auto" / "plan.json")["options"]["batch_size"] > 1


def test_a_cluster_needs_a_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--nnodes", "2", "--backend", "cpu"]) == 2
    assert "--machine" in capsys.readouterr().err
    assert main(["plan", "--nnodes", "2", "--machine", "h200-x8", "--world_size", "3"]) == 2
    assert "16 processes" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", Page("clusters.md").commands(), ids=lambda command: shlex.split(command)[3]
)
def test_the_command_prints_a_job(command: str, capsys: pytest.CaptureFixture[str], home: Path) -> None:
    assert command.endswith(" --print")
    out = run(command, capsys)
    assert "ORG/MODEL" in out and "--resume" in out
    assert not list(home.iterdir())
