"""No control character of data, models or names reaches a terminal; our own styles do."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from crosstune.cli.arguments import print_json
from crosstune.cli.main import main
from crosstune.cli.terminal.screen import Screen
from crosstune.cli.terminal.streams import wrap_output
from crosstune.core.events import Evaluated, Warned
from crosstune.core.safe_text import printable
from crosstune.files.json_files import read_jsonl
from crosstune.files.run_record import RunRecord
from crosstune.report import write_report
from crosstune.results.prompt_file import json_line

CLIPBOARD = "\x1b]52;c;aGVsbG8=\x07"
HOSTILE = f"a{CLIPBOARD}b\x9b2Jc\u202ed\u2066e\x7ff\x08g"
ESCAPED = "a\\x1b]52;c;aGVsbG8=\\x07b\\x9b2Jc\\u202ed\\u2066e\\x7ff\\x08g"


def is_clean(text: str) -> bool:
    return printable(text) == text


def test_controls_are_escaped_and_text_stays() -> None:
    assert printable(HOSTILE) == ESCAPED
    assert printable("half \ud83d") == "half \\ud83d"
    text = "lines\nand\ttabs, 日本\u3000語, ünï\xa0, 👩‍💻, עברית\u200f, \\x1b, \u2028"
    assert printable(text) == text


def test_exactly_these_ranges_are_escaped() -> None:
    escaped = "\x00\x1f\x7f\x9f\ufeff\U000e0000\U000e007f\u202a\u202e\u2066\u2069\ud800\udfff"
    assert all(printable(one) != one for one in escaped)
    text = " ~\xa0\ufefe\U000dffff\U000e0080\u2029\u202f\u2065\u206a\ud7ff\ue000"
    assert printable(text) == text


def test_print_escapes_and_the_streams_stay_usable(capsys: pytest.CaptureFixture[str]) -> None:
    wrap_output()
    wrap_output()  # twice is as once
    print(HOSTILE)
    print("\rspoof", end="")
    sys.stdout.writelines([HOSTILE, "\n"])
    sys.stderr.write("\r 50 %|#####     | \x1b[2J")
    assert not sys.stdout.isatty()
    assert sys.stdout.encoding
    out, err = capsys.readouterr()
    assert out == f"{ESCAPED}\n\\rspoof{ESCAPED}\n"
    assert err == "\r 50 %|#####     | \\x1b[2J"


@pytest.mark.parametrize("terminal", [True, False])
def test_the_screen_escapes_texts_but_not_its_styles(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm-256color")
    stream = io.StringIO()
    screen = Screen(live=False, stream=stream)
    screen.on_event(Warned(message=HOSTILE))
    sample: Any = {"prompt": HOSTILE, "answer": HOSTILE, "reference": ""}
    screen.on_event(Evaluated(step=1, when="during", metrics={}, samples=[sample], seconds=1.0))
    screen.output.console.print("done", end="\r")
    shown = stream.getvalue()
    assert "]52;c;" in shown
    for bad in (CLIPBOARD, "\x1b]", "\x9b", "\u202e", "\u2066", "\x07", "\x08"):
        assert bad not in shown
    assert shown.endswith("done\r")
    assert ("\x1b[33m" in shown) == terminal


def test_json_stays_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"answer": HOSTILE, "half": "\ud83d"})
    out = capsys.readouterr().out
    assert is_clean(out)
    assert json.loads(out) == {"answer": HOSTILE, "half": "\ud83d"}


def test_the_files_of_a_run_and_of_answers_are_clean(tmp_path: Path) -> None:
    """They are looked at with `cat`, too."""
    run = tmp_path / "run"
    record = RunRecord.create(run, config_yaml="", plan={"name": HOSTILE})
    record.on_event(Warned(message=f"{HOSTILE} \ud83d"))
    record.finish({"status": "finished", "name": HOSTILE})
    (run / "answers.jsonl").write_bytes(json_line({"prompt": HOSTILE, "answer": HOSTILE}))
    for name, key in {"plan.json": "name", "summary.json": "name", "answers.jsonl": "answer"}.items():
        assert is_clean((run / name).read_text(encoding="utf-8")), name
        assert json.loads((run / name).read_text(encoding="utf-8"))[key] == HOSTILE
    assert is_clean((run / "events.jsonl").read_text(encoding="utf-8"))
    assert read_jsonl(run / "events.jsonl")[0]["message"] == f"{HOSTILE} \ud83d"
    assert is_clean(write_report(run).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "words",
    [[f"tr{HOSTILE}"], ["train", f"--{HOSTILE}", "1"], ["data", f"/tmp/{HOSTILE}.jsonl"]],
    ids=lambda words: words[0][:10] if len(words[0]) < 12 else "unknown",
)
def test_errors_of_every_command_are_clean(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert is_clean(out)
    assert is_clean(err)
    assert "x1b]52" in err


def test_a_traceback_of_ours_is_clean() -> None:
    code = (
        "from crosstune.cli import main; from crosstune.cli.commands import options\n"
        f"def run(words): raise RuntimeError({HOSTILE!r})\n"
        "options.run = run\n"
        "main.main(['options'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "RuntimeError" in done.stderr
    assert CLIPBOARD not in done.stderr
