"""Trials of a ladder or a sweep: check the request, identify the folder, and train each trial in a child process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from crosstune.config.load import child_environment, make_config
from crosstune.config.resolve.plan import Plan
from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.distributed.attempts import signal_name
from crosstune.files.atomic_files import remove_folder, write_text
from crosstune.files.journal import lock_file
from crosstune.files.json_files import read_object, write_json
from crosstune.files.run_lock import is_held
from crosstune.runs.check_request import RequestCheck, check_plan
from crosstune.runs.resume import names_path

REQUEST = "request.json"
PLACE = ("name", "output_dir", "overwrite")
"""Options that do not change what is measured."""
STOP_S = 60.0
"""Time for a trial to save a checkpoint after SIGTERM."""
TAIL_LINES = 8
# Run `crosstune` in a process that exits with its parent; the first argument is the parent's process id.
FOLLOWING = """
import runpy, sys
from crosstune.distributed.launch import follow
follow(int(sys.argv.pop(1)))
runpy.run_module("crosstune", run_name="__main__", alter_sys=True)
"""


def check_trial_request(config: Config, *, kind: str) -> tuple[Plan, RequestCheck]:
    """Plan the options as `train` does, and raise its problems; reject --resume and --emulate. `kind` is ladder or sweep."""
    if names_path(config):
        raise UserError(
            f"A {kind} cannot start from --resume {config.resume}.",
            why="its trials are separate runs, and a resumed run keeps its options.",
            do="remove --resume, and pass the options of that run, such as with --config RUN/config.yaml",
        )
    if config.emulate is not None:
        raise UserError(
            f"A {kind} trains on this machine, so it cannot be combined with --emulate.",
            do="remove --emulate",
        )
    asked = {k: v for k, v in config.options_asked().items() if k not in ("name", "overwrite", "resume")}
    plan, checked = check_plan(make_config(**asked))
    checked.raise_problems()
    return plan, checked


def check_same_request(folder: Path, request: Mapping[str, Any], *, kind: str) -> None:
    """Write the request; raise a UserError if the folder contains trials of a different one."""
    path, again = folder / REQUEST, "use a different --name, or --overwrite true to begin again"
    if path.is_file():
        try:
            before = read_object(path)
        except UserError as error:
            raise UserError(
                f"The {kind} in {folder} is damaged: {path.name} cannot be read.", why=error.why, do=again
            ) from error
        if before == dict(request):
            return
        if any((folder / "trials").glob("*/plan.json")):
            old, new = ({**dict(asked.get("options") or {}), **asked} for asked in (before, request))
            differing = sorted({*old, *new} - {"options"})
            flags = ", ".join(f"--{key}" for key in differing if old.get(key) != new.get(key))
            raise UserError(
                f"{folder} contains trials of a different request.", why=f"these differ: {flags}.", do=again
            )
        if (folder / "trials").is_dir():
            remove_folder(folder / "trials")
    elif folder.is_dir() and any(folder.glob("[!.]*")):  # a kill may leave hidden files
        raise UserError(f"{folder} exists and is not a {kind}.", do="use a different --name")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, dict(request))


class TrialProcess:
    """A training run in a process that exits with this one. Its options are in `FOLDER.yaml`, its output in `FOLDER.log`."""

    def __init__(
        self, folder: Path, options: Mapping[str, Any], *, variables: Mapping[str, str] | None = None
    ) -> None:
        self.folder, self.log = folder, log_of(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = options_file(folder)
        write_text(file, yaml.safe_dump(dict(options), sort_keys=False, allow_unicode=True))
        self.log.unlink(missing_ok=True)
        words = [str(os.getpid()), "train", "--config", str(file)]
        with self.log.open("wb") as out:
            # The process inherits the lock with the file: it is held from its first moment to its end, without this one too.
            lock_file(out)
            self._process = subprocess.Popen(
                [sys.executable, "-c", FOLLOWING, *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=child_environment(variables or {}),
            )

    @property
    def code(self) -> int | None:
        """The exit code, less than 0 for a signal; None while it runs."""
        return self._process.poll()

    def terminate(self) -> None:
        """Ask the training to stop after its step, with a checkpoint."""
        if self.code is None:
            self._process.terminate()

    def end(self) -> None:
        """Stop the training, at once if it takes longer than `STOP_S`."""
        self.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        if self.code is None:
            self._process.kill()
            self._process.wait()


def options_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.yaml")


def log_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.log")


def wait_until_free(folder: Path, *, limit_s: float, should_stop: Callable[[], bool]) -> None:
    """Wait for a trial whose parent was killed: it may still write into its folder, or be about to take its lock."""
    ends_at = time.monotonic() + limit_s
    while (is_held(folder) or _is_written(log_of(folder))) and time.monotonic() < ends_at:
        if should_stop():
            raise KeyboardInterrupt
        time.sleep(0.1)


def _is_written(log: Path) -> bool:
    """Return True if the process of an earlier trial has this output open."""
    try:
        with log.open("rb") as file:
            lock_file(file)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def why_ended(code: int, log: Path) -> str:
    """Describe the end of a trial that did not finish: the signal or exit code, and its last words."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    said = [line.strip() for line in lines if line.strip()][-TAIL_LINES:]
    how = f"exit code {code}"
    if code < 0:
        how = f"killed by {signal_name(-code)}"
        if -code == signal.SIGKILL:
            how += ", as the system does when memory runs out"
    if not said:
        return f"{how}, without output"
    # The last line before a signal is progress, not the reason.
    return f"{how}{'; last output' if code < 0 else ''}: {' / '.join(said)}"


def ran_out_of_memory(events: Sequence[Mapping[str, Any]]) -> bool:
    return any(
        event.get("kind") == "failed" and "memory" in str(event.get("error")).lower() for event in events
    )
