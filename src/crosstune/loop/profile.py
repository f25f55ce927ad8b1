"""Profile scheduled steps of a run."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.core.events import Observer, Profiled, Warned
from crosstune.core.profiling import Phase, Profiles, ProfileSettings, Recorded, no_phase
from crosstune.loop.profile_result import PhaseClock, profile_result, write_profile
from crosstune.loop.stop import StopRequested, StopSignal

DEFAULT_FOLDER = "profiles"
FEW_STEPS = 10
"""Recorded steps of a cycle that are evaluated even when the run is stopped."""


def schedule(config: Config, place: int) -> str:
    """Return `off`, `warm-up`, `active` or `last` for a step, counted from 0. A cycle of waiting, warm-up and active steps
    begins every --profiling_frequency steps."""
    num_recorded = config.profiler_warmup_steps + config.profile_active_steps
    cycle, within = divmod(place, max(config.profile_wait_steps + num_recorded, config.profiling_frequency))
    within -= config.profile_wait_steps
    if (config.profile_repeat and cycle >= config.profile_repeat) or not 0 <= within < num_recorded:
        return "off"
    if within < config.profiler_warmup_steps:
        return "warm-up"
    return "last" if within == num_recorded - 1 else "active"


def is_asked(config: Config) -> bool:
    return config.profile or config.profile_memory


def profile_folder(config: Config, run: Path) -> Path:
    """Return the folder for a profile: in the run folder, or named like the run in --profiling_output."""
    if "profiling_output" not in config.sources:
        return run / DEFAULT_FOLDER
    return Path(config.profiling_output).expanduser() / run.name


def check_profile_folder(config: Config, run: Path) -> None:
    """Raise if --profiling_output is not writable."""
    if not is_asked(config) or "profiling_output" not in config.sources:
        return
    folder = profile_folder(config, run)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        if not existing.is_dir():
            raise NotADirectoryError(20, f"{existing} is a file")
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise UserError(
            f"--profiling_output {config.profiling_output} cannot be written.",
            why=f"{error.strerror or error}.",
            do="pass a writable folder, or remove the option to write the profile into the run folder",
        ) from error


@dataclass(kw_only=True)
class StepProfile:
    """The profile of a run: `step` wraps every step of the loop, `phase` the phases of the loop."""

    session: Profiles
    config: Config
    folder: Path
    observer: Observer
    engine: str = ""
    phase: Phase = no_phase
    clock: PhaseClock = field(default_factory=PhaseClock)
    stop: StopSignal = field(default_factory=StopSignal)
    recorded: list[Recorded] = field(default_factory=list)
    other_steps_s: list[float] = field(default_factory=list)
    """Times of the steps that were not recorded, without the first."""
    _place: int = 0
    _is_prepared: bool = False
    _first: int | None = None
    """The first recorded step of the current cycle."""

    def __post_init__(self) -> None:
        config = self.config
        settings = ProfileSettings(
            stacks=config.profile_with_stack,
            shapes=config.profile_with_shapes,
            memory=config.profile_memory or config.profile_export_memory_timeline,
            memory_timeline=config.profile_export_memory_timeline,
            trace=config.profile_export_trace,
        )
        self._profiler = self.session.profiler(settings)
        self.clock.synchronize, self.clock.mark = self._profiler.synchronize, self._profiler.mark

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record a step if it is scheduled."""
        what = schedule(self.config, self._place)
        self._place += 1
        if what != "off" and not self._is_prepared:
            self._profiler.warm_up()
            self._is_prepared = True
        if what in ("off", "warm-up"):
            yield
            return
        if self._first is None:
            self._first = number
            self._profiler.start()
        self.phase = self.session.phase = self.clock.phase
        try:
            with self.clock.step(number):
                yield
        finally:
            self.phase = self.session.phase = no_phase
        if what == "last":
            self._end_cycle()

    def note_step_time(self, step_s: float) -> None:
        """Note the time of a step that was not recorded, to compare with recorded steps."""
        if self.phase is no_phase and self._place > 1:
            self.other_steps_s.append(step_s)

    def close(self) -> None:
        """End an incomplete cycle, measure the limits of the device, and report."""
        self._end_cycle()
        if not self.clock.steps:
            first = self.config.profile_wait_steps + self.config.profiler_warmup_steps + 1
            message = f"nothing was profiled: the first recorded step would be number {first} of this process"
            self.observer.on_event(Warned(message=message))
            return
        limits = self._profiler.measure_limits()
        result = profile_result(
            self.clock, self.recorded, limits, engine=self.engine, other_steps_s=self.other_steps_s
        )
        with self._reporting_errors():
            table = write_profile(self.folder, result, self.clock, self.recorded)
            self.observer.on_event(Profiled(path=str(table), folder=str(self.folder), result=result))

    def _end_cycle(self) -> None:
        first, self._first, self._is_prepared = self._first, None, False
        if first is None:
            return
        count = sum(step >= first for step in self.clock.steps)
        evaluating: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if count > FEW_STEPS:  # up to a second per step is too long before the checkpoint of a stop
            evaluating = self.stop.interruptible()
            message = f"evaluating the profile of {count} steps: this may take a second for each step"
            if self.stop.requested:  # torch's own end of a recording cannot be interrupted
                message = f"ending the recording of {count} steps, which takes a while; then the run stops"
            self.observer.on_event(Warned(message=message, step=first))
        try:
            with self._reporting_errors():
                self.folder.mkdir(parents=True, exist_ok=True)
                self.recorded.append(self._profiler.stop(self.folder, step=first, evaluating=evaluating))
        except StopRequested:  # the loop stops after this step
            message = f"the profile of {count} steps was discarded, because the run was stopped"
            self.observer.on_event(Warned(message=message, step=first))

    @contextlib.contextmanager
    def _reporting_errors(self) -> Iterator[None]:
        """Turn a write error into a warning."""
        try:
            yield
        except OSError as error:
            self.observer.on_event(Warned(message=f"the profile could not be written: {error}"))
