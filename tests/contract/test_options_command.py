"""`crosstune options`, `crosstune models` and the help of every command."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from crosstune.cli.main import COMMANDS, main
from crosstune.config.table import help_text, markdown_table


def test_one_option_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("lora_rank", "--lora-rank", "lora_r"):
        assert main(["options", name]) == 0
        said = capsys.readouterr().out
        assert all(words in said for words in ("Rank of the adapters", "16", "65,536", "lora_r"))
    assert main(["options", "precision", "--json"]) == 0
    assert "bf16_autocast" in json.loads(capsys.readouterr().out)["takes"]


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
        "import sys, time\nfrom crosstune.cli.main import run_interruptible\n"
        "def run():\n    try:\n        print('ready', flush=True)\n        time.sleep(60)\n"
        "    finally:\n        print('leaving', flush=True)\n        time.sleep(60)\n"
        "sys.exit(run_interruptible(run, is_process=True))\n"
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


EXPLAINED = sorted(set(COMMANDS) - {"options"})  # which has no arguments to explain


@pytest.mark.parametrize("command", EXPLAINED)
def test_the_help_has_an_example_with_flags_that_exist(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    examples = [
        line for line in text.splitlines() if f"crosstune {command}" in line and line.startswith("  ")
    ]
    assert examples, text
    flags = set(re.findall(r"--\w+", text.split("examples:")[0] + help_text()))
    for example in examples:
        for word in shlex.split(example.split("   ")[0].strip(), comments=False):
            if word.startswith("--"):
                assert word.partition("=")[0] in flags | {"--help"}, example


def test_the_help_of_an_action_has_only_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {}
    for action in ("make", "check"):
        with pytest.raises(SystemExit):
            main(["pairs", action, "--help"])
        shown[action] = capsys.readouterr().out
    assert "--judge" in shown["check"] and "pairs check pairs.jsonl" in shown["check"]
    for words in ("--top_p", "sampling:", "--prompts", "crosstune pairs make"):
        assert words in shown["make"] and words not in shown["check"]


@pytest.mark.parametrize(
    ("words", "has", "lacks"),
    [
        (["train"], "--lora_rank", "--verdict"),
        (["train", "--recipe", "judge"], "--verdict", "--loss_type"),
        (["judge", "train"], "--verdict", "--loss_type"),
        (["train", "--recipe", "preference"], "--skip_bad_rows", "--train_on_prompt"),
    ],
)
def test_the_help_shows_the_options_of_the_recipe(
    words: list[str], has: str, lacks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    text = capsys.readouterr().out
    assert f"\n  {has} " in text and f"\n  {lacks} " not in text
    assert "crosstune train --recipe latent_diffusion --help" in text
