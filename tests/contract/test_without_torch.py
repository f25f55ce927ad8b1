"""`pip install crosstune[mlx]` in a clean environment installs no torch; train, resume and report a run there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
OPTIONS = (
    "--model_name tiny-random --max_steps 4 --save_steps 2 --batch_size 2 --eval_samples 4 --max_new_tokens 4"
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment with crosstune and its mlx extra, and nothing of this one."""
    home = tmp_path_factory.mktemp("clean") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True, timeout=600)
    source = home.parent / "source"  # a build leaves files beside what it builds
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    install = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    install += ["-c", str(ROOT / "constraints.txt"), f"{source}[mlx]"]
    done = subprocess.run(install, capture_output=True, text=True, check=False, timeout=1200)
    if done.returncode and not _has_index(home):
        pytest.skip("no package index can be reached from here")
    assert done.returncode == 0, done.stderr
    return home


def _has_index(home: Path) -> bool:
    """Return whether a small package without a version can be fetched: what then fails is ours to mend, such as a version
    in constraints.txt that does not exist."""
    fetch = [str(home / "bin" / "python"), "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    fetch += ["--dest", str(home.parent / "fetched"), "packaging"]
    return subprocess.run(fetch, capture_output=True, check=False, timeout=600).returncode == 0


def call(environment: Path, folder: Path, words: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    clean["CROSSTUNE_CACHE"] = str(folder / "cache")
    command = [str(environment / "bin" / "crosstune"), *words.split()]
    return subprocess.run(
        command, cwd=folder, env=clean, capture_output=True, text=True, check=False, timeout=900
    )


def test_a_run_is_trained_continued_reported_and_merged(environment: Path, tmp_path: Path) -> None:
    look = "import importlib.util as u; print(u.find_spec('torch'), u.find_spec('mlx') is not None)"
    found = subprocess.run(
        [environment / "bin" / "python", "-c", look], capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["None", "True"]
    trained = call(environment, tmp_path, f"train {OPTIONS} --name run")
    assert trained.returncode == 0, trained.stderr
    run = tmp_path / "runs" / "run"
    assert json.loads((run / "summary.json").read_text())["engine"] == "mlx"
    longer = call(environment, tmp_path, f"train --resume {run} --max_steps 6")
    assert longer.returncode == 0, longer.stderr
    assert "resumed  at step 4" in longer.stderr
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]
    for words in (
        f"checkpoint verify {run}",
        f"merge {run}",
        f"export {run} --to mlx --n_bits 8 --group_size 32",
        f"generate {run / 'merged'} --prompt hello --max_new_tokens 4",
    ):
        done = call(environment, tmp_path, words)
        assert done.returncode == 0, done.stderr
    assert (run / "report.html").stat().st_size > 10_000
