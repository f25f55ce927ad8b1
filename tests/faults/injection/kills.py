"""SIGKILL at every system call of a save and of a resume, and at random moments; then the verdict."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from crosstune.checkpoint.folders import checkpoint_folders
from injection.bench import NUM_STEPS, RL, Bench, check_finished, lost_or_torn, weights_file
from injection.crash_points import CrashPoints

SCENES = ("save and rotate", "damaged newest")
START = "first start"
"""A scene without a checkpoint."""
PHASES = ("generate", "reward", "train", "save")
"""The phases of a step of the rl recipe."""
LATEST_S = 0.05
"""A kill in a phase comes this long after its start, or earlier."""


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


def kill_in_phase(bench: Bench, phase: str, seed: int, *, num_kills: int = 2) -> Trial:
    """Kill a run of the rl recipe in a phase, and again as it continues, then let it finish."""
    rng = random.Random(f"{phase} {seed}")
    folder = bench.home / f"{phase}-{seed}"
    problems: list[str] = []
    kills = 0
    for _ in range(num_kills):
        dies = partial(die_in, phase, call=rng.randint(1, 2), after_s=rng.uniform(0, LATEST_S))
        kills += bench.again(RL, folder, before=dies).wait().signal == 9
        problems += lost_or_torn(folder)
    problems += check_finished(bench, RL, folder)
    if not problems:
        shutil.rmtree(folder)
    return Trial(kind=f"kill in phase {phase}", method=RL, seed=seed, problems=problems, kills=kills)


def die_in(phase: str, *, call: int, after_s: float) -> None:
    """End this process with SIGKILL, this long after a phase begins for the time `call`."""
    from crosstune.recipes.rl.rollouts import Generator
    from crosstune.torch_engine.session.text_session import TextSession

    owner, name = {
        "generate": (Generator, "answer"),
        "reward": (Generator, "score"),
        "train": (TextSession, "backward"),
        "save": (TextSession, "export_state"),
    }[phase]
    plain, calls = getattr(owner, name), [0]

    def run(*args: Any, **parts: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return plain(*args, **parts)

    setattr(owner, name, run)


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
