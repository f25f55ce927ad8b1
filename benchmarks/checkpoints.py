"""Measure the cost of checkpoints: the time that training waits for a save, and the time of a resume beyond loading the model.

    python benchmarks/checkpoints.py
    python benchmarks/checkpoints.py --model_name tiny --steps 12

Both are printed as fractions of a step's time on the same machine. If the bundled model is not in the cache, a tiny model is
used; its steps are so short that the fractions say little.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from crosstune.config.load import make_config
from crosstune.core.events import CheckpointSaved, Event, StepMetrics
from crosstune.files.json_files import read_jsonl
from crosstune.files.run_record import RunRecord
from crosstune.models.locate import shape
from crosstune.models.tiny import tiny_model
from crosstune.runs import execute, prepare
from crosstune.runs import pipeline as run

BUNDLED = "smollm2-135m"
# The extra work of a resume: find and check the checkpoint, restore the record and the state.
RESUMING = (
    (prepare, "read_request"),
    (RunRecord, "reopen"),
    (execute, "restore_session"),
)


class Quiet:
    def on_event(self, event: Event) -> None:
        pass

    def on_step(self, metrics: StepMetrics) -> None:
        pass


@contextlib.contextmanager
def timed() -> Iterator[dict[str, float]]:
    """Seconds spent in the parts of a resume."""
    seconds: dict[str, float] = {}
    plain = [(home, name, getattr(home, name)) for home, name in RESUMING]

    def wrap(name: str, call: Any) -> Any:
        def watched(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started

        return watched

    for home, name, call in plain:
        setattr(home, name, wrap(name, call))
    try:
        yield seconds
    finally:
        for home, name, call in plain:
            setattr(home, name, call)


def measure(options: Mapping[str, Any], *, steps: int) -> dict[str, Any]:
    """Run with a save every second step, then extend the run by two steps."""
    first = run.train(make_config(**options, max_steps=steps), observers=[Quiet()])
    with timed() as parts:
        run.train(make_config(**options, max_steps=steps + 2, resume="auto"), observers=[Quiet()])
    rows = read_jsonl(first.folder / "metrics.jsonl")
    saves = [
        event for event in read_jsonl(first.folder / "events.jsonl") if event["kind"] == CheckpointSaved.kind
    ]
    return {
        "step_s": statistics.median(row["step_s"] for row in rows[1:]),
        "blocked_s": [event["blocked_s"] for event in saves],
        "written_s": [event["seconds"] for event in saves],
        "bytes": saves[0]["bytes"],
        "resume": parts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--model_name", default=BUNDLED)
    parser.add_argument("--train_type", default="lora")
    parser.add_argument("--steps", type=int, default=8)
    own = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        name = own.model_name
        if name == "tiny" or (name == BUNDLED and shape(name) is None):
            name = str(tiny_model(Path(home) / "tiny"))
        options = {"model_name": name, "backend": own.backend, "train_type": own.train_type}
        options |= {
            "output_dir": home,
            "name": "run",
            "save_steps": 2,
            "skip_eval": True,
            "save_model": False,
        }
        found = measure(options, steps=own.steps)
    step = found["step_s"]
    blocked, written = statistics.median(found["blocked_s"]), statistics.median(found["written_s"])
    resumed = sum(found["resume"].values())
    print(f"{name}, {own.train_type}, checkpoint of {found['bytes'] / 1e6:.1f} MB")
    print("| | seconds | steps |\n|---|---|---|")
    print(f"| a step | {step:.3f} | 1 |")
    print(f"| a save keeps training waiting | {blocked:.4f} | {blocked / step:.3f} |")
    print(f"| the longest such wait | {max(found['blocked_s']):.4f} | {max(found['blocked_s']) / step:.3f} |")
    print(f"| a save on its way to the disk, beside training | {written:.3f} | {written / step:.2f} |")
    print(f"| a resume beyond loading the model | {resumed:.3f} | {resumed / step:.2f} |")
    for part, seconds in found["resume"].items():
        print(f"| of that {part.strip('_')} | {seconds:.3f} | {seconds / step:.2f} |")


if __name__ == "__main__":
    main()
