"""Run the commands of docs/guide/long-rows.md: the plan names the option, and the merged model is scaled."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from pages import Page

from crosstune.cli.main import main


def test_the_commands_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in Page("long-rows.md").commands():
        assert main(shlex.split(command)[1:]) == 0
    assert "--rope_scaling" in capsys.readouterr().out
    config = json.loads((tmp_path / "runs" / "long" / "merged" / "config.json").read_text())
    assert config["rope_scaling"] == config["rope_parameters"]
    assert (config["rope_scaling"]["rope_type"], config["max_position_embeddings"]) == ("yarn", 8192)
