"""`crosstune.train` in a program equals `crosstune train` in a shell, bit for bit, and restores the program's state."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from injection.bench import Bench, read_bits

import crosstune
from crosstune.checkpoint.folders import checkpoint_folders
from crosstune.files.json_files import read_json, read_jsonl
from crosstune.process.this_process import stop_signals


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("python"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSTUNE_CACHE", str(tmp_path / "cache"))


def train(bench: Bench, folder: Path, **more: Any) -> crosstune.Run:
    options = bench.options("lora", folder) | {"progress": False} | more
    return crosstune.train(**options)


def global_state() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state().tolist(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "numpy": str(np.random.get_state()),
        "python": random.getstate(),
        "signals": [signal.getsignal(number) for number in stop_signals()],
        "environment": dict(os.environ),
        "folder": Path.cwd(),
        "started": [thread.name for thread in threading.enumerate()],
    }


def test_two_runs_in_one_program_are_those_of_two_processes(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = bench.reference("lora")
    torch.manual_seed(123)
    before = global_state()
    for name in ("first", "second"):
        run = train(bench, tmp_path / name)
        assert read_bits(run.folder) == wanted, name
        assert global_state() == before, name
        assert capsys.readouterr() == ("", "")


def test_rows_in_memory_in_another_thread(bench: Bench, tmp_path: Path) -> None:
    """No signal handler can be installed in that thread."""
    rows = read_jsonl(bench.data)
    thread = threading.Thread(target=lambda: train(bench, tmp_path / "rows", dataset=rows))
    thread.start()
    thread.join()
    assert read_bits(tmp_path / "rows") == bench.reference("lora")
    folders = (tmp_path / "rows", bench.home / "straight-lora")
    ours, theirs = (read_json(folder / "plan.json")["identity"] for folder in folders)
    assert ours == theirs


class Meddler:
    """A callback that draws random numbers and changes what it is given."""

    def on_step(self, metrics: Any) -> None:
        torch.randn(3)
        torch.manual_seed(7)
        metrics.clear()


def stop_at(step: int) -> Any:
    def callback(metrics: Any) -> object:
        return crosstune.STOP if metrics["step"] == step else None

    return callback


def test_stopped_by_a_callback_and_continued(bench: Bench, tmp_path: Path) -> None:
    rows, folder = read_jsonl(bench.data), tmp_path / "stopped"
    run = train(bench, folder, dataset=rows, callbacks=[stop_at(3), Meddler()])
    assert (run.status, run.stop_reason, run.summary["steps"]) == ("stopped", "a callback", 3)
    assert run.checkpoint == folder / "checkpoints" / "step-00000003"
    assert run.result is not None and run.result.is_dir()
    assert [event["reason"] for event in run.events if event["kind"] == "stopped"] == ["a callback"]
    again = train(bench, folder, dataset=rows, resume="auto")
    assert again.status == "finished"
    assert again.stop_reason is None
    assert read_bits(folder) == bench.reference("lora")


def test_continued_without_the_rows_but_not_with_others(bench: Bench, tmp_path: Path) -> None:
    """The run records the file that the rows were written to, so that a shell can continue it too."""
    rows, folder = read_jsonl(bench.data), tmp_path / "stopped"
    train(bench, folder, dataset=rows, callbacks=[stop_at(1)])
    with pytest.raises(crosstune.UserError, match="does not match the checkpoint"):
        train(bench, folder, dataset=rows[::-1], resume="auto")
    again = crosstune.train(resume=folder, progress=False)
    assert read_bits(again.folder) == bench.reference("lora")


def test_an_error_in_a_callback_loses_no_step(bench: Bench, tmp_path: Path) -> None:
    def fail(metrics: Any) -> None:
        if metrics["step"] == 3:
            raise ZeroDivisionError("in the callback")

    folder = tmp_path / "error"
    with pytest.raises(ZeroDivisionError, match="in the callback"):
        train(bench, folder, callbacks=[fail], save_steps=0)
    assert [step for step, _ in checkpoint_folders(folder / "checkpoints")] == [3]
    run = crosstune.Run(folder)
    assert run.status == "stopped"
    assert run.stop_reason == "ZeroDivisionError in a callback: in the callback"
    train(bench, folder, resume="auto")
    assert read_bits(folder)["result"] == bench.reference("lora")["result"]


def test_an_error_at_an_event_is_raised(bench: Bench, tmp_path: Path) -> None:
    class Fails:
        def on_event(self, event: Any) -> None:
            if event.kind == "saved":
                raise KeyError("saved")

    folder = tmp_path / "events"
    with pytest.raises(KeyError):
        train(bench, folder, callbacks=[Fails()], skip_eval=False, eval_samples=2, max_new_tokens=2)
    run = train(bench, folder, resume="auto", skip_eval=False, eval_samples=2, max_new_tokens=2)
    assert crosstune.Run(folder).summary["steps"] == 4
    assert "eval_loss" not in run.metrics[1]
    assert run.metrics[-1]["eval_loss"] == run.summary["eval_loss"]


def test_a_run_is_opened_by_its_name(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runs" / "mine"
    train(bench, folder)
    monkeypatch.chdir(tmp_path)
    assert crosstune.Run("mine").folder.resolve() == folder.resolve()
    assert Path(crosstune.load("mine", progress=False).target).resolve() == folder.resolve()


def test_a_run_tells_about_itself(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(bench, tmp_path / "told", progress=True)
    out, err = capsys.readouterr()
    assert err == "", "the options say --log_to stdout"
    assert "step 4/4" in out and "finished 4 steps" in out
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4]
    epochs = [row["epoch"] for row in run.metrics]
    assert epochs[0] > 0 and epochs == pytest.approx([step * epochs[0] for step in (1, 2, 3, 4)])
    assert run.report() == run.folder / "report.html"
    assert run.result == run.folder / "adapter"
    assert repr(run).startswith(f"Run('{run.folder}', status='finished', steps=4, final_loss=")
    assert crosstune.Run(run.folder).summary == run.summary | {
        "seconds": crosstune.Run(run.folder).summary["seconds"]
    }
    with pytest.raises(crosstune.UserError, match="is not a run"):
        crosstune.Run(tmp_path / "nothing")
