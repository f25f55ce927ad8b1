"""`crosstune options` and `crosstune models`: one option in full, some, all; a list without being asked for one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from crosstune.cli.main import main
from crosstune.config.load import load_config
from crosstune.config.schema import option_list
from crosstune.config.table import describe_option, markdown_table


def test_one_option_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("lora_rank", "--lora-rank", "lora_r"):
        assert main(["options", name]) == 0
        said = capsys.readouterr().out
        for words in (
            "Rank of the adapters",
            "16",
            "65,536",
            "lora or dora",
            "lora_r",
            "--allow_mismatch",
            "example",
        ):
            assert words in said
    assert main(["options", "precision", "--json"]) == 0
    assert "bf16_autocast" in json.loads(capsys.readouterr().out)["takes"]


def test_examples_are_requests_that_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("MLX_CONFIG").write_text("{}")
    for option in option_list():
        words = describe_option(option).example.split()
        assert words[:2] == ["crosstune", "train"]
        assert list(load_config(words[2:], environment={}).sources) == [option.name]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lora_rnk", "did you mean lora_rank?"),
        ("load_in_4bit", "--train_type qlora"),
        ("zzz", "crosstune options"),
    ],
)
def test_an_unknown_name_gets_an_answer(name: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["options", name]) == 2
    assert words in capsys.readouterr().err


def test_the_page_is_the_schemas() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "options.md"
    assert page.read_text(encoding="utf-8") == markdown_table(), "run `make docs`"


def test_bare_models_lists(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CROSSTUNE_CACHE", str(tmp_path))
    assert main(["models"]) == 0
    assert "smollm2-135m" in capsys.readouterr().out


def test_ctrl_c_again_and_again_prints_no_traceback() -> None:
    code = (
        "import sys, time\nfrom crosstune.cli.main import end_quietly\n"
        "def run():\n    try:\n        print('ready', flush=True)\n        time.sleep(60)\n"
        "    finally:\n        print('leaving', flush=True)\n        time.sleep(60)\n"
        "sys.exit(end_quietly(run, is_process=True))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == "leaving\n"
        while child.poll() is None:
            child.send_signal(signal.SIGINT)
        assert child.stderr is not None
        assert child.stderr.read() == "\ncrosstune: stopped.\n"
    assert child.returncode == 130


def test_a_word_that_is_not_text_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--name", "\udcff"], ["--name=a\0b"]):
        assert main(["plan", *words]) == 2
        assert "--name" in capsys.readouterr().err
