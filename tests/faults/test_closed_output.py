"""The reader of a command's output goes away: printing ends, training does not."""

from __future__ import annotations

import fcntl
import json
import os
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import warm

STEPS = 6


def training(folder: Path, *more: str) -> list[str]:
    words = (
        "--model_name tiny-random --dataset commands --dataset_samples 64 --eval_samples 2 --max_new_tokens 2 "
        f"--max_steps {STEPS} --save_steps 5 --backend cpu --precision fp32 --log_every_n_steps 1 --name run"
    )
    return ["train", *words.split(), "--output_dir", str(folder), *more]


def check_finished(run: Path) -> None:
    assert len((run / "metrics.jsonl").read_text().splitlines()) == STEPS
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"
    assert (run / "checkpoints" / f"step-{STEPS:08d}" / "manifest.json").is_file()
    assert (run / "adapter").is_dir() and (run / "report.html").is_file()


def in_a_fork(place: str, folder: Path, *more: str) -> warm.Program:
    return warm.start_command(training(folder, *more), place=place, variables={"TERM": "xterm"})


@pytest.mark.parametrize("more", [[], ["--log_to", "stdout"]], ids=["bar", "log"])
def test_a_closed_pipe_does_not_end_the_training(tmp_path: Path, more: list[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    process = in_a_fork(str(tmp_path / "pipe"), tmp_path, *more)
    with (tmp_path / "pipe").open() as lines:
        assert any(line.startswith("step 3/") for line in lines)
    assert process.end()[0] == 0
    check_finished(tmp_path / "run")


def test_a_closed_terminal_does_not_end_the_training(tmp_path: Path) -> None:
    """With SIGHUP ignored, as under nohup, every write to the terminal fails with EIO."""
    controller, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = in_a_fork(os.ttyname(terminal), tmp_path)
    shown = b""
    while b"step 0:" not in shown:  # the evaluation before training; the bar is not drawn at every step
        shown += os.read(controller, 4096)
    os.close(terminal)
    os.close(controller)
    assert process.end()[0] == 0
    check_finished(tmp_path / "run")


def test_a_terminal_that_takes_no_text_does_not_stop_the_training(tmp_path: Path) -> None:
    """As after Ctrl-S, or with a connection that has stalled: a write to it would wait for ever."""
    controller, terminal = os.openpty()
    termios.tcflow(terminal, termios.TCOOFF)
    process = in_a_fork(os.ttyname(terminal), tmp_path)
    try:
        assert process.end()[0] == 0
    finally:
        process.kill()
        os.close(terminal)
        os.close(controller)
    check_finished(tmp_path / "run")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
def test_a_full_disk_under_the_result_is_an_error() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "crosstune", "options", "lr", "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert "Standard output could not be written" in done.stderr and "Traceback" not in done.stderr


def test_help_ends_quietly_when_its_reader_does(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m crosstune train --help | head -1; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert done.stderr == "" and done.stdout.startswith("usage:")


@pytest.mark.parametrize(
    ("words", "closed"),
    [
        ("runs", ">&-"),
        ("runs", "<&- >&- 2>&-"),
        ("doctor --help", ">&-"),
        ("doctor --help", "2>&-"),
        ("nonsense", "2>&-"),
        ("nonsense", "<&- >&- 2>&-"),
    ],
)
def test_closed_streams(words: str, closed: str, tmp_path: Path) -> None:
    """Python has no stream object then, and the next open file would take the descriptor."""
    code = """
import os, sys
from crosstune.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as end:
    code = end.code or 0
file = os.open("after", os.O_WRONLY | os.O_CREAT)
os.write(1, b"one"), os.write(2, b"two")
os._exit(code)
"""
    (tmp_path / "runs").mkdir()
    done = subprocess.run(
        ["bash", "-c", f'"$0" -c "$1" {words} {closed}', sys.executable, code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (2 if words == "nonsense" else 0)
    assert "Traceback" not in done.stderr and (tmp_path / "after").read_bytes() == b""
