"""Completion of commands, options, values and files, by the printed script in a real bash."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from crosstune.cli.commands.options import SHELLS
from crosstune.cli.main import main

ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}; COMPREPLY=()
_shtab_crosstune
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import contextlib
    import io

    path, out = tmp_path_factory.mktemp("completion") / "crosstune.bash", io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["completion", "bash"]) == 0
    path.write_text(out.getvalue())
    return path


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("tr", {"train"}),
        ("train --lora_ra", {"--lora_rank"}),
        ("plan --precision bf16_", {"bf16_autocast", "bf16_buffers_autocast"}),
        ("train --dataset {folder}/ch", {"{folder}/chats.jsonl"}),
        ("report {folder}/ch", {"{folder}/chats.jsonl"}),
        ("models g", {"get"}),
        ("launch --on s", {"slurm", "ssh"}),
    ],
)
def test_bash_completes(script: Path, tmp_path: Path, words: str, expected: set[str]) -> None:
    (tmp_path / "chats.jsonl").touch()
    asked = ["crosstune", *words.format(folder=tmp_path).split(" ")]
    found = subprocess.run(
        ["bash", "-c", ASK, "bash", str(script), *asked], capture_output=True, text=True, check=True
    )
    assert set(found.stdout.split()) == {text.format(folder=tmp_path) for text in expected}


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_has_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert "lora_rank" in capsys.readouterr().out
