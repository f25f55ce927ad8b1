"""Run the files in examples/ as a user would, with a tiny model if they accept one."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import warm
from pages import ROOT

EXAMPLES = ROOT / "examples"
QUICK = ["--max_steps", "3", "--skip_eval", "--context_length", "128"]


def _run(words: list[str], home: Path, **variables: str) -> str:
    if words[0] == "crosstune":
        code, said = warm.start(warm.IN_FOLDER + warm.MAIN, str(home), *words[1:], variables=variables).end()
        assert code == 0, said
        return said
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
    files = {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {"README.md"}
    listed, tests = (EXAMPLES / "README.md").read_text(), Path(__file__).read_text()
    assert all(f"({name})" in listed for name in files)
    assert all(name in tests for name in files), "chats.jsonl"


def test_sft_on_own_data(home: Path) -> None:
    config = ["--config", "examples/sft.yaml", "--model_name", "tiny-random", "--backend", "cpu"]
    _run(["crosstune", "train", *config, *QUICK], home)
    assert (home / "runs/sft/adapter").is_dir()


PREFERENCE = ["crosstune", "train", "--config", "examples/preference.yaml", "--backend", "cpu"]


def _short(home: Path) -> list[float]:
    """Return the fraction of short held-out answers at each evaluation."""
    printed = _run([sys.executable, "examples/short_answers.py", "runs/short"], home)
    return [float(line.split()[2]) for line in printed.splitlines()]


def test_preference_yaml_with_a_tiny_model(home: Path) -> None:
    words = [*PREFERENCE, "--model_name", "tiny-random", "--max_steps", "2", "--num_samples", "2"]
    _run([*words, "--max_new_tokens", "4", "--context_length", "256"], home)
    assert (home / "runs/short/adapter").is_dir() and _short(home) == [1.0, 1.0]  # 4 tokens are few words


@pytest.mark.slow
def test_preferred_answers_become_short(home: Path) -> None:
    """The claim of docs/guide/preference.md, with greedy answers to short_answers.jsonl."""
    _run([*PREFERENCE, "--num_samples", "24"], home)
    before, after = _short(home)
    assert before <= 0.6 and after > 0.9


def test_rl_yaml_with_a_tiny_model(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The options of rl.yaml, with the reward of colors.py on colors.jsonl."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    right = importlib.import_module("colors").right
    answers = ["It is red.", "The book that Mia has is red.", "red or blue", "12"]
    assert right(answers, answer=["red"] * 4) == [1.0, 1 / 7, 0.0, 0.0]
    words = [
        "crosstune",
        "train",
        "--config",
        "examples/rl.yaml",
        "--model_name",
        "tiny-random",
        "--max_steps",
        "2",
    ]
    printed = _run([*words, "--backend", "cpu", "--max_new_tokens", "4", "--batch_size", "1"], home)
    assert "reward 0" in printed and (home / "runs/colors/adapter").is_dir()


@pytest.mark.slow
def test_a_tiny_model_learns_to_read_pictures(home: Path) -> None:
    """Color and number of the squares, in pictures that training has not seen."""
    _run([sys.executable, "examples/pictures.py", "pictures"], home)
    hashes = [
        {hashlib.sha256(path.read_bytes()).digest() for path in (home / "pictures" / part).glob("*.png")}
        for part in ("train", "held_out")
    ]
    assert list(map(len, hashes)) == [2000, 100] and not hashes[0] & hashes[1]
    _run(["crosstune", "train", "--config", "examples/pictures.yaml", "--backend", "cpu"], home)
    events = map(json.loads, (home / "runs/pictures/events.jsonl").read_text().splitlines())
    scores = [event["metrics"]["exact_match"] for event in events if event["kind"] == "evaluation"]
    assert scores[0] < 0.05 and scores[-1] > 0.9
    assert (home / "runs/pictures/report.html").read_text().count('src="data:image/jpeg;base64,') >= 40


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
