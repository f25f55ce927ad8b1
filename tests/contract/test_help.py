"""The help of every command: an example that the command accepts, and lines that fit the terminal."""

from __future__ import annotations

import io
import re
import shlex

import pytest

from crosstune.cli.main import COMMANDS, main
from crosstune.config.table import help_text

EXPLAINED = sorted(set(COMMANDS) - {"options"})  # which has no arguments to explain


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", EXPLAINED)
def test_the_help_has_an_example_with_flags_that_exist(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of(command, capsys)
    examples = [
        line for line in text.splitlines() if f"crosstune {command}" in line and line.startswith("  ")
    ]
    assert examples, text
    flags = set(re.findall(r"--\w+", text.split("examples:")[0] + help_text()))
    for example in examples:
        for word in shlex.split(example.split("   ")[0].strip(), comments=False):
            if word.startswith("--"):
                assert word.partition("=")[0] in flags | {"--help"}, example


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("width", [40])
@pytest.mark.parametrize("command", ["", *EXPLAINED])
def test_the_help_fits_the_terminal(
    command: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    stream = Terminal()
    monkeypatch.setattr("sys.stdout", stream)
    if command:
        with pytest.raises(SystemExit):
            main([command, "--help"])
    else:
        main(["--help"])
    own = stream.getvalue().removesuffix(help_text(recipe="sft") + "\n")
    for line in own.splitlines():
        assert len(line) <= width or len(line.split()) == 1, line


@pytest.mark.parametrize(
    ("words", "has", "lacks"),
    [
        (["train"], "--lora_rank", "--verdict"),
        (["train", "--recipe", "judge"], "--verdict", "--loss_type"),
        (["judge", "train"], "--verdict", "--loss_type"),
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
