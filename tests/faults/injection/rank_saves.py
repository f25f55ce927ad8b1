"""Kill one of two ranks at every stage of a save that is written in parts; then the verdict.

The ranks are forks of a warm process with the variables that the launcher sets. After the kill the other rank has to end
by itself; then both are started as the launcher restarts them.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from crosstune.checkpoint.folders import checkpoint_folders
from crosstune.core.errors import EXIT_PEER_LOST
from crosstune.distributed.environment import ATTEMPT, LAUNCH_FOLDER, LAUNCHER
from crosstune.distributed.master import free_ports
from injection.bench import Bench, Bits, differences, lost_or_torn, read_bits, untidy
from injection.children import Ended
from injection.crash_points import CrashPoints
from injection.kills import Trial
from injection.ranks import ALIKE

SIZE = 2
OPTIONS: dict[str, Any] = {"world_size": SIZE} | ALIKE
SAVES = {"first save": 1, "save and rotate": 2}
"""Scene -> which save of the run it is."""


def straight(bench: Bench, method: str) -> Bits:
    """The bits of the run that nothing interrupts; it also counts the points of its saves."""
    folder = bench.home / f"straight-parts-{method}"
    if not folder.exists():
        counted = {
            rank: {
                save: CrashPoints(folder, log=_log_of(bench, method, scene, rank))
                for scene, save in SAVES.items()
            }
            for rank in range(SIZE)
        }
        before = {rank: partial(_arm, points) for rank, points in counted.items()}
        ended = _attempt(bench, method, folder, 0, before=before)
        assert all(end.code == 0 for end in ended.values()), [str(end) for end in ended.values()]
        for _, checkpoint in checkpoint_folders(folder / "checkpoints"):
            assert len(list(checkpoint.glob("weights-*-of-00002.safetensors"))) == SIZE
    return read_bits(folder)


def points_of(bench: Bench, method: str, scene: str, rank: int) -> list[str]:
    """Return the stages of one rank in a save of the run, in order: `collective`, `mkdir`, `write`, ..."""
    straight(bench, method)
    return [line.split(" ", 1)[1] for line in _log_of(bench, method, scene, rank).read_text().splitlines()]


def distinct(points: Sequence[str]) -> list[int]:
    """Return the numbers of the first and the last point of each row of equal ones, such as the writes of one file."""
    rows = [list(row) for _, row in itertools.groupby(enumerate(points, 1), key=lambda point: point[1])]
    return sorted({number for row in rows for number, _ in (row[0], row[-1])})


def kill_at_point(bench: Bench, method: str, scene: str, rank: int, number: int) -> Trial:
    """Let a rank die at a stage of a save, restart both, and compare with the run that nothing interrupts."""
    wanted = straight(bench, method)
    folder = bench.home / f"kill-parts-{method}-{scene}-{rank}-{number}"
    points = {SAVES[scene]: CrashPoints(folder, die_at=number)}
    ended = _attempt(bench, method, folder, 0, before={rank: partial(_arm, points)})
    problems = [] if ended[rank].signal == 9 else [f"rank {rank} was not killed: {ended[rank]}"]
    if (other := ended[1 - rank]).code != EXIT_PEER_LOST:
        problems.append(f"rank {1 - rank} did not notice the kill: {other}")
    problems += lost_or_torn(folder)
    again = _attempt(bench, method, folder, 1)
    problems += [f"the restarted rank {one} ended with {end}" for one, end in again.items() if end.code != 0]
    if not problems:
        problems = [*differences(read_bits(folder), wanted), *lost_or_torn(folder), *untidy(folder)]
    if not problems:
        shutil.rmtree(folder)
        for aside in folder.parent.glob(f"{folder.name}~*"):
            shutil.rmtree(aside)
    return Trial(kind=f"kill rank {rank} in parts, {scene}", method=method, seed=number, problems=problems)


def _attempt(
    bench: Bench,
    method: str,
    folder: Path,
    attempt: int,
    *,
    before: Mapping[int, Callable[[], None]] | None = None,
) -> dict[int, Ended]:
    """Start both ranks as an attempt of the launcher and wait for their end."""
    notes = folder.with_name(f"{folder.name}.launch")
    notes.mkdir(exist_ok=True)
    [port] = free_ports(1)
    shared = {
        "WORLD_SIZE": SIZE,
        "LOCAL_WORLD_SIZE": SIZE,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        ATTEMPT: attempt,
        LAUNCHER: os.getpid(),
        LAUNCH_FOLDER: notes,
    }
    children = {
        rank: bench.start(
            method,
            folder,
            before=partial(
                _become_rank, shared | {"RANK": rank, "LOCAL_RANK": rank}, (before or {}).get(rank)
            ),
            **OPTIONS,
        )
        for rank in range(SIZE)
    }
    ended = {rank: child.wait() for rank, child in children.items()}
    if attempt:
        shutil.rmtree(notes)
    return ended


def _become_rank(variables: Mapping[str, Any], then: Callable[[], None] | None) -> None:
    """Set the variables of a rank in a fork, and write any state in parts."""
    from crosstune.torch_engine.session import session

    os.environ.update({name: str(value) for name, value in variables.items()})
    session.LARGE_STATE_BYTES = 0
    if then is not None:
        then()


def _arm(points: Mapping[int, CrashPoints]) -> None:
    """Count the points of this rank in some of its saves: the calls that change the folder, and the collectives."""
    from crosstune.loop.save import Checkpoints
    from crosstune.torch_engine.group import TorchGroup

    plain, numbers = Checkpoints.save, itertools.count(1)
    for counted in points.values():
        counted.counting = False
        counted.arm()
        TorchGroup.gather = counted.watch(TorchGroup.gather, "collective")  # type: ignore[method-assign]

    def save(*args: Any, **options: Any) -> None:
        counted = points.get(next(numbers))
        if counted is None:
            return plain(*args, **options)
        counted.counting = True
        plain(*args, **options)
        counted.counting = False
        return None

    Checkpoints.save = save  # type: ignore[method-assign]


def _log_of(bench: Bench, method: str, scene: str, rank: int) -> Path:
    return bench.home / f"points-{method}-{scene}-{rank}.txt"
