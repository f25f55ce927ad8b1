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


@pytest.mark.parametrize("action", ["eval", "predict"])
def test_an_option_without_effect_on_a_test_is_reported(
    action: str, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"task": f"Add {n}.", "answer": str(n), "score": n} for n in range(4)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"eval": ["--dataset", str(data), "--skip_untrained"], "predict": ["--input", str(data)]}[action]
    words = ["judge", action, str(tiny_model), "--backend", "cpu", "--batch_size", "2", *own]
    assert main([*words, "--lr", "3", "--context_length=8"]) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if "no effect" in line]
    assert notes == [
        f"note     --{name} has no effect on judge {action}" for name in ("lr", "context_length")
    ]
    (tmp_path / "options.yaml").write_text("lr: 3\n")
    assert main([*words, "--config", str(tmp_path / "options.yaml")]) == 0
    assert "no effect" not in capsys.readouterr().err


def test_a_judge_is_emulated_as_train_does(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["train", "--recipe", "judge"], ["judge", "train"]):
        assert main([*command, "--machine", "apple-m1-16gb"]) == 2
        assert "--machine needs --emulate" in capsys.readouterr().err
        assert main([*command, "--emulate", "mps", "--machine", "rtx-4090", "--dataset", "judge_pairs"]) == 2
        assert "mps" in capsys.readouterr().err
