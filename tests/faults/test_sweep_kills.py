"""A killed sweep ends as one that was not; failed trials are named, and tried again."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from injection.pacing import disturbed

from crosstune.core.errors import UserError
from crosstune.files.atomic_files import staging_path
from crosstune.runs.trials import check_same_request, log_of, wait_until_free
from crosstune.sweep.choose import read_space
from crosstune.sweep.run import RESTARTS, Sweep

LIMIT_S = 1500.0


def start(folder: Path, *words: str, variables: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a sweep in `folder`; its output is added to `folder/said`."""
    asked = ["--model_name", "tiny-random", "--dataset", "chats.jsonl", "--eval_samples", "8"]
    asked += ["--backend", "cpu", "--precision", "fp32", "--batch_size", "4", "--max_steps", "10"]
    asked += ["--num_samples", "0", "--name", "s", *words]
    rows = [{"prompt": f"say {n}", "completion": f"{n} and {n}"} for n in range(60)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (folder / "said").open("ab") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "crosstune", "sweep", *asked],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})},
            stdout=said,
            stderr=said,
        )


def finish(process: subprocess.Popen[bytes], folder: Path) -> dict[str, Any]:
    said = folder / "said"
    assert process.wait(LIMIT_S) == 0, said.read_text()
    found = json.loads((folder / "runs" / "s" / "sweep.json").read_text())
    for trial in found["trials"]:
        del trial["seconds"]
    return found


@pytest.mark.slow
def test_a_sweep_killed_at_random_moments_ends_as_one_that_was_not(tmp_path: Path) -> None:
    (whole := tmp_path / "whole").mkdir()
    (killed := tmp_path / "killed").mkdir()
    words = ["--over", "lr=1e-4..1e-1:log", "--over", "lora_rank=4,8,16", "--trials", "8"]
    began = time.monotonic()
    expected = finish(start(whole, *words), whole)
    took_s = time.monotonic() - began
    for with_trial in (False, True, False):
        process = start(killed, *words)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(random.uniform(0.02, 0.25) * took_s)
        trials = psutil.Process(process.pid).children()
        process.kill()
        process.wait()
        for trial in trials if with_trial else []:  # otherwise it still runs when the sweep continues
            trial.kill()
    assert finish(start(killed, *words), killed) == expected
    assert len(expected["trials"]) == 8


ORPHAN = """
import sys, time
from pathlib import Path
from crosstune.runs.trials import TrialProcess
trial = TrialProcess(Path(sys.argv[1]), {"model_name": "tiny-random", "max_steps": 100000})
print(trial._process.pid, flush=True)
time.sleep(1000)
"""


def test_a_trial_left_by_a_killed_sweep_is_waited_for_before_it_has_its_lock(tmp_path: Path) -> None:
    folder = tmp_path / "trials" / "trial-000"
    with subprocess.Popen([sys.executable, "-c", ORPHAN, str(folder)], stdout=subprocess.PIPE) as sweep:
        assert sweep.stdout is not None
        trial = psutil.Process(int(sweep.stdout.readline()))
        sweep.kill()
    assert trial.is_running()
    assert not folder.exists()
    wait_until_free(folder, limit_s=60.0, should_stop=lambda: False)
    assert not trial.is_running() or trial.status() == psutil.STATUS_ZOMBIE
    assert log_of(folder).exists()


def test_a_kill_before_the_request_is_written_does_not_spoil_the_name(tmp_path: Path) -> None:
    (folder := tmp_path / "s").mkdir()
    staging_path(folder / "request.json").write_text('{"opt')
    check_same_request(folder, {"options": {}}, kind="sweep")
    (other := tmp_path / "other").mkdir()
    (other / "notes.txt").touch()
    with pytest.raises(UserError, match="is not a sweep"):
        check_same_request(other, {"options": {}}, kind="sweep")


@pytest.mark.slow
def test_a_failed_trial_does_not_end_a_sweep_and_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    folder = tmp_path / "two"
    words = ["--over", "eval_dataset=chats.jsonl,later.jsonl", "--parallel", "2"]
    found = finish(start(folder, *words), folder)
    assert [trial["status"] for trial in found["trials"]] == ["finished", "failed"]
    assert "exit code 2" in found["trials"][1]["error"] and "later.jsonl" in found["trials"][1]["error"]
    assert "all combinations were tried" in (folder / "said").read_text()
    (folder / "later.jsonl").write_text((folder / "chats.jsonl").read_text())
    found = finish(start(folder, *words), folder)
    assert [trial["status"] for trial in found["trials"]] == ["finished", "finished"]
    assert found["trials"][0]["value"] == found["trials"][1]["value"]


def test_a_sweep_whose_trials_are_all_killed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in disturbed(KILLED_AT_START="1").items():
        monkeypatch.setenv(name, value)
    started: list[str] = []
    sweep = Sweep(
        folder=tmp_path / "s",
        space=read_space(["lr=1e-4..1e-1:log"]),
        metric="loss",
        maximize=False,
        num_trials=12,
        asked={"model_name": "tiny-random"},
        seed=1,
        prunes=True,
        slots=[{}],
        on_start=lambda trial: started.append(trial.name),
    )
    (tmp_path / "s").mkdir()
    with pytest.raises(UserError, match="The first 3 trials failed") as failed:
        sweep.run()
    assert started == ["trial-000", "trial-001", "trial-002"]
    assert failed.value.why.count("killed by SIGKILL, as the system does when memory runs out") == 3
    assert sweep._restarts == dict.fromkeys(range(3), RESTARTS)
    again = Sweep(**{name: getattr(sweep, name) for name in Sweep.__dataclass_fields__ if name != "trials"})
    assert [trial.status for trial in again.trials] == ["started"] * 3, "failed trials are tried again"
    assert [trial.params for trial in again.trials] == [trial.params for trial in sweep.trials]
