"""Profile scheduled steps: time their phases, and summarize phases, operators and the fraction of the device's limits."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.core.events import Observer, Profiled, Warned
from crosstune.core.profiling import (
    EVALUATION,
    PHASES,
    Limits,
    Phase,
    Profiles,
    ProfileSettings,
    Recorded,
    no_phase,
)
from crosstune.files.atomic_files import write_bytes, write_text
from crosstune.files.json_files import write_json
from crosstune.loop.stop import StopRequested, StopSignal
from crosstune.process.this_process import num_cores

MAX_OPERATORS = 15
MAX_TIMES = 400
MAX_FILES = 10
TABLE, RESULT = "profile.txt", "profile.json"


@dataclass
class PhaseClock:
    """The time of the recorded steps, divided into phases."""

    synchronize: Callable[[], None] = lambda: None
    mark: Callable[[str], contextlib.AbstractContextManager[object]] = lambda name: contextlib.nullcontext()
    seconds: dict[str, float] = field(default_factory=dict)
    steps: dict[int, float] = field(default_factory=dict)
    """Step -> its wall time."""
    cpu_s: float = 0.0
    """CPU time of all threads of the process in the recorded steps."""
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    """Name, start and end of each phase and step, in seconds of `time.perf_counter`."""
    _open: list[str] = field(default_factory=list)
    _since: float = 0.0

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Time a step as a whole."""
        self.synchronize()
        cpu, start = time.process_time(), time.perf_counter()
        with self.mark(f"step {number}"):
            yield
            self.synchronize()
        end = time.perf_counter()
        self.steps[number] = end - start
        self.cpu_s += time.process_time() - cpu
        self.spans.append((f"step {number}", start, end))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase; the enclosing phase is paused."""
        self._switch()
        self._open.append(name)
        start = self._since
        try:
            with self.mark(name):
                yield
                self.synchronize()
        finally:
            self._switch()
            self._open.pop()
            self.spans.append((name, start, self._since))

    def _switch(self) -> None:
        """Add the time since the last switch to the innermost phase."""
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) + now - self._since
        self._since = now


def profile_result(
    clock: PhaseClock,
    recorded: Sequence[Recorded],
    limits: Limits | None,
    *,
    engine: str,
    other_steps_s: Sequence[float],
) -> dict[str, Any]:
    """Return the mean times of the recorded steps, without their evaluations."""
    count = len(clock.steps)
    cores = num_cores()
    apart = clock.seconds.get(EVALUATION, 0.0)
    step_s = (sum(clock.steps.values()) - apart) / count
    phases = {name: clock.seconds[name] / count for name in PHASES if name in clock.seconds}
    phases["other"] = max(0.0, step_s - sum(phases.values()))
    flops = [each.flops for each in recorded if each.flops is not None]
    busy = [each.device_busy_s for each in recorded if each.device_busy_s is not None]
    result: dict[str, Any] = {
        "engine": engine,
        "steps": sorted(clock.steps),
        "step_s": step_s,
        "phases": {
            name: {"seconds": s, "share": s / step_s if step_s else 0.0} for name, s in phases.items()
        },
        "evaluation_s": apart / count,
        "communication_s": sum(each.communication_s for each in recorded) / count,
        "device_busy_share": sum(busy) / count / step_s if busy and step_s else None,
        "cores_busy": clock.cpu_s / sum(clock.steps.values()),
        "num_cores": cores,
        "other_steps_s": statistics.median(other_steps_s) if other_steps_s else None,
        "operators": _operators(recorded, count),
        "flops": sum(flops) / count if flops else None,
        "limits": asdict(limits) if limits is not None else None,
        "limit_share": None,
        "memory_timeline": _timeline(recorded),
        "files": [str(path) for each in recorded for path in each.files],
    }
    if limits is not None and flops and step_s:
        result["limit_share"] = result["flops"] / step_s / limits.flops_per_s
    return result


def _operators(recorded: Sequence[Recorded], count: int) -> list[dict[str, Any]]:
    """Return the most expensive operators of all cycles, averaged over steps."""
    sums: dict[tuple[str, str], list[float]] = {}
    for each in (operator for cycle in recorded for operator in cycle.operators):
        row = sums.setdefault((each.name, each.shapes), [0, 0.0, 0])
        for place, value in enumerate((each.calls, each.seconds, each.memory_bytes)):
            row[place] += value
    total = sum(seconds for _, seconds, _ in sums.values())
    return [
        {
            "name": name,
            "shapes": shapes,
            "calls": calls / count,
            "seconds": seconds / count,
            "share": seconds / total if total else 0.0,
            "memory_bytes": memory / count,
        }
        for (name, shapes), (calls, seconds, memory) in sorted(sums.items(), key=lambda item: -item[1][1])
    ][:MAX_OPERATORS]


def _timeline(recorded: Sequence[Recorded]) -> list[tuple[float, int]]:
    """Return the allocated bytes during the first cycle, downsampled to the maximum of each interval."""
    points = next((list(each.memory_timeline) for each in recorded if each.memory_timeline), [])
    size = -(-len(points) // MAX_TIMES) or 1
    stretches = [points[start : start + size] for start in range(0, len(points), size)]
    return [max(stretch, key=lambda point: point[1]) for stretch in stretches]


def write_profile(
    folder: Path, result: Mapping[str, Any], clock: PhaseClock, recorded: Sequence[Recorded]
) -> Path:
    """Write the table and the figures, and a trace of the phases for MLX, which has no other trace."""
    folder.mkdir(parents=True, exist_ok=True)
    if not any(each.files for each in recorded) and result["engine"] == "mlx":
        _write_phase_trace(folder / "trace-phases.json.gz", clock)
    write_json(folder / RESULT, result)
    write_text(folder / TABLE, "\n".join(profile_lines(result)) + "\n")
    return folder / TABLE


def _write_phase_trace(path: Path, clock: PhaseClock) -> None:
    """Write the phases as a Chrome trace."""
    first = min((start for _, start, _ in clock.spans), default=0.0)
    events = [
        {"name": name, "ph": "X", "ts": 1e6 * (start - first), "dur": 1e6 * (end - start), "pid": 1, "tid": 1}
        for name, start, end in clock.spans
    ]
    write_bytes(path, gzip.compress(json.dumps({"traceEvents": events}).encode(), mtime=0))


def profile_lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the table."""
    steps, step_s = result["steps"], result["step_s"]
    numbers = f"{steps[0]} to {steps[-1]}" if len(steps) > 6 else ", ".join(map(str, steps))
    yield f"Profile of {len(steps)} step{'s' * (len(steps) != 1)} ({numbers}): {_time(step_s)} per step"
    yield ""
    for name, phase in result["phases"].items():
        bar = "#" * round(40 * phase["share"])
        yield f"  {name:<21}{_time(phase['seconds']):>10}  {phase['share']:>6.1%}  {bar}".rstrip()
    if result["evaluation_s"]:
        yield f"  evaluation, not counted above: {_time(result['evaluation_s'])} per step"
    if result["communication_s"]:
        yield f"  collectives, in any phase: {_time(result['communication_s'])} per step"
    yield ""
    yield from _limit_lines(result)
    if result["operators"]:
        yield ""
        yield "  operator                                        time   share  calls per step"
        for each in result["operators"]:
            # The end of a long name distinguishes it.
            name = each["name"] if len(each["name"]) <= 40 else f"…{each['name'][-39:]}"
            yield f"  {name:<42}{_time(each['seconds']):>10}  {each['share']:>6.1%}  {each['calls']:>8,.0f}  {each['shapes']}".rstrip()
    for path in result["files"][:MAX_FILES]:
        yield f"  file     {path}"
    if len(result["files"]) > MAX_FILES:
        yield f"  and {len(result['files']) - MAX_FILES:,} more"


def _limit_lines(result: Mapping[str, Any]) -> Iterator[str]:
    if result["device_busy_share"] is not None:
        yield f"  device busy      {result['device_busy_share']:.1%} of the step"
    yield f"  CPU              {result['cores_busy']:.1f} of {result['num_cores']} cores busy"
    if others := result["other_steps_s"]:
        yield f"  recording        unrecorded steps: {_time(others)} (median, without data and checkpoints)"
    if result["flops"]:
        rate = result["flops"] / result["step_s"]
        yield f"  matmuls          {_si(result['flops'])}FLOP per step, {_si(rate)}FLOP/s"
    if limits := result["limits"]:
        yield (
            f"  measured limits  {_si(limits['flops_per_s'])}FLOP/s in {limits['dtype']} matmuls, "
            f"{_si(limits['bytes_per_s'])}B/s of memory"
        )
    if result["limit_share"] is not None:
        yield f"  share of limit   {result['limit_share']:.1%} of the measured matmul rate"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.2f} ms"


def _si(value: float) -> str:
    """Format a number with a decimal prefix, for a unit that follows."""
    power = min(5, max(0, math.floor(math.log10(value)) // 3)) if value > 0 else 0
    return f"{value / 1000**power:.3g} {' kMGTP'[power].strip()}"


DEFAULT_FOLDER = "profiles"
PART_STEPS = 10
"""Longest recording: ending one cannot be interrupted, and takes up to a second for each step."""


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
    _part: list[int] = field(default_factory=list)
    """The steps of the current recording."""

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
        if not self._part:
            self._profiler.start()
        self._part.append(number)
        self.phase = self.session.phase = self.clock.phase
        try:
            with self.clock.step(number):
                yield
        finally:
            self.phase = self.session.phase = no_phase
        is_long = len(self._part) == PART_STEPS and what != "last"
        if is_long and not self.recorded:
            message = f"the profile is evaluated after every {PART_STEPS} steps, which takes up to a second for each"
            self.observer.on_event(Warned(message=message, step=number))
        if is_long or what == "last":
            self._end_recording()

    def note_step_time(self, step_s: float) -> None:
        """Note the time of a step that was not recorded, to compare with recorded steps."""
        if self.phase is no_phase and self._place > 1:
            self.other_steps_s.append(step_s)

    def close(self) -> None:
        """End an incomplete cycle, measure the limits of the device, and report."""
        self._end_recording()
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

    def _end_recording(self) -> None:
        part, self._part, self._is_prepared = self._part, [], False
        if not part:
            return
        try:
            with self._reporting_errors():
                self.folder.mkdir(parents=True, exist_ok=True)
                evaluating = self.stop.interruptible()
                self.recorded.append(self._profiler.stop(self.folder, step=part[0], evaluating=evaluating))
        except StopRequested:  # the loop stops after this step
            steps = f"{len(part)} step{'s' * (len(part) != 1)}"
            message = f"the recording of {steps} was discarded, because the run was stopped"
            self.observer.on_event(Warned(message=message, step=part[0]))

    @contextlib.contextmanager
    def _reporting_errors(self) -> Iterator[None]:
        """Turn a write error into a warning."""
        try:
            yield
        except OSError as error:
            self.observer.on_event(Warned(message=f"the profile could not be written: {error}"))
