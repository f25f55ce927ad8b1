"""Signals, a time limit, numbers that are not finite, and two processes in one folder."""

from __future__ import annotations

import random
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

from crosstune.checkpoint.read import newest_valid
from crosstune.checkpoint.rotate import Keep
from crosstune.core.events import StepMetrics
from crosstune.files.json_files import read_json, read_jsonl
from crosstune.files.run_record import RunRecord
from injection.bench import (
    Bench,
    acknowledged,
    differences,
    lost_or_torn,
    make_model,
    read_bits,
    stop_after,
    write_chats,
)
from injection.children import Child, Ended
from injection.kills import Trial

LONG = {"max_steps": 18, "save_steps": 10, "keep_last_n": 3}
KEEP = Keep(last_n=3, best=False)
RARE = "\u03a9"
"""A letter that only one example has."""


def long_reference(bench: Bench, method: str) -> dict[str, Any]:
    folder = bench.home / f"long-{method}"
    if not folder.exists():
        ended = bench.start(method, folder, **LONG).wait()
        assert ended.code == 0, ended
    return read_bits(folder)


def stop_by_signal(bench: Bench, method: str, number: int, seed: int) -> Trial:
    """One signal at a random moment of the training: it ends with its last step in a checkpoint, and goes on from it."""
    wanted = long_reference(bench, method)
    folder = bench.home / f"signal-{number}-{method}-{seed}"
    child = bench.start(method, folder, **LONG)
    _wait_for_steps(child, folder, num=1)
    child.pause(random.Random(seed).uniform(0, 0.6))
    child.send(number)
    ended = child.wait()
    summary = folder / "summary.json"
    done = (
        summary.exists() and read_json(summary)["status"] == "finished"
    )  # it came too late to stop anything
    problems = [] if done else _judge_stop(folder, ended)
    again = bench.start(method, folder, resume="auto", **LONG).wait()
    if again.code != 0:
        problems.append(f"the resume ended with {again}")
    else:
        problems += differences(read_bits(folder), wanted)
    return _trial(f"{signal.Signals(number).name}", method, seed, problems, folder, stopped=ended.code == 3)


def stop_at_once(bench: Bench, method: str, seed: int) -> Trial:
    """Ctrl-C twice: no wait for the step or its checkpoint, and nothing torn. Its exit code is 130, or 3 if it had stopped already."""
    rng = random.Random(seed)
    folder = bench.home / f"twice-{method}-{seed}"
    child = bench.start(method, folder, **LONG)
    _wait_for_steps(child, folder, num=1)
    child.pause(rng.uniform(0, 0.4))
    child.send(signal.SIGINT)
    child.pause(rng.uniform(0, 0.1))
    if child.alive():
        child.send(signal.SIGINT)
    ended = child.wait()
    problems = lost_or_torn(folder, keep=KEEP)
    if ended.code not in (0, 3, 130) or "Traceback" in ended.said:
        problems.append(f"it ended with {ended}")
    return _trial("SIGINT twice", method, seed, problems, folder, stopped=ended.code in (3, 130))


def stop_by_time(bench: Bench, method: str) -> Trial:
    folder = bench.home / f"time-{method}"
    bench.reference(method)
    limit = f"{8 + 2 * round(bench.seconds)}s"  # a busy machine takes its first step before it, too
    options = {"max_steps": 5000, "num_epochs": 10000, "keep_last_n": LONG["keep_last_n"]}
    ended = bench.start(method, folder, before=_pause_steps, time_limit=limit, **options).wait()
    problems = _judge_stop(folder, ended)
    events = read_jsonl(folder / "events.jsonl")
    if not any(event["kind"] == "stopped" and "time limit" in event["reason"] for event in events):
        problems.append("it does not say that it was the time limit")
    return _trial("time limit", method, 0, problems, folder, stopped=ended.code == 3)


def _pause_steps() -> None:
    """Let the time pass without computing."""
    plain = RunRecord.on_step

    def on_step(self: RunRecord, metrics: StepMetrics) -> None:
        plain(self, metrics)
        time.sleep(0.2)

    RunRecord.on_step = on_step  # type: ignore[method-assign]


def diverge(bench: Bench, method: str) -> Trial:
    """A learning rate that no weight survives: the step after is not finite."""
    folder = bench.home / f"diverge-{method}"
    ended = bench.start(method, folder, before=_raise_rate, save_steps=1).wait()
    problems = lost_or_torn(folder)
    if ended.code != 2 or "not a finite number" not in ended.said or "Traceback" in ended.said:
        problems.append(f"it ended with {ended}")
    (event,) = [e for e in read_jsonl(folder / "events.jsonl") if e["kind"] == "nonfinite"]
    done = read_jsonl(folder / "metrics.jsonl")
    if event["step"] != len(done) + 1 or not event["examples"] or not event["blame"]:
        problems.append(f"the event is {event}")
    return _trial("diverges", method, 0, problems, folder)


def _raise_rate() -> None:
    """The option takes no such rate."""
    from crosstune.loop import step

    step.learning_rate = lambda *args, **options: 1e30


def bad_example(bench: Bench, method: str, *, allowed: int) -> Trial:
    """One example meets a frozen weight that is not finite; its step is left out, where that is allowed."""
    folder = bench.home / f"bad-{method}-{allowed}"
    model, data, row = _plant_bad_token(bench.home / "bad")
    options = {"model_name": model, "dataset": data, "num_epochs": 1, "max_steps": -1, "packing": False}
    ended = bench.start(
        method, folder, **options, skip_nonfinite=allowed, save_steps=1, keep_last_n=99
    ).wait()
    events = [e for e in read_jsonl(folder / "events.jsonl") if e["kind"] == "nonfinite"]
    rows = read_jsonl(folder / "metrics.jsonl")
    problems = [] if ended.code == (0 if allowed else 2) else [f"it ended with {ended}"]
    if len(events) != 1 or row not in events[0]["examples"] or "embed_tokens" not in events[0]["blame"]:
        return _trial("one bad example", method, allowed, [*problems, f"the events are {events}"], folder)
    skipped = [line["step"] for line in rows if line.get("skipped")]
    if skipped != ([events[0]["step"]] if allowed else []):
        problems.append(f"steps {skipped} were left out")
    newest = newest_valid(folder / "checkpoints")
    if newest is None or newest.step != len(rows) or newest.step not in acknowledged(folder):
        problems.append("the last good step is not in a checkpoint")
    summary = read_json(folder / "summary.json")
    if summary["skipped_steps"] != len(skipped):
        problems.append(f"the summary counts {summary['skipped_steps']}")
    return _trial(f"one bad example, {allowed} allowed", method, allowed, problems, folder)


def second_process(bench: Bench, method: str, **options: Any) -> Trial:
    """The same folder twice at once: the second is refused, the first goes on as if nothing had been."""
    folder = bench.home / f"two-{method}"
    child = bench.start(method, folder, before=partial(stop_after, 12), **LONG)
    child.wait_until_stopped()
    try:
        second = bench.start(method, folder, **LONG, **options).wait()
    finally:
        child.send(signal.SIGCONT)
    first = child.wait()
    problems = [] if first.code == 0 else [f"the first ended with {first}"]
    if second.code != 2 or "Traceback" in second.said or folder.name not in second.said:
        problems.append(f"the second ended with {second}")
    if first.code == 0:
        problems += differences(read_bits(folder), long_reference(bench, method))
    for path in folder.parent.glob(f"{folder.name}~*"):
        shutil.rmtree(path)
    return _trial(f"second process {options}", method, 0, problems, folder)


def _judge_stop(folder: Path, ended: Ended) -> list[str]:
    problems = [] if ended.code == 3 and "Traceback" not in ended.said else [f"it ended with {ended}"]
    rows = read_jsonl(folder / "metrics.jsonl")
    newest = newest_valid(folder / "checkpoints")
    if newest is None or newest.step != len(rows):
        problems.append(f"{len(rows)} steps are done, the checkpoint is of {newest and newest.step}")
    return problems + lost_or_torn(folder, keep=KEEP)


def _plant_bad_token(home: Path) -> tuple[Path, Path, int]:
    """A model whose embedding of a rare token is infinite, data in which one row has it, and the place of that row."""
    import numpy as np
    from safetensors.numpy import load_file, save_file
    from tokenizers import Tokenizer

    model, data, row = home / "model", home / "data.jsonl", 5
    if not data.exists():
        make_model(model)
        write_chats(data, num=40)
        lines = data.read_text().splitlines()
        lines[row] = lines[row].replace("count", RARE)
        data.write_text("\n".join(lines) + "\n")
        tensors = load_file(model / "model.safetensors")
        ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(RARE).ids
        tensors["model.embed_tokens.weight"][ids] = np.inf
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return model, data, row


def _wait_for_steps(child: Child, folder: Path, *, num: int) -> None:
    end = time.monotonic() + 900
    while child.alive() and len(read_jsonl(folder / "metrics.jsonl")) < num:
        assert time.monotonic() < end, "it did not come to pass in time"
        time.sleep(0.005)


def _trial(
    kind: str, method: str, seed: int, problems: list[str], folder: Path, *, stopped: bool = False
) -> Trial:
    if not problems and folder.exists():
        shutil.rmtree(folder)
    return Trial(kind=kind, method=method, seed=seed, problems=problems, kills=int(stopped))
