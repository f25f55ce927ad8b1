"""A small training with real parts, and the bits by which two of them are compared."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from crosstune.checkpoint.folders import checkpoint_folders
from crosstune.checkpoint.manifest import WEIGHTS
from crosstune.checkpoint.read import open_checkpoint
from crosstune.checkpoint.rotate import Keep, superfluous
from crosstune.core.errors import UserError
from crosstune.core.events import CheckpointSaved, Event, StepMetrics
from crosstune.files.atomic_files import leftovers
from crosstune.files.json_files import read_jsonl
from crosstune.files.run_record import RunRecord
from crosstune.models.tiny import tiny_model
from injection.children import Child

NUM_STEPS = 4
SAVE_STEPS = 2
KEEP = Keep(last_n=1, best=False)
_ADAPTER = {"lora_dropout": 0.2, "lora_rank": 2, "lora_target_modules": "default"}
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"train_type": "lora"} | _ADAPTER,
    "qlora": {"train_type": "qlora", "quantization_backend": "bnb"} | _ADAPTER,
    "full": {"train_type": "full"},
}
PREFERENCE = "preference"
RL = "rl"
_ALL = METHODS | {
    PREFERENCE: {"recipe": "preference", "reference": "precomputed", "packing": False, "context_length": 512} | _ADAPTER,
    # The checkpoint of step 2 is between two steps on the same answers.
    RL: {
        "recipe": "rl", "packing": False, "context_length": 512, "num_generations": 3, "num_iterations": 3, "beta": 0.05,
        "dynamic_sampling": 1, "max_new_tokens": 8,
    } | _ADAPTER,
}  # fmt: skip
_REWARD = """
def letters(completions, **_):
    return [sum(letter.isalpha() for letter in text) / 8 for text in completions]
"""
Bits = dict[str, Any]


@dataclass
class Bench:
    """A model of one layer with dropout in its attention, and data whose rows are packed."""

    home: Path
    seconds: float = 0.0
    """The seconds of a whole run here, lately."""
    _references: dict[str, Bits] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        self.model, self.data, self.pairs, self.reward = (
            self.home / name for name in ("model", "data.jsonl", "pairs.jsonl", "reward.py")
        )
        if not self.data.exists():
            make_model(self.model)
            write_chats(self.data)
            write_pairs(self.pairs)
            self.reward.write_text(_REWARD, encoding="utf-8")

    def options(self, method: str, folder: Path, **more: Any) -> dict[str, Any]:
        shared = {
            "backend": "cpu",
            "precision": "fp32",
            "model_name": str(self.model),
            "dataset": str(self.pairs if method in (PREFERENCE, RL) else self.data),
            "output_dir": str(folder.parent),
            "name": folder.name,
            "max_steps": NUM_STEPS,
            "num_epochs": 9,
            "batch_size": 2,
            "gradient_accumulation_steps": 2,
            "packing": True,
            "context_length": 96,
            "lr": 5e-3,
            "skip_eval": True,
            "save_steps": SAVE_STEPS,
            "keep_last_n": KEEP.last_n,
            "keep_best": False,
            "log_to": "stdout",
        }
        rewards = {"reward": f"{self.reward}:letters"} if method == RL else {}
        return shared | _ALL[method] | rewards | more

    def words(self, method: str, folder: Path, **more: Any) -> list[str]:
        """The command that people would type."""
        return [
            "train",
            *(f"--{name}={value}" for name, value in self.options(method, folder, **more).items()),
        ]

    def start(self, method: str, folder: Path, *, before: Any = None, **more: Any) -> Child:
        """`crosstune train` in a child; `before` is called in it first."""
        return Child(partial(_command, self.words(method, folder, **more), before), said=folder.parent)

    def again(self, method: str, folder: Path, *, before: Any = None, **more: Any) -> Child:
        """The same command after a kill, which also begins anew where no checkpoint had been written."""
        return self.start(method, folder, before=before, resume="auto", overwrite=True, **more)

    def reference(self, method: str) -> Bits:
        """The bits of the run that nothing interrupts."""
        if method not in self._references:
            folder = self.home / f"straight-{method}"
            started = time.monotonic()
            ended = self.start(method, folder).wait()
            assert ended.code == 0, ended.said
            self.seconds = time.monotonic() - started
            self._references[method] = read_bits(folder)
        return self._references[method]

    def halfway(self, method: str) -> Path:
        """A run that was killed right after the checkpoint of step 2; to be copied."""
        folder = self.home / f"halfway-{method}"
        if not folder.exists():
            ended = self.start(method, folder, before=partial(die_after, SAVE_STEPS)).wait()
            assert ended.signal == 9, ended.said
            assert [step for step, _ in checkpoint_folders(folder / "checkpoints")] == [SAVE_STEPS]
        return folder

    def copy_halfway(self, method: str, folder: Path) -> Path:
        shutil.copytree(self.halfway(method), folder, symlinks=True)
        return folder


def make_model(folder: Path) -> Path:
    tiny_model(folder, hidden=32, intermediate=64, num_layers=1, num_heads=2, num_kv_heads=1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    return folder


def write_chats(path: Path, *, num: int = 64, word: str = "count") -> Path:
    rows = [
        [
            {"role": "user", "content": f"{word} {n}"},
            {"role": "assistant", "content": " ".join(str(i) for i in range(n % 17 + 2))},
        ]
        for n in range(num)
    ]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows), encoding="utf-8")
    return path


def write_pairs(path: Path, *, num: int = 64) -> Path:
    rows = [
        {"prompt": f"count {n}", "chosen": "1 " * (n % 7 + 1), "rejected": "no " * (n % 3 + 1)}
        for n in range(num)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_bits(folder: Path) -> Bits:
    """Everything about a finished run that has to be the same: each step's numbers, the state, the result."""
    steps = read_jsonl(folder / "metrics.jsonl")
    newest = open_checkpoint(checkpoint_folders(folder / "checkpoints")[0][1])
    results = sorted(p for name in ("adapter", "model", ".") for p in (folder / name).glob("*.safetensors"))
    return {
        "steps": [
            {
                name: row.get(name)
                for name in (
                    "step",
                    "loss",
                    "grad_norm",
                    "lr",
                    "tokens",
                    "supervised_tokens",
                    "pairs",
                    "reward",
                    "kl",
                )
            }
            for row in steps
        ],
        "step": newest.step,
        "state": {name: facts["sha256"] for name, facts in newest.manifest.files.items()},
        "result": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in results},
    }


def differences(found: Bits, wanted: Bits) -> list[str]:
    return [
        f"{part} differs: {found[part]} instead of {wanted[part]}"
        for part in wanted
        if found[part] != wanted[part]
    ]


def acknowledged(folder: Path) -> set[int]:
    """Steps whose checkpoint the run has reported as written."""
    events = read_jsonl(folder / "events.jsonl")
    return {event["step"] for event in events if event["kind"] == "checkpoint"}


def lost_or_torn(folder: Path, *, keep: Keep = KEEP, damaged: frozenset[int] = frozenset()) -> list[str]:
    """Return the problems of a killed run's checkpoints: there should be none."""
    there = {step: path for step, path in checkpoint_folders(folder / "checkpoints") if step not in damaged}
    problems = []
    for step, path in there.items():
        try:
            if open_checkpoint(path).step != step:
                problems.append(f"{path.name} holds another step")
        except UserError as error:
            problems.append(f"torn: {error}")
    known = acknowledged(folder) - damaged
    may_go = set(superfluous(sorted(known | set(there)), keep, {})) if there else set()
    problems += [f"step {step} was acknowledged and is lost" for step in sorted(known - set(there) - may_go)]
    return problems


def untidy(folder: Path) -> list[str]:
    """Return the leftovers of a kill that a finished resume should have cleared."""
    strays = [
        *leftovers(folder / "checkpoints", of=bool),
        *folder.glob(".result.*"),
        *folder.glob(".*.json*.*"),
        *folder.glob(".reference*"),
    ]
    return [f"left behind: {path.name}" for path in strays]


def check_finished(bench: Bench, method: str, folder: Path) -> list[str]:
    """Go on with a run to its end, and compare it with the one that was never interrupted."""
    ended = bench.again(method, folder).wait()
    if ended.code != 0:
        return [f"the resume ended with {ended}"]
    return [*differences(read_bits(folder), bench.reference(method)), *untidy(folder)]


def weights_file(folder: Path) -> Path:
    return checkpoint_folders(folder / "checkpoints")[0][1] / WEIGHTS


def _command(words: list[str], before: Any) -> int:
    from crosstune.cli.main import main

    if before is not None:
        before()
    return main(words)


def stop_after(step: int) -> None:
    """Stop this process, as Ctrl-Z does, once a step is recorded."""
    plain = RunRecord.on_step

    def on_step(self: RunRecord, metrics: StepMetrics) -> None:
        plain(self, metrics)
        if metrics["step"] == step:
            os.kill(os.getpid(), signal.SIGSTOP)

    RunRecord.on_step = on_step  # type: ignore[method-assign]


def die_after(step: int) -> None:
    """End this process with SIGKILL once the checkpoint of a step is acknowledged."""
    plain = RunRecord.on_event

    def on_event(self: RunRecord, event: Event) -> None:
        plain(self, event)
        if isinstance(event, CheckpointSaved) and event.step == step:
            os.kill(os.getpid(), signal.SIGKILL)

    RunRecord.on_event = on_event  # type: ignore[method-assign]
