"""The commands of docs/guide/clusters.md: each prints what it would submit."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from pages import Page

from crosstune.cli.main import main

PAGE = Page("clusters.md")


@pytest.mark.parametrize("command", PAGE.commands(), ids=lambda command: shlex.split(command)[3])
def test_the_command_prints_a_job(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    crosstune, *words = shlex.split(command)
    assert crosstune == "crosstune" and words[-1] == "--print"
    assert main(words) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "ORG/MODEL" in out and "--resume" in out
    assert not list(tmp_path.iterdir())
