"""Train in a process whose address space is limited once the model is open, and before that without a limit.

    python memory_limit.py FOLDER BATCH_SIZE SHARE

trains the same steps twice, as the runs `free` and `limited` in FOLDER. From its first step on, `limited`
may grow by SHARE of what `free` needed. What was measured is printed as JSON on the last line.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstune.core.events import Event, StepMetrics, TrainingStarted

VOCAB, LENGTH = 4096, 512
"""Most of the memory of a step are its logits: much memory for little arithmetic."""
ENVIRONMENT = {"MIMALLOC_ARENA_RESERVE": "0", "OMP_NUM_THREADS": "1"}
"""torch for Arm brings an allocator that reserves a GiB of addresses at a time, which says nothing about what is used."""


@dataclass
class Limit:
    """Let this process grow, from before the first step, by a share of what the run before it grew by."""

    share: float
    needed_bytes: int = 0
    allowed_bytes: int = 0

    def on_event(self, event: Event) -> None:
        if isinstance(event, TrainingStarted):
            size = read_size("VmSize")
            self.needed_bytes = read_size("VmPeak") - size
            self.allowed_bytes = int(self.share * self.needed_bytes)
            hard = resource.getrlimit(resource.RLIMIT_AS)[1]
            resource.setrlimit(resource.RLIMIT_AS, (size + self.allowed_bytes, hard))

    def on_step(self, metrics: StepMetrics) -> None:
        pass


def read_size(name: str) -> int:
    """Return a size of this process in bytes, as the system tells it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def options(home: Path, *, batch_size: int) -> dict[str, Any]:
    from crosstune.models.tiny import tiny_model

    tiny_model(home / "model", vocab=VOCAB)
    drawn, words = random.Random(0), ["turn", "on", "the", "light", "and", "count", "ten"]
    texts = (" ".join(drawn.choices(words, k=LENGTH)) for _ in range(48))
    (home / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return {
        "model_name": str(home / "model"),
        "dataset": str(home / "rows.jsonl"),
        "backend": "cpu",
        "precision": "fp32",
        "context_length": LENGTH + 8,  # and the marks of beginning and end
        "batch_size": batch_size,
        "max_steps": 2,
        "lr": 1e-3,
        "lora_dropout": 0.0,
        "skip_eval": True,
        "output_dir": str(home),
    }


def main(home: Path, *, batch_size: int, share: float) -> None:
    from crosstune.config.load import make_config
    from crosstune.runs.pipeline import train

    asked, limit = options(home, batch_size=batch_size), Limit(share)
    free = train(make_config(**asked, name="free"))
    limited = train(make_config(**asked, name="limited"), observers=[limit])
    found = {
        "needed_bytes": limit.needed_bytes,
        "allowed_bytes": limit.allowed_bytes,
        "failures": [str(run.failure) for run in (free, limited) if run.failure is not None],
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    assert os.environ.items() >= ENVIRONMENT.items(), "start this with ENVIRONMENT"
    main(Path(sys.argv[1]), batch_size=int(sys.argv[2]), share=float(sys.argv[3]))
