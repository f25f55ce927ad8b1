"""Two processes that start the same run: one waits at some moment while the other trains to the end."""

from __future__ import annotations

import random
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

from crosstune.checkpoint.rotate import Keep
from crosstune.files.json_files import read_json
from crosstune.process.this_process import stop_signals
from injection.bench import Bench, die_after, differences, lost_or_torn, read_bits
from injection.kills import Trial
from injection.signals import LONG, long_reference

MOMENTS = ("before the lock", "at its first line", "when the model is loaded")


def late_start(bench: Bench, method: str, moment: str, *, resume: str) -> Trial:
    """B starts and is held up; A trains the same run to its end; B goes on. Nothing that A did may be lost."""
    wanted = long_reference(bench, method)
    name = f"late-{MOMENTS.index(moment)}-{method}-{resume}"
    folder, gate = bench.home / name, bench.home / f"{name}.gate"
    options: dict[str, Any] = {"resume": resume, **LONG, "keep_last_n": 1}
    if resume == "auto":  # both continue a run of ten steps
        killed = bench.start(method, folder, before=partial(die_after, 10), **LONG).wait()
        assert killed.signal == signal.SIGKILL, killed
    late = bench.start(method, folder, before=partial(_wait_at, moment, gate), **options)
    _wait_for(gate)
    early = bench.start(method, folder, **options).wait()
    gate.unlink()
    ended = late.wait()
    problems = []
    for who, end in (("A", early), ("B", ended)):
        if end.code not in (0, 2) or "Traceback" in end.said:
            problems.append(f"{who} ended with {end}")
    if early.code != 0 and ended.code != 0:
        problems.append(f"neither trained: {early} and {ended}")
    problems += differences(read_bits(folder), wanted) + lost_or_torn(folder)
    problems += [f"{path.name} was set aside" for path in _set_aside(folder)]
    if read_json(folder / "summary.json").get("status") != "finished":
        problems.append("the summary is not that of the finished run")
    return _done(f"late start {moment}, resume {resume}", method, 0, problems, folder)


def kills_and_signals(bench: Bench, method: str, seed: int, *, num: int) -> Trial:
    """Two processes start the same run again and again, and are killed or stopped at random moments, until it is done."""
    wanted, rng = long_reference(bench, method), random.Random(seed)
    folder = bench.home / f"competing-{method}-{seed}"
    options: dict[str, Any] = {**LONG, "save_steps": 3, "resume": "auto"}
    problems, sent = [], 0
    while sent < num:
        children = [bench.start(method, folder, **options) for _ in range(2)]
        for child in rng.sample(children, k=2):
            time.sleep(rng.uniform(0, 0.8 * max(bench.seconds, 0.5)))
            number = rng.choice([signal.SIGKILL, *stop_signals()])
            if child.alive():
                child.send(number)
                sent += 1
        for child in children:
            ended = child.wait()
            if "Traceback" in ended.said or ended.code not in (None, 0, 2, 3, 130):
                problems.append(f"it ended with {ended}")
        problems += lost_or_torn(folder, keep=Keep(last_n=LONG["keep_last_n"], best=False))
        if problems:
            break
        if read_json(folder / "summary.json").get("status") == "finished":
            problems += differences(read_bits(folder), wanted)
            shutil.rmtree(folder)
    if not problems:
        ended = bench.start(method, folder, **options, overwrite=True).wait()
        problems += (
            differences(read_bits(folder), wanted) if ended.code == 0 else [f"the last start: {ended}"]
        )
    return _done("two processes", method, seed, problems, folder, kills=sent)


def _set_aside(folder: Path) -> list[Path]:
    return [*folder.parent.glob(f"{folder.name}~*"), *(folder / "checkpoints").glob("*~*")]


def _wait_at(moment: str, gate: Path) -> None:
    """Make this process wait at a moment of its start, from when it has made `gate` until that is removed."""
    from crosstune.runs import pipeline as run
    from crosstune.runs.execute import Execution

    places: dict[str, tuple[Any, str]] = {
        "before the lock": (run, "choose_folder"),
        "at its first line": (run, "describe"),
        "when the model is loaded": (Execution, "_train"),
    }
    home, name = places[moment]
    plain = getattr(home, name)

    def held(*args: Any, **options: Any) -> Any:
        gate.touch()
        while gate.exists():
            time.sleep(0.01)
        return plain(*args, **options)

    setattr(home, name, held)


def _wait_for(gate: Path) -> None:
    end = time.monotonic() + 900
    while not gate.exists():
        assert time.monotonic() < end, f"{gate} was not made in time"
        time.sleep(0.01)


def _done(kind: str, method: str, seed: int, problems: list[str], folder: Path, *, kills: int = 0) -> Trial:
    if not problems:
        for path in [folder, *_set_aside(folder)]:
            shutil.rmtree(path, ignore_errors=True)
    return Trial(kind=kind, method=method, seed=seed, problems=problems, kills=kills)
