"""A planted secret is in no file of a run, and in nothing that it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import chat

from crosstune.cli.main import main
from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.runs.pipeline import train

TOKEN = "hf_" + "aB3dE" * 7


def files_with(secret: str, folder: Path) -> list[str]:
    return [
        str(path) for path in folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()
    ]


def test_no_file_of_a_run_has_it(tmp_path: Path, tiny_model: Path, write_jsonl: Any) -> None:
    from crosstune.report import write_report

    rows = [chat(f"Keep {TOKEN} {n}", "Yes") for n in range(12)]
    amount = {"max_steps": 1, "batch_size": 2, "save_steps": 1, "max_new_tokens": 2}
    place = {"output_dir": str(tmp_path / "runs"), "name": "one", "dataset": str(write_jsonl(rows))}
    config = make_config(model_name=str(tiny_model), backend="cpu", precision="fp32", **amount, **place)
    command = ["crosstune", "train", "--token", TOKEN, f"--dataset=https://me:{TOKEN}@host/x"]
    result = train(config, command=command)
    write_report(result.folder)
    assert files_with(TOKEN, result.folder) == []
    assert json.loads((result.folder / "plan.json").read_text())["command"][3] == "[secret]"
    assert "Keep [secret]" in (result.folder / "events.jsonl").read_text()


@pytest.mark.parametrize(
    "value", [f"https://me:{TOKEN}@host/rows.jsonl", f"https://host/rows.jsonl?token={TOKEN}"]
)
def test_credentials_in_an_option_are_refused(
    value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--dataset", value, "--output_dir", str(tmp_path / "runs")]) == 2
    said = capsys.readouterr()
    assert "dataset cannot be" in said.err and "HF_TOKEN" in said.err
    assert TOKEN not in said.out + said.err
    assert not (tmp_path / "runs").exists()


def test_an_error_of_a_library_shows_none() -> None:
    assert TOKEN not in "\n".join(UserError("x", why=f"401 for https://host?token={TOKEN}").lines())
