"""The model cache contains complete models only: with several processes, after a kill, and on a full disk."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crosstune.core.errors import UserError
from crosstune.files.atomic_files import staged_name
from crosstune.models import cache
from crosstune.models.file_hashes import write_checksums
from crosstune.models.staged import DiskFullError

HELD_INSTALL = """
import sys, time
from pathlib import Path
from crosstune.models import cache

def build(folder, scratch):
    with open(sys.argv[2], "a") as log:
        log.write("built\\n")
    (folder / "first.bin").write_bytes(b"1" * 1000)
    while not Path(sys.argv[3]).exists():
        time.sleep(0.01)
    (folder / "second.bin").write_bytes(b"2" * 1000)

print(cache.install("slow", build, need_bytes=2000, source={"kind": "test"}))
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSTUNE_CACHE", str(tmp_path))


def install(name: str, build: Callable[[Path, Path], None], cache_folder: Path, **options: Any) -> Path:
    return cache.install(name, build, **{"need_bytes": 1, "source": {"kind": "test"}} | options)


def build_small(folder: Path, scratch: Path) -> None:
    (scratch / "leftover").write_text("not part of the model")
    (folder / "weights.bin").write_bytes(b"w" * 5000)


def build_never(folder: Path, scratch: Path) -> None:
    raise AssertionError("a valid model is not made again")


def staged(root: Path) -> list[Path]:
    return [path for path in (root / "models").iterdir() if staged_name(path)]


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 300
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.01)


def test_installs_once_and_reuses(tmp_path: Path) -> None:
    folder = install("m", build_small, tmp_path)
    assert folder == tmp_path / "models" / "m"
    assert sorted(path.name for path in folder.iterdir()) == ["crosstune.json", "weights.bin"]
    marker = json.loads((folder / "crosstune.json").read_text())
    assert marker["source"] == {"kind": "test"}
    assert marker["files"]["weights.bin"]["bytes"] == 5000
    assert cache.check(folder) == []
    assert staged(tmp_path) == []
    assert install("m", build_never, tmp_path) == folder


def test_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path, scratch: Path) -> None:
        build_small(folder, scratch)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        install("m", fail, tmp_path)
    assert staged(tmp_path) == []
    assert cache.list_models() == []


def test_two_processes_make_a_model_once(tmp_path: Path) -> None:
    log, go = tmp_path / "log", tmp_path / "go"
    other = start(HELD_INSTALL, tmp_path, log, go)
    wait_for(log)
    stages = []

    def release(stage: str, done: int, total: int | None) -> None:
        stages.append(stage)
        go.touch()

    folder = install("slow", build_never, tmp_path, progress=release)
    assert other.communicate(timeout=300)[0] == f"{folder}\n"
    assert (other.returncode, stages, log.read_text()) == (0, ["wait"], "built\n")


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL, which Windows does not have")
def test_leftovers_of_killed_processes_are_removed_and_live_ones_kept(tmp_path: Path) -> None:
    other = start(HELD_INSTALL, tmp_path, tmp_path / "log", tmp_path / "go")
    wait_for(tmp_path / "log")
    install("first", build_small, tmp_path)
    assert [staged_name(path) for path in staged(tmp_path)] == ["slow"]
    other.kill()
    other.communicate(timeout=300)
    assert [model.name for model in cache.list_models()] == ["first"]
    install("second", build_small, tmp_path)
    assert staged(tmp_path) == []
    install("slow", build_small, tmp_path)
    assert cache.check(tmp_path / "models" / "slow") == []


@pytest.mark.parametrize("damage", ["short", "missing", "marker", "older", "changed"])
def test_a_damaged_model_is_made_again(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    def build(folder: Path, scratch: Path) -> None:
        build_small(folder, scratch)
        if damage == "changed":
            write_checksums(folder)

    folder = install("m", build, tmp_path)
    weights, marker = folder / "weights.bin", folder / cache.MARKER
    if damage == "changed":
        weights.write_bytes(b"v" * weights.stat().st_size)
        assert cache.check(folder, source={"kind": "test"})
    elif damage == "short":
        weights.write_bytes(b"w" * 4999)
    elif damage == "missing":
        weights.unlink()
    elif damage == "marker":
        marker.write_text("{")
    else:
        marker.write_text(marker.read_text().replace('"layout": 1', '"layout": 0'))
    if damage != "changed":
        assert cache.check(folder)
        assert cache.list_models()[0].problems
    assert install("m", build, tmp_path) == folder
    assert cache.check(folder, source={"kind": "test"}) == []
    assert "is made again" in caplog.text


def test_list_and_remove(tmp_path: Path) -> None:
    assert cache.list_models() == []
    folder = install("m", build_small, tmp_path)
    (model,) = cache.list_models()
    assert (model.name, model.path, model.source, model.problems) == ("m", folder, {"kind": "test"}, [])
    assert cache.remove_model("m") == model.size_bytes > 5000
    assert not folder.exists()
    with pytest.raises(UserError, match="Unknown cached model 'm'"):
        cache.remove_model("m")


def test_the_disk_space_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crosstune.models.staged.free_space", lambda folder: 100_000_000)
    with pytest.raises(DiskFullError) as caught:
        install("m", build_never, tmp_path, need_bytes=400_000_000)
    message = str(caught.value)
    assert "needs about 400 MB" in message
    assert "100 MB are free" in message
    assert str(tmp_path) in message
    assert "CROSSTUNE_CACHE" in message


def test_a_library_that_cannot_write_on_a_disk_with_room_met_a_limit(tmp_path: Path) -> None:
    for words, advice in (
        ("Unable to write 5 bytes to file", "ulimit -f"),
        ("No space left on device", "free some space"),
    ):
        assert advice in str(DiskFullError(tmp_path, 1, cause=words))
    full = str(DiskFullError(tmp_path, 10**18, cause="Unable to write 5 bytes to file"))
    assert "free some space" in full


FILE_LIMIT = """
import resource, sys
from pathlib import Path
from crosstune.core.errors import UserError
from crosstune.models.locate import locate
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    locate("tiny-random")
except UserError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs setrlimit")
def test_a_disk_that_fills_up_during_the_build(tmp_path: Path) -> None:
    output, _ = start(FILE_LIMIT, tmp_path).communicate(timeout=300)
    assert "not enough disk space for the model" in output
    assert "File too large" in output and "ulimit -f" in output and "free some space" not in output
    assert staged(tmp_path) == []
    assert cache.list_models() == []
