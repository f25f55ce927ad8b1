"""What `crosstune launch --print` prints or refuses, for the tests of its schedulers."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from crosstune.cli.main import main

BASE = {
    "slurm": "--on slurm --nnodes 2",
    "kubernetes": "--on kubernetes --nnodes 2 --image registry.example/crosstune:0.1 --volume runs:/workspace",
    "ray": "--on ray --nnodes 2",
    "ssh": "--on ssh --nnodes 2 --hosts alpha,root@beta:2222",
}


def printed(words: list[str] | str, capsys: pytest.CaptureFixture[str]) -> str:
    words = shlex.split(words) if isinstance(words, str) else words
    assert main(["launch", "--print", *words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refused(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["launch", "--print", *shlex.split(words)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


def write_tool(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
