"""Failed trials of a sweep are named, and tried again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from injection.pacing import disturbed

from crosstune.core.errors import UserError
from crosstune.sweep.run import RESTARTS, Sweep
from crosstune.sweep.space import read_space

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
