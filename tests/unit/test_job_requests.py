"""Requests to `crosstune launch`: what is refused, kept secret, and handed to the tools of a scheduler."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

import pytest
from launching import BASE, printed, refused, write_tool

from crosstune.cli.main import main
from crosstune.config.schema import option_list
from crosstune.distributed.jobs.job import options_of_schedulers

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_no_option_hides_one_of_train() -> None:
    """Those of the meeting point mean the same."""
    names = {name for option in option_list() for name in (option.name, *option.aliases)}
    assert names & {option.name for option in options_of_schedulers()} <= {"master_addr", "master_port"}


@pytest.mark.parametrize("scheduler", BASE)
def test_no_secret_is_written(
    scheduler: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    token = "hf_" + "aB3" * 12
    monkeypatch.setenv("HF_TOKEN", token)
    assert token not in printed(BASE[scheduler], capsys)
    (tmp_path / "run.yaml").write_text(f"lr: 1e-3  # {token}\n")
    for flags in (f"--dataset https://user:{token}@host/x", "--config run.yaml"):
        error = refused(f"{BASE[scheduler]} {flags}", capsys)
        assert "token" in error and token not in error


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--on slurm --nnodes 0", "--nnodes cannot be '0'"),
        ("--on sulrm --nnodes 2", "slurm"),
        ("--on slurm --nnodes 2 --backend cpu --gpus 2", "--gpus 2 cannot be combined with --backend cpu"),
        ("--on ssh --nnodes 2", "needs a list of nodes"),
        ("--on ssh --nnodes 1 --hosts a,b", "--nnodes is 1, but 2 nodes are listed"),
        ("--on ssh --nnodes 1 --hosts 'a;b'", "is not a valid host"),
        ("--on kubernetes --nnodes 2 --image x", "needs --volume"),
        ("--on slurm --nnodes 2 --image x", "--image is an option of kubernetes"),
        ("--on slurm --nnodes 2 --partition 'a b'", "--partition cannot be"),
        ("--on slurm --nnodes 2 --gpus 1 --nproc_per_node 2", "--gpus 1 is too few"),
        ("--on slurm --nnodes 2 -- --lr fast", "lr"),
        ("--on slurm --nnodes 2 --world_size 3", "make 2 processes"),
        ("--on slurm --nnodes 2 --overwrite", "--overwrite cannot be combined with launch"),
        ("--on slurm --nnodes 2 --resume runs/x/checkpoints/step-00000020", "cannot be combined with launch"),
        ("--on slurm --nnodes 2 --backend mlx", "mlx.launch"),
    ],
)
def test_a_bad_request_is_refused_before_anything_is_submitted(
    words: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in refused(words, capsys)


def test_all_problems_are_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    error = refused("--on kubernetes --nnodes 2 --overwrite --world_size 7", capsys)
    assert all(part in error for part in ("--image", "--volume", "--overwrite", "--world_size"))
    error = refused("--on slurm --nnodes 0 --time soon --hosts a", capsys)
    assert all(part in error for part in ("--nnodes", "--time", "--hosts"))


@pytest.mark.parametrize(
    ("scheduler", "tool"), [("slurm", "sbatch"), ("kubernetes", "kubectl"), ("ssh", "ssh")]
)
def test_a_missing_tool_is_named_with_the_way_around(
    scheduler: str,
    tool: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["launch", *shlex.split(BASE[scheduler])]) == 2
    error = capsys.readouterr().err
    assert f"{tool} was not found on this machine" in error and "--print" in error


@pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh here")
def test_machines_that_ssh_does_not_find_are_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Instead of being taken for machines that were lost, and started again."""
    assert main(["launch", *shlex.split("--on ssh --nnodes 2 --hosts one.invalid,me@two.invalid:2222")]) == 2
    error = capsys.readouterr().err
    for machine in ("one.invalid", "me@two.invalid:2222"):
        assert f"ssh cannot log in to {machine}." in error
    assert error.count("  do:  make `ssh ") == 2


@needs_bash
def test_a_machine_without_the_folder_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tools").mkdir()
    write_tool(tmp_path / "tools" / "ssh", "echo 'cd: no such folder' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}:{os.environ['PATH']}")
    assert main(["launch", *shlex.split("--on ssh --nnodes 1 --hosts alpha")]) == 2
    error = capsys.readouterr().err
    assert f"alpha does not have the folder {tmp_path}" in error and "cd: no such folder" in error


@needs_bash
@pytest.mark.parametrize(
    ("scheduler", "tool", "answer", "said"),
    [
        ("slurm", "sbatch", "echo 4711", ["submitted job 4711", "scancel 4711"]),
        ("kubernetes", "kubectl", "echo created", ["submitted job r1", "kubectl logs"]),
    ],
)
def test_what_is_submitted_is_what_is_printed(
    scheduler: str,
    tool: str,
    answer: str,
    said: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "tools").mkdir()
    write_tool(tmp_path / "tools" / tool, f"cat > {tmp_path}/given; {answer}")
    monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}:{os.environ['PATH']}")
    words = f"{BASE[scheduler]} --name r1"
    assert main(["launch", *shlex.split(words)]) == 0
    out = capsys.readouterr().out
    assert all(part in out for part in said)
    assert (tmp_path / "given").read_text() == printed(words, capsys)
    write_tool(tmp_path / "tools" / tool, "echo 'no such queue' >&2; exit 1")
    assert main(["launch", *shlex.split(words)]) == 2
    assert "no such queue" in capsys.readouterr().err
