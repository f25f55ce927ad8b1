"""A command announces its work on standard error before it imports an engine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest


def start(*words: str, cwd: Path) -> subprocess.Popen[str]:
    """Start a command with the list of its imports among the lines of standard error."""
    command = [sys.executable, "-X", "importtime", "-m", "crosstune", *words]
    return subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(*words: str, cwd: Path) -> tuple[str, list[str]]:
    with start(*words, cwd=cwd) as process:
        out, err = process.communicate(timeout=600)
    return out, err.splitlines()


def line_before_engine(lines: Iterable[str]) -> str:
    """Return the first line that is not of an import, and check that torch, transformers and MLX were not imported yet."""
    imported = set()
    for line in lines:
        if not line.startswith("import time:"):
            break
        imported.add(line.rpartition("|")[2].strip())
    assert not imported & {"torch", "transformers", "mlx.core", "accelerate"}
    return line.rstrip("\n")


@pytest.mark.slow
def test_train_and_generate_say_what_they_do_first(tmp_path: Path) -> None:
    words = [
        "--model_name",
        "tiny-random",
        "--max_steps",
        "1",
        "--name",
        "a",
        "--skip_eval",
        "--backend",
        "cpu",
        "--json",
    ]
    out, lines = run("train", *words, cwd=tmp_path)
    assert line_before_engine(lines) == "train: tiny-random on cpu, probing the machine ..."
    assert {"  importing the engine and checking the model ...", "  reading the data ..."} <= set(lines)
    assert json.loads(out)["status"] == "finished"
    out, lines = run("generate", "runs/a", "--prompt", "hi", "--max_new_tokens", "2", "--json", cwd=tmp_path)
    assert line_before_engine(lines) == "generate: runs/a, importing the engine ..."
    assert json.loads(out)["prompt"] == "hi"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("train --resume absent", "train: continuing absent, probing the machine ..."),
        ("plan --model_name ./absent", "plan: ./absent, probing the machine ..."),
        ("merge absent", "merge: absent, importing the engine ..."),
        ("export absent --to gguf", "export: absent, importing the engine ..."),
        ("convert absent --to bnb", "convert: absent, importing the engine ..."),
        ("chat absent", "chat: absent, importing the engine ..."),
        ("data absent.jsonl", "data: absent.jsonl, reading ..."),
        ("latents sample absent", "latents sample: absent, importing the engine ..."),
        ("judge train --dataset absent", "judge train: "),
        ("judge eval absent --dataset absent", "judge eval: absent, importing the engine ..."),
        ("judge predict absent --input absent", "judge predict: absent, importing the engine ..."),
        (
            "train --recipe latent_diffusion --dataset absent",
            "train: latent_diffusion, probing the machine ...",
        ),
        ("doctor --no_train", "probing backends ..."),
    ],
)
def test_every_slow_command_says_what_it_does_first(tmp_path: Path, command: str, line: str) -> None:
    with start(*command.split(), cwd=tmp_path) as process:
        assert process.stderr is not None
        try:
            assert line_before_engine(process.stderr).startswith(line)
        finally:
            process.kill()  # the test above lets a command end


def test_files_of_the_working_directory_are_not_imported(tmp_path: Path) -> None:
    for name in ("yaml", "datasets", "rich"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the working directory')")
    words = [sys.executable, "-m", "crosstune", "plan", "--model_name", "tiny-random", "--backend", "cpu"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
