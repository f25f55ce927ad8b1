"""`judge train` accepts every option of `train`, including --world_size and --emulate."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from crosstune.cli.main import main


def train(model: Path, home: Path, *words: str) -> dict[str, Any]:
    data = [
        "--dataset",
        "judge_translations",
        "--max_samples",
        "32",
        "--test_samples",
        "6",
        "--skip_untrained",
    ]
    asked = ["--model", str(model), "--backend", "cpu", "--max_steps", "2", "--batch_size", "4", "--json"]
    command = [sys.executable, "-m", "crosstune", "judge", "train", *data, *asked, *words]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_two_processes_train_the_judge_that_one_trains(tiny_model: Path, tmp_path: Path) -> None:
    one, two = (
        train(tiny_model, tmp_path, "--world_size", str(world), "--name", f"world-{world}")
        for world in (1, 2)
    )
    assert two["test"]["num_items"] == one["test"]["num_items"] > 0
    for name, value in one["test"]["metrics"].items():
        assert two["test"]["metrics"][name] == pytest.approx(value, abs=1e-3), name
    rows = [
        json.loads((tmp_path / f"runs/world-{world}/plan.json").read_text())["identity"]["order"]
        for world in (1, 2)
    ]
    assert rows[0] == rows[1], "a step has the same rows"


def test_a_judge_is_emulated_as_train_does(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["train", "--recipe", "judge"], ["judge", "train"]):
        assert main([*command, "--machine", "apple-m1-16gb"]) == 2
        assert "--machine needs --emulate" in capsys.readouterr().err
        assert main([*command, "--emulate", "mps", "--machine", "rtx-4090", "--dataset", "judge_pairs"]) == 2
        assert "mps" in capsys.readouterr().err
