"""Bad input through the command line: exit code 2, a clear sentence, no traceback, nothing left behind or lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import warm

from crosstune.checkpoint.read import open_checkpoint
from crosstune.cli.main import main
from crosstune.files.json_files import read_jsonl

ROW = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi there"}]}


def train(tmp_path: Path, *words: str) -> int:
    fixed = ["--backend=cpu", "--precision=fp32", "--max_steps=2", f"--output_dir={tmp_path / 'runs'}"]
    return main(["train", *fixed, *words])


@pytest.fixture
def data(write_jsonl: Any) -> Path:
    path: Path = write_jsonl([ROW] * 12)
    return path


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--model_name no-such-model", "no-such-model"),
        ("--model_name {empty}", "config.json"),
        ("--backend xpu", "Backend 'xpu' is not available"),
        ("--lr fast", "lr cannot be 'fast'"),
        ("--dataset {empty}/none.jsonl", "No dataset"),
        ("--dataset {columns}", "subject, reply"),
        ("--dataset {data} --context_length 8", "longer than the context of 8 tokens"),
        ("--dataset {silent}", "No token"),
        ("--dataset {torn}", "line 2"),
        ("--config {empty}/none.yaml", "Cannot read"),
    ],
)
def test_a_clear_error_and_no_run_folder(
    tmp_path: Path,
    tiny_model: Path,
    data: Path,
    write_jsonl: Any,
    capsys: pytest.CaptureFixture[str],
    flags: str,
    words: str,
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    torn = tmp_path / "torn.jsonl"
    torn.write_text(json.dumps(ROW) + '\n{"messages": [\n')
    places = {
        "empty": empty,
        "data": data,
        "columns": write_jsonl([{"subject": "a", "reply": "b"}], "columns.jsonl"),
        "silent": write_jsonl([{"messages": [{"role": "user", "content": "a"}]}], "silent.jsonl"),
        "torn": torn,
    }
    asked = flags.format(**places).split()
    defaults = [] if "--model_name" in asked else ["--model_name", str(tiny_model)]
    defaults += [] if "--dataset" in asked else ["--dataset", str(data)]
    assert train(tmp_path, *defaults, *asked) == 2
    answer = capsys.readouterr().err
    assert words in answer
    assert "Traceback" not in answer
    assert not (tmp_path / "runs").exists()


def test_a_context_that_was_lowered_is_said_before_its_error(
    tmp_path: Path, tiny_model: Path, write_jsonl: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_jsonl([{"prompt": "q", "completion": "word and " * 1500}])
    flags = ["--model_name", str(tiny_model), "--dataset", str(data), "--context_length", "100000"]
    assert train(tmp_path, *flags) == 2
    said = capsys.readouterr().err
    assert "context_length: 100000 -> 2048" in said
    assert "raise --context_length" not in said


def test_a_folder_that_holds_another_run_is_kept(
    tmp_path: Path, tiny_model: Path, data: Path, capsys: Any
) -> None:
    words = ["--model_name", str(tiny_model), "--dataset", str(data), "--name", "one", "--skip_eval"]
    assert train(tmp_path, *words) == 0
    before = (tmp_path / "runs" / "one" / "metrics.jsonl").read_bytes()
    assert train(tmp_path, *words) == 2
    assert "already contains a run" in capsys.readouterr().err
    assert (tmp_path / "runs" / "one" / "metrics.jsonl").read_bytes() == before
    assert train(tmp_path, *words, "--overwrite") == 0
    assert (tmp_path / "runs" / "one~1" / "metrics.jsonl").read_bytes() == before


def test_a_cache_without_room_says_how_much_is_missing(tmp_path: Path) -> None:
    """A real small file system, where the machine lets us mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True
    ).returncode:
        pytest.skip("mounting a file system needs rights that this user does not have")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "crosstune", "models", "get", "smollm2-135m"],
            env=os.environ | {"CROSSTUNE_CACHE": str(disk)},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 2
        assert "CROSSTUNE_CACHE" in done.stderr
        assert "Traceback" not in done.stderr
        assert not list(disk.rglob("*.safetensors"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def start_training(folder: Path, *words: str) -> warm.Program:
    """Start a training that takes long, in a process of its own."""
    place = ["--output_dir", str(folder.parent), "--name", folder.name]
    return warm.start(warm.MAIN, "train", *words, "--backend", "cpu", "--max_steps", "100000", *place)


def test_a_signal_keeps_what_was_logged_and_says_how_to_go_on(
    tmp_path: Path, tiny_model: Path, data: Path
) -> None:
    folder = tmp_path / "runs" / "long"
    words = ["--model_name", str(tiny_model), "--dataset", str(data)]
    process = start_training(folder, *words)
    wait_for(lambda: len(read_jsonl(folder / "metrics.jsonl")) >= 5)
    os.kill(process.pid, signal.SIGTERM)
    code, answer = process.end()
    assert code == 3, answer
    assert "continue" in answer
    assert f"crosstune train --resume {folder}" in answer
    assert open_checkpoint(folder / "checkpoints" / "latest").step == len(
        read_jsonl(folder / "metrics.jsonl")
    )
    assert "Traceback" not in answer
    steps = read_jsonl(folder / "metrics.jsonl")
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("stopped", len(steps))
    assert summary["final_loss"] == steps[-1]["loss"]
    assert (folder / "adapter" / "adapter_model.safetensors").exists()
    assert (folder / "report.html").exists()
    again = ["--base_adapter", str(folder / "adapter"), "--skip_eval", "--lora_rank", "16"]
    assert train(tmp_path, *words, *again, "--name", "again") == 0
    assert read_jsonl(tmp_path / "runs" / "again" / "metrics.jsonl")[0]["loss"] < steps[0]["loss"]


def wait_for(condition: Any, *, seconds: float = 900) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass in time"
        time.sleep(0.05)


def test_a_kill_leaves_a_record_that_can_be_read(tmp_path: Path, tiny_model: Path, data: Path) -> None:
    folder = tmp_path / "runs" / "killed"
    process = start_training(folder, "--model_name", str(tiny_model), "--dataset", str(data))
    wait_for(lambda: len(read_jsonl(folder / "metrics.jsonl")) >= 3)
    process.kill()
    process.end()
    assert main(["report", str(folder)]) == 0
    assert (folder / "report.html").stat().st_size > 1000


def test_an_adapter_goes_on_over_its_own_base_only(
    tmp_path: Path, tiny_model: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from crosstune.models.tiny import tiny_model as make

    words = ["--dataset", str(data), "--skip_eval", "--model_name"]
    assert train(tmp_path, *words, str(tiny_model), "--name", "first") == 0
    adapter = ["--base_adapter", str(tmp_path / "runs" / "first" / "adapter")]
    other = make(tmp_path / "other", seed=1)
    assert train(tmp_path, *words, str(other), *adapter, "--name", "second") == 2
    assert "trained on a different base" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "second").exists()
    assert train(tmp_path, *words, str(tiny_model), *adapter, "--lora_rank", "8", "--name", "second") == 2
    assert "does not match the adapter options" in capsys.readouterr().err
    assert train(tmp_path, *words, str(tiny_model), *adapter, "--name", "third") == 0
    assert "base_adapter: its base was" not in capsys.readouterr().err
    quantized = ["--train_type", "qlora", "--quantization_backend", "bnb"]
    assert train(tmp_path, *words, str(tiny_model), *adapter, *quantized, "--name", "fourth") == 0
    assert "its base was not quantized in training and is bnb with 4 bits" in capsys.readouterr().err


def test_a_sweep_without_held_out_rows_is_refused_before_any_trial(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "few.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    words = ["--model_name", "tiny-random", "--backend", "cpu", "--dataset", str(data)]
    assert main(["sweep", "--over", "lr=1,2", "--output_dir", str(tmp_path / "runs"), *words]) == 2
    assert "nothing to evaluate on" in capsys.readouterr().err
    assert not list(tmp_path.glob("runs/*/*"))
