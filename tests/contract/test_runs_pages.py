"""Run the commands of docs/guide/runs.md and docs/guide/profiling.md as written, in one process."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import Page

from crosstune.cli.main import main


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    from crosstune.models.tiny import tiny_model

    folder = tmp_path_factory.mktemp("runs-page")
    tiny_model(folder / "my-model")
    rows = [{"prompt": f"say {n}", "completion": f"{n} and {n}"} for n in range(40)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield folder
    finally:
        os.chdir(before)


@pytest.fixture(scope="module")
def outputs(home: Path) -> dict[str, list[str]]:
    """What the commands of each page print, on both streams."""
    found = {}
    for page in ("runs.md", "profiling.md"):
        found[page] = [_run(line) for line in Page(page).commands()]
    return found


def _run(line: str) -> str:
    words, out = shlex.split(line), io.StringIO()
    assert words[0] == "crosstune"
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        assert main([*words[1:]]) == 0, out.getvalue()
    return out.getvalue()


def test_runs_are_listed_and_compared(outputs: dict[str, list[str]], home: Path) -> None:
    *_, report, listed, compared, as_json = outputs["runs.md"]
    assert report.strip() == "runs/first/report.html"
    assert [line.split()[:2] for line in listed.splitlines()[1:]] == [
        ["second", "finished"],
        ["first", "finished"],
    ]
    assert "0.003" in compared and "page     compare.html" in compared
    assert (home / "compare.html").stat().st_size > 10_000
    assert [row["best_step"] is not None for row in json.loads(as_json)] == [True, True]


def test_the_page_of_a_real_run_shows_its_data_and_what_is_learned(
    outputs: dict[str, list[str]], home: Path
) -> None:
    html = (home / "runs" / "first" / "report.html").read_text(encoding="utf-8")
    assert "Trained my-model with LoRA adapters on" in html
    example = html[html.index('<pre class="masked"') :]
    example = example[: example.index("</pre>")]
    assert "say" in example.split("<mark>")[0] and " and " in example.split("<mark>")[1]
    assert "examples</title>" in html  # a bar of the histogram


def test_steps_are_profiled(outputs: dict[str, list[str]], home: Path) -> None:
    [printed] = outputs["profiling.md"]
    assert "Profile of 2 steps (2, 3)" in printed and "share of limit" in printed
    files = {path.name for path in (home / "profiles" / "profiled").iterdir()}
    assert files == {"profile.txt", "profile.json", "trace-step-00000002.json.gz"}
