"""The files in examples/, run as a user would, with a tiny model where they allow another one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT

EXAMPLES = ROOT / "examples"
QUICK = ["--max_steps", "3", "--skip_eval", "--context_length", "128"]


def _run(words: list[str], home: Path, **variables: str) -> str:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        words, cwd=home, env=environment | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "examples").symlink_to(EXAMPLES)
    return tmp_path


def test_every_example_is_listed_and_tested() -> None:
    files = {path.name for path in EXAMPLES.iterdir()} - {"README.md"}
    listed, tests = (EXAMPLES / "README.md").read_text(), Path(__file__).read_text()
    assert all(f"({name})" in listed for name in files)
    assert all(name in tests for name in files), "chats.jsonl"


def test_sft_on_own_data(home: Path) -> None:
    config = ["--config", "examples/sft.yaml", "--model_name", "tiny-random", "--backend", "cpu"]
    _run(["crosstune", "train", *config, *QUICK], home)
    assert (home / "runs/sft/adapter").is_dir()


def test_qlora_fits_a_24_gb_card(home: Path) -> None:
    words = ["crosstune", "plan", "--config", "examples/qlora_24gb.yaml", "--machine", "rtx-4090"]
    assert "memory" in _run(words, home)


@pytest.mark.slow
def test_judge(home: Path) -> None:
    options = ["--backend", "cpu", "--max_samples", "32", "--test_samples", "8", "--max_steps", "2"]
    printed = _run(["sh", "examples/judge.sh", *options, "--skip_untrained"], home, MODEL="tiny-random")
    assert "El gato duerme." in printed
    assert len((home / "verdicts.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
def test_latent_diffusion(home: Path) -> None:
    options = ["--backend", "cpu", "--precision", "fp32", "--hidden_size", "32", "--n_blocks", "1"]
    _run(["sh", "examples/latent_diffusion.sh", *options, "--max_steps", "3", "--eval_samples", "8"], home)


@pytest.mark.slow
def test_two_processes(home: Path) -> None:
    _run(["sh", "examples/two_processes.sh", *QUICK], home, MODEL="tiny-random")
    assert (home / "runs/two/adapter").is_dir()


def test_slurm(home: Path) -> None:
    printed = _run(["sh", "examples/slurm.sh", "--print"], home, MODEL="tiny-random")
    assert "#SBATCH --nodes=2" in printed


@pytest.mark.slow
def test_train_py(home: Path) -> None:
    assert "peft: " in _run([sys.executable, "examples/train.py", "tiny-random"], home)


@pytest.mark.slow
def test_mlx_to_cuda(home: Path) -> None:
    pytest.importorskip("mlx")
    printed = _run(
        ["sh", "examples/mlx_to_cuda.sh", *QUICK], home, MODEL="tiny-random", BACKEND="mlx", TO="cpu"
    )
    assert list((home / "runs").glob("moving-*.crosstune.tar")) and "--resume" in printed
