"""A run whose folder is renamed, replaced or removed stops, keeps its last step, and reports its location."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support import chat

from crosstune import UserError, train
from crosstune.checkpoint.read import newest_valid
from crosstune.checkpoint.write import SaveFailed
from crosstune.files.json_files import read_jsonl
from crosstune.files.run_record import RecordFailed, RunRecord
from crosstune.runs.watch_folder import FolderWatch


@pytest.fixture
def options(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    rows = [chat(f"{n}?", "yes") for n in range(8)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fixed = {"backend": "cpu", "precision": "fp32", "skip_eval": True, "batch_size": 2, "progress": False}
    return {"model_name": str(tiny_model), "dataset": "data.jsonl", **fixed}


@pytest.mark.parametrize(("lost", "save_steps"), [("renamed", 1), ("removed", 100), ("link elsewhere", 100)])
def test_the_last_step_is_kept(lost: str, save_steps: int, options: dict[str, Any]) -> None:
    folder, elsewhere = Path("runs/mine"), Path("runs/elsewhere")
    now = folder if lost == "removed" else Path("runs/renamed")

    def lose(metrics: Any) -> None:
        if metrics["step"] != 3:
            return
        while lost == "removed" and folder.exists():
            shutil.rmtree(folder, ignore_errors=True)  # a checkpoint may be written at the same time
        if lost != "removed":
            folder.rename(now)
        if lost == "link elsewhere":
            elsewhere.mkdir()
            folder.symlink_to(elsewhere.absolute())

    with pytest.raises(UserError, match=r"The run folder runs/mine was re(named|moved)") as caught:
        train(**options, name="mine", max_steps=50, save_steps=save_steps, callbacks=[lose])
    assert caught.value.exit_code == 2
    assert f"crosstune train --resume {now if lost == 'removed' else now.absolute()}" in caught.value.do
    kept = newest_valid(now / "checkpoints")
    assert kept is not None and 3 <= kept.step <= 4
    assert json.loads((now / "summary.json").read_text())["status"] == "stopped"
    run = train(**{**options, "max_steps": 6}, resume=str(now))
    assert run.status == "finished" and run.summary["steps"] == 6
    if lost != "removed":
        assert [row["step"] for row in read_jsonl(now / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
        assert not list(folder.iterdir() if folder.exists() else ()), "nothing is written to the old name"


def test_a_run_continues_behind_a_link_to_its_folder(options: dict[str, Any]) -> None:
    """A user moves the folder to a larger disk during the run and leaves a link at its old place."""
    folder, now = Path("runs/mine"), Path("disk").absolute()

    def move(metrics: Any) -> None:
        if metrics["step"] == 3:
            folder.rename(now)
            folder.symlink_to(now)

    run = train(**options, name="mine", max_steps=6, save_steps=2, callbacks=[move])
    assert run.status == "finished" and (now / "adapter").is_dir()
    kept = newest_valid(now / "checkpoints")
    assert kept is not None and kept.step == 6
    assert [row["step"] for row in read_jsonl(now / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_a_disk_that_is_gone_is_no_removed_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder keeps its links, and nothing may be written to the folder that the disk was mounted on."""
    folder, found = tmp_path / "disk" / "run", list[Path]()
    folder.mkdir(parents=True)
    watch = FolderWatch(folder, on_lost=found.append)
    monkeypatch.setattr("crosstune.runs.watch_folder._path_of", lambda handle: None)
    folder.parent.rename(tmp_path / "elsewhere")
    folder.parent.mkdir()
    assert watch.look() is None and not found and not folder.exists()
    watch.close()


def test_steps_are_kept_when_the_log_cannot_be_written(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = RunRecord._append

    def fill(self: RunRecord, file: Any, data: Any) -> None:
        if data.get("step") == 3 and "loss" in data:
            raise RecordFailed(Path(file.name), OSError(errno.ENOSPC, "No space left on device"))
        whole(self, file, data)

    monkeypatch.setattr(RunRecord, "_append", fill)
    with pytest.raises(RecordFailed, match=r"[MG]B are free"):
        train(**options, name="mine", max_steps=9, save_steps=100)
    kept = newest_valid(Path("runs/mine/checkpoints"))
    assert kept is not None and kept.step == 3


def test_a_result_without_room_is_refused_with_both_sizes(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {"mine": 5_000, "checkpoints": 10**9}
    monkeypatch.setattr("crosstune.checkpoint.write.free_space", lambda folder: free[folder.name])
    with pytest.raises(SaveFailed, match=r"[\d.]+ kB are needed, but only 5.0 kB are free"):
        train(**options, name="mine", max_steps=2, save_steps=1)
    assert newest_valid(Path("runs/mine/checkpoints")) is not None
    assert not (Path("runs/mine") / "adapter").exists()


def test_a_result_that_fits_is_saved_when_no_checkpoint_does(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched, pytest.raises(SaveFailed) as caught:
        patched.setattr("crosstune.checkpoint.write.free_space", lambda folder: 4_000_000)
        train(**options, name="mine", max_steps=4, save_steps=2)
    # Both parts of what is needed, so that they exceed what is free.
    assert "kB are needed, and 4 MB for the records of the run, but only 4 MB are free" in caught.value.why
    assert "then run it again with" in caught.value.do  # there is nothing to continue from
    assert (Path("runs/mine") / "adapter").is_dir() and newest_valid(Path("runs/mine/checkpoints")) is None
    assert train(**options, name="mine", max_steps=4, save_steps=2, resume="auto").summary["steps"] == 4
