"""Several MLX processes equal one: losses, weights, checkpoints. Real processes over loopback."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import chat

from crosstune.checkpoint.read import open_checkpoint
from crosstune.cli.main import main
from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.distributed.environment import LAUNCHER
from crosstune.distributed.launch import ring_environments
from crosstune.distributed.links import AttemptLayout
from crosstune.files.json_files import read_json, read_jsonl
from crosstune.runs.pipeline import train

pytest.importorskip("mlx_lm", reason="the mlx extra is not installed")

CLOSE = 1e-5
# Each process does all the trainings of a list, as one that was started by mlx.launch would.
RANK = """
import json, pathlib, sys
from crosstune.cli.main import main
from crosstune.config.load import make_config
from crosstune.distributed.environment import read_ranks
from crosstune.core.errors import UserError
from crosstune.runs.pipeline import train
from crosstune.distributed.group import connect
group = connect(read_ranks())
for asked in json.loads(pathlib.Path(sys.argv[1]).read_text()):
    train(make_config(**asked), group=group)
try:
    train(make_config(**asked | {"name": "other", "resume": "none", "seed": group.ranks.rank}), group=group)
except UserError as error:
    print("refused:", error.message)
assert group.any(group.ranks.rank == 1) and not group.any(False) and not group.all_equal(str(group.ranks.rank))
assert group.broadcast("näher" * (1 + group.ranks.rank)) == "näher"
"""


def options(model: Path, data: Path, folder: Path, **more: Any) -> dict[str, Any]:
    return (
        {"backend": "mlx", "model_name": str(model), "dataset": str(data), "output_dir": str(folder)}
        | {"precision": "fp32", "batch_size": 2, "lr": 1e-3, "skip_eval": True}
        | more
    )


# One process accumulates twice as much as each of two. The last step of the `full` run has one micro-batch of the four.
RUNS: dict[str, dict[str, Any]] = {
    "lora": {"train_type": "lora", "lora_dropout": 0.2, "max_steps": 4, "save_steps": 2, "keep_last_n": 5},
    "full": {
        "train_type": "full",
        "lr": 1e-4,
        "dataset_samples": 12,
        "save_steps": 9,
        "skip_eval": False,
        "eval_samples": 5,
        "num_samples": 1,
        "max_new_tokens": 4,
    },
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    rows = [chat(f"{a} + {b}?", str(a + b)) for a in range(12) for b in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def runs(tiny_model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """`one-NAME` by one process, `two-NAME` by two; `two-on`: two go on where one was, and what they said."""
    folder = tmp_path_factory.mktemp("runs")
    asked = options(tiny_model, data, folder)
    for name, more in RUNS.items():
        train(make_config(**asked | more, name=f"one-{name}", gradient_accumulation_steps=4))
    halved = asked | {"gradient_accumulation_steps": 2}
    todo = [halved | more | {"name": f"two-{name}"} for name, more in RUNS.items()]
    middle = folder / "one-lora" / "checkpoints" / "step-00000002"
    todo.append(halved | RUNS["lora"] | {"name": "two-on", "world_size": 2, "resume": str(middle)})
    (folder / "todo.json").write_text(json.dumps(todo))
    begin = AttemptLayout(attempt=0, size=2, num_local=2, port=0)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(folder / "todo.json")],
            env={**os.environ, **added},
            stdout=(folder / f"said-{rank}").open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank, added in enumerate(ring_environments(folder, begin))
    ]
    try:
        for rank, process in enumerate(ranks):
            assert process.wait(timeout=900) == 0, (folder / f"said-{rank}").read_text()
        yield folder
    finally:
        for process in ranks:
            process.kill()


def losses(folder: Path) -> list[float]:
    rows = read_jsonl(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


def check_equal(expected: Path, found: Path) -> None:
    np.testing.assert_allclose(losses(found), losses(expected), rtol=CLOSE)
    newest = [open_checkpoint((folder / "checkpoints" / "latest").resolve()) for folder in (expected, found)]
    assert newest[0].step == newest[1].step == len(losses(expected))
    wanted, state = (checkpoint.load() for checkpoint in newest)
    for name, array in wanted.weights.items():
        # Of the whole array: Adam moves a single weight of almost no gradient by the sign of its rounding.
        assert np.linalg.norm(state.weights[name] - array) <= CLOSE * np.linalg.norm(array), name
    np.testing.assert_array_equal(state.random["mlx"], wanted.random["mlx"])


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_are_one(name: str, runs: Path) -> None:
    one, two = runs / f"one-{name}", runs / f"two-{name}"
    check_equal(one, two)
    plan, summary = read_json(two / "plan.json"), read_json(two / "summary.json")
    assert (plan["world_size"], plan["collective"], plan["asked"]["world_size"]) == (2, "ring", 2)
    for key in ("tokens", "supervised_tokens", "steps", "status"):
        assert summary[key] == read_json(one / "summary.json")[key]
    assert summary["eval_after"] == pytest.approx(read_json(one / "summary.json")["eval_after"], rel=CLOSE)


def test_two_go_on_where_one_was(runs: Path) -> None:
    check_equal(runs / "one-lora", runs / "two-on")


def test_one_goes_on_where_two_were(runs: Path, tiny_model: Path, data: Path) -> None:
    middle = runs / "two-lora" / "checkpoints" / "step-00000002"
    asked = options(tiny_model, data, runs, resume=str(middle), **RUNS["lora"])
    with pytest.raises(UserError, match="rows_per_step: 8 in the checkpoint, 4 now"):
        train(make_config(**asked, name="refused", gradient_accumulation_steps=2, world_size=1))
    train(make_config(**asked, name="one-on", world_size=1))
    check_equal(runs / "one-lora", runs / "one-on")


def test_a_run_of_two_moves_to_one(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive = tmp_path / "two.tar"
    assert main(["move", str(runs / "two-lora"), "--to", "cpu", "--out", str(archive)]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("continue")]
    words = line.split()[2:]
    assert words[-2:] == ["--world_size", "1"]
    assert str(archive) in words
    assert main([*words, "--output_dir", str(tmp_path), "--max_steps", "5"]) == 0
    assert read_jsonl(tmp_path / "two-lora" / "metrics.jsonl")[-1]["step"] == 5


def test_processes_that_mean_different_trainings_do_not_start(runs: Path) -> None:
    for rank in (0, 1):
        assert (
            "refused: The 2 processes of the run differ: options (seed), order."
            in (runs / f"said-{rank}").read_text()
        )
    assert not (runs / "other").exists()


def start(model: Path, data: Path, folder: Path) -> subprocess.Popen[str]:
    """A run of two processes that is long enough to be stopped; returns when a few steps are done."""
    asked = options(model, data, folder, world_size=2, gradient_accumulation_steps=1, name="run")
    asked |= {"max_steps": 100_000, "save_steps": 50_000, "max_restarts": 0}
    words = [f"--{name}={value}" for name, value in asked.items()]
    process = subprocess.Popen(
        [sys.executable, "-m", "crosstune", "train", *words], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 900
    while len(read_jsonl(folder / "run" / "metrics.jsonl")) < 3:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.1)
    return process


@pytest.mark.slow
def test_a_signal_to_the_launcher_stops_all_with_one_checkpoint(
    tiny_model: Path, data: Path, tmp_path: Path
) -> None:
    process = start(tiny_model, data, tmp_path)
    children = ranks_of(process.pid)
    assert sorted(children) == [0, 1]
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=900)[1]
    assert process.returncode == 3, said
    [checkpoint] = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert open_checkpoint(checkpoint).step == len(losses(tmp_path / "run"))
    assert "stopped  by SIGTERM" in said
    assert not any(is_running(pid) for pid in children.values())


@pytest.mark.slow
def test_a_dead_process_ends_the_run(tiny_model: Path, data: Path, tmp_path: Path) -> None:
    process = start(tiny_model, data, tmp_path)
    children = ranks_of(process.pid)
    os.kill(children[1], signal.SIGKILL)
    said = process.communicate(timeout=900)[1]
    assert process.returncode == 128 + signal.SIGKILL, said
    assert "process 1 of 2" in said and "was killed by SIGKILL" in said
    assert not any(is_running(pid) for pid in children.values())
    if "The connection to another process of the run was lost." not in said:
        # MLX's ring sometimes waits for a process that is gone; the launcher then ends the others.
        assert "so the others were stopped" in said
        return
    summary = read_json(tmp_path / "run" / "summary.json")
    assert summary["status"] == "failed"
    # What was done until then is kept, although no checkpoint was due.
    assert open_checkpoint(Path(summary["checkpoint"])).step == summary["steps"] >= 3


def ranks_of(launcher: int) -> dict[int, int]:
    """Rank -> process, of the processes a launcher has started."""
    found = {}
    for place in Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = place.read_text(errors="replace")
        except OSError:  # of somebody else, or gone meanwhile
            continue
        if f"{LAUNCHER}={launcher}\0" in environment and (rank := re.search(r"MLX_RANK=(\d+)", environment)):
            found[int(rank[1])] = int(place.parent.name)
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
