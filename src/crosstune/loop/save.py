"""Decide when a checkpoint is due, copy the state, and write it in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from crosstune.checkpoint.folders import name_of
from crosstune.checkpoint.manifest import Manifest
from crosstune.checkpoint.rotate import Keep, rotate
from crosstune.checkpoint.shards import write_divided
from crosstune.checkpoint.tensors import describe_trainable
from crosstune.checkpoint.write import Committed, SaveFailed, no_memory, write_checkpoint
from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.core.events import CheckpointFailed, CheckpointSaved, Observer, Warned
from crosstune.core.out_of_memory import OutOfMemory
from crosstune.core.protocols import CARRIED, Array, Session, SessionState, is_divided
from crosstune.loop.deferred_errors import DeferredErrors
from crosstune.process.ranks import Group, SingleProcess

SNAPSHOT_SHARE = 0.25
"""Largest copy of the state as a fraction of free memory; training waits while a larger state is written."""


@dataclass(frozen=True, kw_only=True)
class SavePolicy:
    every_steps: int = 0
    every_s: float = 0.0
    at_end: bool = False
    keep: Keep = field(default_factory=lambda: Keep(last_n=3))
    stop_on_error: bool = True

    @classmethod
    def from_config(cls, config: Config, *, method: str) -> SavePolicy:
        # The state of adapters is small; the state of a full model is three times its size.
        is_small = method in ("lora", "dora") and config.save_minutes > 0
        return cls(
            every_steps=config.save_steps,
            every_s=60 * config.save_minutes,
            at_end=config.save_steps > 0 or config.resume != "none" or is_small,
            keep=Keep(
                last_n=config.keep_last_n,
                best=config.keep_best or config.result != "last",
                every=config.keep_every,
            ),
            stop_on_error=config.on_save_error == "stop",
        )


@dataclass
class _Writing:
    """A checkpoint being written."""

    step: int
    started: float
    blocked_s: float = 0.0
    divided: bool = False
    """True if every rank writes a part, so that all of them see a failure."""
    thread: threading.Thread | None = None
    committed: Committed | None = None
    removed: list[str] = field(default_factory=list)
    problem: str = ""
    error: BaseException | None = None
    seconds: float = 0.0


class Checkpoints:
    """The checkpoints of one run. Only the writing itself happens in a thread.

    In a multi-process run, rank 0 writes, or each rank writes its part of a sharded state.
    """

    def __init__(
        self,
        root: Path,
        *,
        policy: SavePolicy,
        manifest: Callable[[int], Manifest],
        observer: Observer,
        group: Group | None = None,
        deferred: DeferredErrors | None = None,
    ) -> None:
        self.root, self.policy, self.manifest, self.observer = root, policy, manifest, observer
        self.group = group or SingleProcess()
        self.deferred = deferred or DeferredErrors(self.group)
        self.writes = self.group.ranks.first
        self.newest: Path | None = None
        self.last_step = 0
        self.longest_save_s = 0.0
        self._last_time = time.monotonic()
        self._writing: _Writing | None = None

    def due(self, step: int) -> bool:
        """Return True if the policy asks for a checkpoint after this step."""
        policy = self.policy
        by_steps = policy.every_steps > 0 and step % policy.every_steps == 0
        by_time = policy.every_s > 0 and time.monotonic() - self._last_time >= policy.every_s
        return step > self.last_step and (by_steps or by_time)

    def due_at_end(self, step: int) -> bool:
        """Return True if the run ends with a checkpoint; a run with checkpoints does, so that it can be extended."""
        return step > self.last_step and (self.policy.at_end or self.newest is not None)

    def save(
        self,
        session: Session,
        step: int,
        *,
        evaluations: Mapping[int, float],
        wait: bool = False,
        carried: Mapping[str, Array] | None = None,
    ) -> None:
        """Copy the state of a session and write it with the `carried` arrays of its recipe; block for the copy and for an
        earlier write, or `wait` for the write.

        Every rank calls this, since exporting the state may need all of them.
        """
        started = time.perf_counter()
        self.finish()
        copy_bytes = 12 * session.num_parameters()[0]  # weights and two moments in fp32
        in_background = not wait and copy_bytes <= SNAPSHOT_SHARE * psutil.virtual_memory().available
        try:
            state = session.export_state(copy=in_background and self.writes, divided=True)
        except (OutOfMemory, MemoryError) as error:
            if is_divided(session) and self.group.ranks.size > 1:  # the others may still gather their parts
                raise
            if in_background:  # writing without a copy needs less memory
                self.save(session, step, evaluations=evaluations, wait=True, carried=carried)
            else:
                self._report_failure(step, no_memory(error))
            return
        own = {CARRIED + name: array for name, array in (carried or {}).items()}
        state = replace(state, random={**state.random, **own})
        self.last_step, self._last_time = step, time.monotonic()
        if not self.writes and state.part is None:
            self.newest = self.root / name_of(step)  # where rank 0 writes it
            return
        manifest = replace(self.manifest(step), trainable=describe_trainable(state))
        writing = _Writing(step=step, started=started, divided=state.part is not None)
        self._writing = writing
        work = (writing, state, manifest, dict(evaluations))
        if in_background and not writing.divided:
            writing.thread = threading.Thread(target=self._write, args=work, daemon=True)
            writing.thread.start()
        else:
            self._write(*work)
        writing.blocked_s = time.perf_counter() - started
        if writing.thread is None:
            self.finish()

    def poll(self) -> None:
        """Report a write that has ended, like `finish`."""
        if self._writing is not None and not (self._writing.thread and self._writing.thread.is_alive()):
            self.finish()

    def finish(self) -> None:
        """Wait for the write in progress and report its result. If the run stops on save errors, raise a failed save, now or at
        the next collective."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        if writing.thread is not None:
            writing.thread.join()
        self.longest_save_s = max(self.longest_save_s, writing.seconds)
        if writing.error is not None:
            self._report_failure(writing.step, writing.error, divided=writing.divided)
            return
        assert writing.committed is not None
        self.newest = writing.committed.folder
        self.observer.on_event(
            CheckpointSaved(
                step=writing.step,
                path=str(writing.committed.folder),
                bytes=writing.committed.num_bytes,
                blocked_s=writing.blocked_s,
                seconds=writing.seconds,
                removed=writing.removed,
            )
        )
        for message in (writing.committed.latest_error, writing.problem):
            if message:
                self.observer.on_event(Warned(message=message, step=writing.step))

    def _write(
        self, writing: _Writing, state: SessionState, manifest: Manifest, evaluations: Mapping[int, float]
    ) -> None:
        try:
            if state.part is not None:
                writing.committed = write_divided(self.root, state, manifest, group=self.group)
            else:
                writing.committed = write_checkpoint(self.root, state, manifest)
            if self.writes:
                self._rotate(writing, evaluations)
        except MemoryError as error:
            writing.error = no_memory(error)
        except BaseException as error:  # noqa: BLE001  (raised again in the thread of the loop)
            writing.error = error
        writing.seconds = time.perf_counter() - writing.started

    def _rotate(self, writing: _Writing, evaluations: Mapping[int, float]) -> None:
        try:
            writing.removed = [path.name for path in rotate(self.root, self.policy.keep, evaluations)]
        except (UserError, OSError) as error:
            writing.problem = f"old checkpoints could not be removed: {error}"

    def _report_failure(self, step: int, error: BaseException, *, divided: bool = False) -> None:
        if not isinstance(error, SaveFailed):
            raise error
        self.observer.on_event(CheckpointFailed(step=step, error=str(error)))
        if self.policy.stop_on_error:
            if divided:
                raise error
            self.deferred.keep(error)
