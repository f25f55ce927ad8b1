"""Inject faults, the long version: kills, corruptions, full disks, payloads, signals; print a table of the outcomes.

    make faults
    python benchmarks/faults.py --only corruptions --corruptions 2000
    python benchmarks/faults.py --replay '{"kind": "kill at random", "method": "full", "seed": 17}'

Each failed trial is printed as a line of JSON that --replay accepts. The exit code is 1 if a trial failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "faults"))

from injection import competing, corruption, disks, full_disks, kills, payloads, rank_saves, ranks, signals
from injection.bench import METHODS, PREFERENCE, RL, Bench, check_finished, lost_or_torn
from injection.kills import Trial

from crosstune.process.this_process import stop_signals

DISK_SIZES = 40
# Calls up to the first event of the training: a resume that sets a damaged checkpoint aside.
RESUME_CALLS = 36
FOREVER_S = 1e9
START_CALLS = 84
"""Calls of a preference run up to its first checkpoint."""
STRACE_POINTS = (
    ("fsync", 4),
    ("fsync", 7),
    ("/^rename", 3),
    ("/^unlink", 9),
    ("/^symlink", 1),
    ("/^rmdir", 1),
)


def exhaustive_kills(bench: Bench, own: argparse.Namespace) -> Iterator[Trial]:
    """SIGKILL at every system call of a resume, a save with rotation, and the result."""
    for method in METHODS:
        for scene in kills.SCENES:
            num = len(kills.count_points(bench, method, scene))
            last = num if scene == kills.SCENES[0] else min(num, RESUME_CALLS)
            for number in range(own.part[0], last + 1, own.part[1]):
                yield kills.kill_at_point(bench, method, scene, number)


def random_kills(bench: Bench, own: argparse.Namespace) -> Iterator[Trial]:
    """SIGKILL at random moments of the command, several in one run."""
    done, seed = 0, own.seed
    while done < own.random_kills:
        method = list(METHODS)[seed % len(METHODS)]
        bench.reference(method)
        trial = kills.kill_at_random(bench, method, seed, longest_s=1.1 * bench.seconds)
        done, seed = done + trial.kills, seed + 1
        yield trial


def preference_kills(bench: Bench, own: argparse.Namespace) -> Iterator[Trial]:
    """SIGKILL of preference runs: at every system call of a start with its reference, and at random moments."""
    num = len(kills.count_points(bench, PREFERENCE, kills.START))
    for number in range(own.part[0], min(num, START_CALLS) + 1, own.part[1]):
        yield kills.kill_at_point(bench, PREFERENCE, kills.START, number)
    done, seed = 0, own.seed
    bench.reference(PREFERENCE)
    while done < own.random_kills // 4:
        trial = kills.kill_at_random(bench, PREFERENCE, seed, longest_s=1.1 * bench.seconds)
        done, seed = done + trial.kills, seed + 1
        yield trial


def rl_kills(bench: Bench, own: argparse.Namespace) -> Iterator[Trial]:
    """SIGKILL of rl runs in each phase: while they generate, score, train and save."""
    done, seed = 0, own.seed
    bench.reference(RL)
    while done < own.rl_kills:
        trial = kills.kill_in_phase(bench, kills.PHASES[seed % len(kills.PHASES)], seed)
        done, seed = done + trial.kills, seed + 1
        yield trial


def strace_kills(bench: Bench, own: argparse.Namespace) -> Iterator[Trial]:
    """SIGKILL from outside, at a system call of a separate process, if strace is installed."""
    if shutil.which("strace") is None:
        print("strace is not installed: no kills by it", file=sys.stderr)
        return
    for number, (call, when) in enumerate(STRACE_POINTS):
        method = list(METHODS)[number % len(METHODS)]
        folder = bench.copy_halfway(method, bench.home / f"strace-{number}")
        words = bench.words(method, folder, resume="auto")
        tracing = ["-e", f"trace={call}", "-e", f"inject={call}:signal=KILL:when={when}"]
        command = [
            "strace",
            "-f",
            "-qq",
            "-o",
            "/dev/null",
            *tracing,
            sys.executable,
            "-m",
            "crosstune",
            *words,
        ]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        killed = ended.returncode in (-9, 137)
        problems = lost_or_torn(folder) + check_finished(bench, method, folder)
        yield Trial(
            kind=f"strace {call} {when}", method=method, seed=when, problems=problems, kills=int(killed)
        )


def corruptions(bench: Bench, own: argparse.Namespace) -> Iterator[Trial]:
    """Damage a checkpoint: it must be rejected, and the older checkpoint found."""
    roots = {}
    for method in METHODS:
        folder = bench.home / f"two-checkpoints-{method}"
        ended = bench.start(method, folder, keep_last_n=2).wait()
        assert ended.code == 0, ended
        roots[method] = folder / "checkpoints"
    for number in range(own.corruptions):
        kind = corruption.KINDS[number % len(corruption.KINDS)]
        method = list(METHODS)[number // len(corruption.KINDS) % len(METHODS)]
        place = bench.home / "damaged"
        yield corruption.corrupt(kind, roots[method], seed=own.seed + number, place=place, method=method)


def full_disks_of_runs(bench: Bench, own: argparse.Namespace) -> Iterator[Trial]:
    """Disks of many sizes, limits on file sizes, folders that break."""
    mounts = disks.can_mount(bench.home)
    if not mounts:
        print("no right to mount: only limits on file sizes are tried", file=sys.stderr)
    for number in range(DISK_SIZES):
        share = -0.06 + 1.26 * number / (DISK_SIZES - 1)
        if mounts:
            yield disks.fill_disk(bench, "full", share=share, checked=False)
            yield disks.fill_disk(bench, "full", share=share, checked=True)
        yield disks.limit_file_size(bench, "full", limit_bytes=1000 + 8000 * number)
    for how in disks.BREAKS if mounts else ():
        for on_save_error in ("stop", "continue"):
            yield disks.break_while_saving(bench, "lora", how, on_save_error=on_save_error)


def full_disks_of_writers(bench: Bench, own: argparse.Namespace) -> Iterator[Trial]:
    """Disks that fill, and limits on file sizes, at every tenth of the bytes that each writing command takes."""
    names = own.writers.split(",") if own.writers else [*full_disks.LONG, *full_disks.WRITERS]
    names = list(dict.fromkeys(names))
    if own.jobs > 1:
        with ThreadPoolExecutor(own.jobs) as pool:
            for found in pool.map(lambda name: _in_a_process(name, own), names):
                yield from found
        return
    mounts = disks.can_mount(bench.home)
    if not mounts:
        print("no right to mount: only limits on file sizes are tried", file=sys.stderr)
    inputs = full_disks.Inputs(bench.home / "writers", mounts=mounts)
    for name in names:
        if time.monotonic() > own.ends_at:
            break
        sizes = full_disks.measure(inputs, name)
        if sizes is None:
            print(f"writers: {name} needs a package that is not installed", flush=True)
            continue
        peak, largest = sizes
        for tenth in range(own.tenths[0] - 1, 10, own.tenths[1]):
            if time.monotonic() > own.ends_at:
                break
            if mounts:
                yield full_disks.fill(inputs, name, tenth=tenth, peak=peak)
            yield full_disks.limit(inputs, name, tenth=tenth, largest=largest)


def _in_a_process(writer: str, own: argparse.Namespace) -> list[Trial]:
    """Try the disks of one writing command in a process of its own, and return its trials."""
    left_s = own.ends_at - time.monotonic()
    if left_s < 0:
        print(f"writers: no time for {writer}", file=sys.stderr, flush=True)
        return []
    words = [
        "--only",
        "writers",
        "--writers",
        writer,
        "--tenths",
        "{}/{}".format(*own.tenths),
        "--show",
        "all",
    ]
    command = [sys.executable, __file__, *words, *(["--seconds", str(left_s)] if left_s < FOREVER_S else [])]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    trials = [Trial(**json.loads(line)) for line in ended.stdout.splitlines() if line.startswith("{")]
    print(f"writers: {writer}, {len(trials)} trials", file=sys.stderr, flush=True)
    if missing := [line for line in ended.stdout.splitlines() if line.endswith("is not installed")]:
        print(missing[0], flush=True)
    elif ended.returncode not in (0, 1) or not trials:
        trials.append(
            Trial(kind=f"disk: {writer}", method="", seed=0, problems=[ended.stderr[-1500:]], kills=0)
        )
    return trials


def malicious(bench: Bench, own: argparse.Namespace) -> Iterator[Trial]:
    """Payloads in every place where a file is read."""
    bench.reference("lora")
    for name in payloads.PAYLOADS:
        yield payloads.try_payload(bench, name)


def early_ends(bench: Bench, own: argparse.Namespace) -> Iterator[Trial]:
    """Signals, time limit, numbers that are not finite, two processes at once."""
    for number in range(own.signals):
        method = list(METHODS)[number % len(METHODS)]
        for sent in stop_signals():
            yield signals.stop_by_signal(bench, method, sent, own.seed + number)
        yield signals.stop_at_once(bench, method, own.seed + number)
    for method in METHODS:
        yield signals.stop_by_time(bench, method)
        yield signals.diverge(bench, method)
    for method in ("lora", "qlora"):  # on a frozen base
        yield signals.bad_example(bench, method, allowed=0)
        yield signals.bad_example(bench, method, allowed=1)
    for options in ({}, {"resume": "auto"}, {"overwrite": True}, {"resume": "auto", "overwrite": True}):
        yield signals.second_process(bench, "lora", **options)


def competing_starts(bench: Bench, own: argparse.Namespace) -> Iterator[Trial]:
    """Two processes that start the same run, held up, killed and stopped at random moments."""
    for method in METHODS:
        for moment in competing.MOMENTS:
            for resume in ("none", "auto"):
                yield competing.late_start(bench, method, moment, resume=resume)
    done, seed = 0, own.seed
    while done < own.competing:
        method = list(METHODS)[seed % len(METHODS)]
        trial = competing.kills_and_signals(bench, method, seed, num=20)
        done, seed = done + trial.kills, seed + 1
        yield trial


def killed_ranks(bench: Bench, own: argparse.Namespace) -> Iterator[Trial]:
    """SIGKILL of ranks at random moments in runs of 2 and 4 processes, which recover automatically; and stopped ranks."""
    done, seed = 0, own.seed
    while done < own.rank_kills:
        method = ("lora", "full")[seed // 2 % 2]
        trial = ranks.kill_ranks(bench, seed, size=(2, 4)[seed % 2], num_kills=5, method=method)
        done, seed = done + trial.kills, seed + 1
        print(f"ranks: {done} of {own.rank_kills} kills", file=sys.stderr, flush=True)
        yield trial
    for size in (2, 4):
        for rank in (0, size - 1):
            yield ranks.stop_rank(bench, size=size, rank=rank, limit_s=15.0, late_s=5.0)


def killed_in_parts(bench: Bench, own: argparse.Namespace) -> Iterator[Trial]:
    """SIGKILL of one of two ranks at every stage of a save in parts, which both recover from."""
    for method, scene, rank in itertools.product(("full", "lora"), rank_saves.SAVES, range(rank_saves.SIZE)):
        points = rank_saves.points_of(bench, method, scene, rank)
        numbers = rank_saves.distinct(points)[own.part[0] - 1 :: own.part[1]]
        for done, number in enumerate(numbers, 1):
            yield rank_saves.kill_at_point(bench, method, scene, rank, number)
            print(
                f"parts: {method}, {scene}, rank {rank}: {done} of {len(numbers)}",
                file=sys.stderr,
                flush=True,
            )


SECTIONS: dict[str, Callable[[Bench, argparse.Namespace], Iterator[Trial]]] = {
    "kills": exhaustive_kills,
    "random_kills": random_kills,
    "preference": preference_kills,
    "rl": rl_kills,
    "strace": strace_kills,
    "corruptions": corruptions,
    "disks": full_disks_of_runs,
    "writers": full_disks_of_writers,
    "payloads": malicious,
    "signals": early_ends,
    "competing": competing_starts,
    "ranks": killed_ranks,
    "parts": killed_in_parts,
}


def replay(bench: Bench, asked: dict[str, Any]) -> Trial:
    kind, method, seed = asked["kind"], asked["method"], int(asked["seed"])
    bench.reference(method)
    if kind == "kill at random":
        return kills.kill_at_random(bench, method, seed, longest_s=1.1 * bench.seconds)
    if kind.startswith("kill in phase "):
        return kills.kill_in_phase(bench, kind.removeprefix("kill in phase "), seed)
    if kind.startswith("kill ranks of "):
        size = int(kind.removeprefix("kill ranks of "))
        return ranks.kill_ranks(bench, seed, size=size, num_kills=5, method=method)
    if kind.startswith("kill rank "):
        rank, _, scene = kind.removeprefix("kill rank ").partition(" in parts, ")
        return rank_saves.kill_at_point(bench, method, scene, int(rank), seed)
    if kind.startswith("kill at call, "):
        return kills.kill_at_point(bench, method, kind.removeprefix("kill at call, "), seed)
    if kind.startswith("payload: "):
        return payloads.try_payload(bench, kind.removeprefix("payload: "))
    (damage,) = [one for one in corruption.KINDS if one.__name__ == kind]
    folder = bench.home / "two-checkpoints"
    assert bench.start(method, folder, keep_last_n=2).wait().code == 0
    return corruption.corrupt(
        damage, folder / "checkpoints", seed=seed, place=bench.home / "damaged", method=method
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)}; with commas")
    parser.add_argument(
        "--part",
        type=_read_part,
        default=(1, 1),
        metavar="I/N",
        help="of the kills at every call, only those of process I of N, to divide them over processes",
    )
    parser.add_argument("--random_kills", type=int, default=120)
    parser.add_argument("--rl_kills", type=int, default=40, help="of the section rl")
    parser.add_argument("--corruptions", type=int, default=2000)
    parser.add_argument("--signals", type=int, default=12, help="of each kind")
    parser.add_argument("--competing", type=int, default=200, help="kills and signals over two processes")
    parser.add_argument("--rank_kills", type=int, default=40, help="in runs of 2 and 4 processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--writers", default="", help="of the section writers, some commands, with commas")
    parser.add_argument(
        "--tenths",
        type=_read_part,
        default=(1, 1),
        metavar="I/N",
        help="of the section writers, every Nth tenth from I",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="of the section writers, commands that run at once"
    )
    parser.add_argument(
        "--seconds", type=float, default=FOREVER_S, help="of the section writers, a time limit"
    )
    parser.add_argument("--show", choices=("failed", "all"), default="failed", help="trials that are printed")
    parser.add_argument("--replay", help="one trial, as a failing one was printed")
    own = parser.parse_args()
    own.ends_at = time.monotonic() + own.seconds
    if unknown := [name for name in own.only.split(",") if name not in SECTIONS]:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    with tempfile.TemporaryDirectory(prefix="crosstune-faults-") as home:
        bench = Bench(Path(home))
        if own.replay:
            trial = replay(bench, json.loads(own.replay))
            print(json.dumps(trial.to_json()))
            sys.exit(bool(trial.problems))
        rows = [_run_section(name, bench, own) for name in own.only.split(",")]
    print("| faults | trials | kills, stops | failures | seconds |\n|---|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |")
    sys.exit(any(row[3] for row in rows))


def _read_part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not 1 <= int(part) <= int(parts):
        raise argparse.ArgumentTypeError("give I/N with I from 1 to N")
    return int(part), int(parts)


def _run_section(name: str, bench: Bench, own: argparse.Namespace) -> tuple[str, int, int, int, int]:
    trials = num_kills = failures = 0
    started = time.monotonic()
    for trial in SECTIONS[name](bench, own):
        trials, num_kills = trials + 1, num_kills + trial.kills
        failures += bool(trial.problems)
        if trial.problems or own.show == "all":
            print(json.dumps(trial.to_json()), flush=True)
        if trials % 50 == 0:
            print(f"{name}: {trials} trials, {failures} failures", file=sys.stderr, flush=True)
    return (
        (SECTIONS[name].__doc__ or name).strip().rstrip("."),
        trials,
        num_kills,
        failures,
        round(time.monotonic() - started),
    )


if __name__ == "__main__":
    main()
