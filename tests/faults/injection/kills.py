"""SIGKILL at every system call of a save and of a resume, and at random moments; then the verdict."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstune.checkpoint.folders import checkpoint_folders
from injection.bench import NUM_STEPS, Bench, check_finished, lost_or_torn, weights_file
from injection.crash_points import CrashPoints

SCENES = ("save and rotate", "damaged newest")
START = "first start"
"""A scene without a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One kind of fault, with all that is needed to do it again."""

    kind: str
    method: str
    seed: int
    problems: list[str]
    kills: int = 1

    def to_json(self) -> dict[str, Any]:
        return vars(self)


def count_points(bench: Bench, method: str, scene: str) -> list[str]:
    """The calls of a whole resumed run: `1 os.open`, `2 write`, ..."""
    folder = _set_scene(bench, method, scene, bench.home / f"count-{scene}-{method}")
    log = bench.home / f"points-{scene}-{method}.txt"
    log.unlink(missing_ok=True)
    ended = bench.again(method, folder, before=CrashPoints(folder, log=log).arm).wait()
    assert ended.code == 0, ended.said
    shutil.rmtree(folder)
    return log.read_text().splitlines()


def kill_at_point(bench: Bench, method: str, scene: str, number: int) -> Trial:
    """Die at a point of a resume from step 2, of its steps, its save with rotation, and its result."""
    folder = _set_scene(bench, method, scene, bench.home / f"kill-{scene}-{method}-{number}")
    problems: list[str] = []
    ended = bench.again(method, folder, before=CrashPoints(folder, die_at=number).arm).wait()
    if ended.signal != 9:
        problems.append(f"it was not killed: {ended}")
    damaged = frozenset({NUM_STEPS}) if scene == "damaged newest" else frozenset()
    problems += lost_or_torn(folder, damaged=damaged if _still_damaged(folder) else frozenset())
    problems += check_finished(bench, method, folder)
    problems += lost_or_torn(folder)
    if not problems:
        shutil.rmtree(folder)
    return Trial(kind=f"kill at call, {scene}", method=method, seed=number, problems=problems)


def kill_at_random(bench: Bench, method: str, seed: int, *, longest_s: float, num_kills: int = 3) -> Trial:
    """Kill the same command again and again as it continues, then let it finish."""
    rng = random.Random(seed)
    folder = bench.home / f"random-{method}-{seed}"
    problems: list[str] = []
    kills = 0
    for _ in range(num_kills):
        child = bench.again(method, folder)
        child.pause(rng.uniform(0, longest_s))
        child.send(9)
        kills += child.wait().signal == 9
        problems += lost_or_torn(folder)
    problems += check_finished(bench, method, folder)
    for path in folder.parent.glob(f"{folder.name}~*"):
        shutil.rmtree(path)
    if not problems:
        shutil.rmtree(folder)
    return Trial(kind="kill at random", method=method, seed=seed, problems=problems, kills=kills)


def _set_scene(bench: Bench, method: str, scene: str, folder: Path) -> Path:
    """A run at step 2, alone or with a later checkpoint that is damaged and will be set aside."""
    if folder.exists():
        shutil.rmtree(folder)
    if scene == START:
        return folder
    bench.copy_halfway(method, folder)
    if scene == "damaged newest":
        bench.reference(method)
        root = folder / "checkpoints"
        (newest,) = [p for s, p in checkpoint_folders(bench.home / f"straight-{method}" / "checkpoints")]
        shutil.copytree(newest, root / newest.name)
        damage(weights_file(folder))
    return folder


def damage(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def _still_damaged(folder: Path) -> bool:
    """Return whether the damaged checkpoint is still there under its name: the kill came before it was set aside."""
    return not list((folder / "checkpoints").glob(f"step-{NUM_STEPS:08d}~*"))
