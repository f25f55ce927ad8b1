"""The commands of docs/guide/sweep.md, as they stand, in one process; the trials in theirs."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from pathlib import Path

import pytest
from pages import Page

from crosstune.cli.main import main
from crosstune.models.tiny import tiny_model

pytestmark = pytest.mark.slow


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model(tmp_path / "my-model")
    rows = [{"prompt": f"say {n}", "completion": f"{n} and {n}"} for n in range(40)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    said = []
    for line in Page("sweep.md").commands():
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            assert main(shlex.split(line)[1:]) == 0, out.getvalue()
        said.append(out.getvalue())
    swept, trained, listed, extended = said
    assert "crosstune train --config runs/rates/best.yaml" in swept and "left" in swept
    summary = json.loads((tmp_path / "runs" / "with-best" / "summary.json").read_text())
    found = json.loads((tmp_path / "runs" / "rates" / "sweep.json").read_text())
    first = min(
        (t for t in found["trials"] if t["number"] < 6 and t["status"] == "finished"),
        key=lambda t: t["value"],
    )
    assert summary["evaluations"][str(first["step"])] == first["value"], "the same run again"
    assert trained and all(f"trial-{number:03d}" in listed for number in range(6))
    assert "continue an earlier sweep: 6 of 7 trials have ended" in extended
    assert len(found["trials"]) == 7 and not set(found["over"]) - {"lr", "lora_rank"}
    assert "trial-006" in (tmp_path / "runs" / "rates" / "sweep.html").read_text()
    options = Page("sweep.md").text.split("| option |")[1].split("## ")[0]
    for flag in ("--over", "--metric", "--goal", "--trials", "--parallel", "--pruning"):
        assert f"`{flag}`" in options
