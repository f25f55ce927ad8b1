"""docs/add-a-recipe.md, followed as it is written: its file into a copy of the package, its commands one by one."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import crosstune

PAGE = Path(__file__).parents[2] / "docs" / "add-a-recipe.md"
STRAIGHT = "--recipe curve --train_type full --precision fp32 --batch_size 32 --lr 0.05 --seed 3"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package and the page's recipe in it."""
    home = tmp_path_factory.mktemp("recipe")
    package = Path(crosstune.__file__).parent
    shutil.copytree(package, home / "src" / "crosstune", ignore=shutil.ignore_patterns("__pycache__"))
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    (home / "src" / "crosstune" / "recipes" / "curve.py").write_text(code, encoding="utf-8")
    return home


def start(home: Path, words: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(home / "src")}
    command = [sys.executable, "-m", "crosstune", *shlex.split(words)]
    return subprocess.Popen(
        command, cwd=home, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def run(home: Path, words: str) -> str:
    process = start(home, words)
    out, _ = process.communicate()
    assert process.returncode == 0, out
    return out


def metrics(home: Path, name: str) -> list[dict[str, Any]]:
    lines = (home / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def losses(home: Path, name: str) -> list[tuple[float, float, float]]:
    return [(row["loss"], row["grad_norm"], row["close"]) for row in metrics(home, name)]


@pytest.fixture(scope="module")
def followed(home: Path) -> list[str]:
    """What the commands of the page printed."""
    [commands] = re.findall(r"```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    return [run(home, command.removeprefix("crosstune ")) for command in commands.strip().splitlines()]


def test_the_commands_of_the_page_train_evaluate_and_continue(home: Path, followed: list[str]) -> None:
    summary = json.loads((home / "runs" / "curve" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["examples"]) == ("finished", 180, 180 * 32)
    assert summary["eval_after"]["close"] > 0.8 > 0.2 > summary["eval_before"]["close"]
    rows = metrics(home, "curve")
    assert [row["step"] for row in rows] == list(range(1, 181))
    assert all(row["examples"] == 32 and 0 <= row["close"] <= 1 for row in rows)
    assert "generate" not in followed[0]  # it is not a model to talk to
    assert (home / "runs" / "curve" / "model" / "model.safetensors").is_file()


def test_the_recipe_goes_on_in_the_other_engine(home: Path, followed: list[str]) -> None:
    summary = json.loads((home / "runs" / "curve-mlx" / "summary.json").read_text())
    assert (summary["engine"], summary["steps"]) == ("mlx", 240)
    run(home, f"train {STRAIGHT} --backend cpu --name torch --max_steps 12 --skip_eval")
    run(home, f"train {STRAIGHT} --backend mlx --name mlx --max_steps 12 --skip_eval")
    for one, other in zip(losses(home, "torch"), losses(home, "mlx"), strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def test_the_metrics_are_in_the_report(home: Path, followed: list[str]) -> None:
    page = (home / "runs" / "curve" / "report.html").read_text(encoding="utf-8")
    for title in ("Evaluation: close", "Training: close", "Evaluation close", "points of sin(3 x)"):
        assert title in page, title


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_a_killed_run_resumes_bit_for_bit(home: Path, backend: str) -> None:
    options = f"train {STRAIGHT} --backend {backend} --max_steps 400 --save_steps 20 --skip_eval"
    run(home, f"{options} --name whole-{backend}")
    killed = f"killed-{backend}"
    process = start(home, f"{options} --name {killed} --resume auto")
    log = home / "runs" / killed / "metrics.jsonl"
    while process.poll() is None and not (log.exists() and log.read_text().count("\n") >= 60):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (home / "runs" / killed / "summary.json").exists(), "it finished before it could be killed"
    run(home, f"{options} --name {killed} --resume auto")
    assert losses(home, killed) == losses(home, f"whole-{backend}")
    weights = [
        (home / "runs" / name / "model" / "model.safetensors").read_bytes()
        for name in (killed, f"whole-{backend}")
    ]
    assert weights[0] == weights[1]


def test_plan_needs_no_model_for_it(home: Path) -> None:
    out = run(home, "plan --recipe curve --train_type full --backend cpu --json")
    assert json.loads(out)["estimated_bytes"] is None


def test_adapters_go_on_its_linear_layers(home: Path) -> None:
    run(home, f"train {STRAIGHT} --train_type lora --lora_rank 2 --backend cpu --name lora --max_steps 5")
    assert (home / "runs" / "lora" / "adapter" / "adapter_model.safetensors").is_file()
