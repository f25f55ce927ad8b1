"""Turn the events of a run into lines. Events that change the live line are handled by the screen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from crosstune.cli.output import ERROR, GOOD, QUIET, STRONG, WARNING
from crosstune.cli.units import count, size
from crosstune.core.events import (
    Adjusted,
    CheckpointFailed,
    CheckpointSaved,
    CheckpointSetAside,
    Event,
    Loaded,
    Loading,
    LossCompared,
    LossMeasured,
    Moved,
    NonFinite,
    Profiled,
    Recovered,
    ResultSaved,
    Resumed,
    RunMovedAside,
    Started,
    Stopped,
    Warned,
)
from crosstune.core.tracking_events import TrackingFailed, TrackingStarted, TrackingWaits

Lines = Iterable[tuple[str, str | None]]
"""Lines with their styles."""


def event_lines(event: Event) -> Lines:
    """Return the lines for an event; none for a class without an entry."""
    make = LINES.get(type(event))
    return make(event) if make is not None else ()


def _adjusted(event: Adjusted) -> Lines:
    label = {"change": "changed", "warning": "warning", "name": "read as"}.get(
        event.adjustment_kind, "chosen"
    )
    yield f"{label:<8} {event.sentence}", WARNING if label in ("changed", "warning") else QUIET


def _started(event: Started) -> Lines:
    train = event.data.get("train", {})
    parts = [f"{train.get('examples', 0):,} examples"]
    if "tokens" in train:  # a recipe's examples need not consist of tokens
        parts.append(f"{count(train['tokens'])} tokens")
        parts.append(f"{count(train.get('supervised_tokens', 0))} supervised")
        parts.append(f"longest {train.get('longest', 0)}")
    yield f"data     {event.data.get('dataset')}: {', '.join(parts)}", None
    for sentence in event.data.get("notes", ()):
        yield f"note     {sentence}", None
    for sentence in event.data.get("warnings", ()):
        yield f"warning  {sentence}", WARNING
    if event.processes:
        yield f"ranks    {event.processes}", None
    yield f"run      {event.folder}", None


def _loaded(event: Loaded) -> Lines:
    trained, total = event.trained_parameters, event.parameters
    yield (
        f"loaded   {count(total)} parameters, {count(trained)} trained ({100 * trained / total:.3g} %)",
        None,
    )


def _resumed(event: Resumed) -> Lines:
    yield f"resumed  at step {event.step} from {event.checkpoint}", STRONG
    for sentence in dict.fromkeys((*event.adapted, *event.allowed_differences, *event.changed_options)):
        yield f"changed  {sentence}", WARNING


def _compared(event: LossCompared | Moved) -> Lines:
    found = event.comparison
    there, here = found.there, found.here
    yield (
        f"compared the same batches: {there.loss:.6f} on {there.backend} ({there.terms()}), "
        f"{here.loss:.6f} on {here.backend} ({here.terms()}): relative difference {found.difference:.2e}, "
        f"at most {found.bound:g} allowed",
        GOOD if found.difference <= found.bound else ERROR,
    )


def _nonfinite(event: NonFinite) -> Lines:
    ending = f"step skipped ({event.allowed} allowed)" if event.skipped else "stopping"
    yield f"warning  step {event.step}: {event.error} {event.blame}; {ending}", ERROR


def _profiled(event: Profiled) -> Lines:
    from crosstune.loop.profile_result import profile_lines

    yield from ((line, None) for line in profile_lines(event.result))
    yield f"profile  {event.path}", STRONG


def _tracking(event: TrackingStarted) -> Lines:
    yield f"tracking {event.tracker}: {event.where}", None
    if event.view:
        yield f"         {event.view}", QUIET


def _tracking_failed(event: TrackingFailed) -> Lines:
    yield f"warning  {event.tracker}: {event.error}", WARNING
    yield "         the run continues without it; metrics.jsonl has every value", QUIET


def _recovered(event: Recovered) -> Lines:
    changed = ", ".join(f"{option} {value}" for option, value in event.changed.items())
    rows = " (the same rows per step)" if "batch_size" in event.changed else ""
    yield (
        f"warning  step {event.step}: not enough memory for {event.doing}; repeating it with {changed}{rows}; "
        f"next time use {event.next_time}",
        WARNING,
    )


def _saved(event: ResultSaved) -> Lines:
    yield f"saved    {event.path}", None
    for name, agreement in (event.against_trained or {}).items():
        yield (
            f"warning  the new blocks are saved with the {name} weights; the logits differ from the trained model's by "
            f"{agreement['relative']:.2g} (relative); crosstune export --to hf --into dequantized writes the trained model",
            WARNING,
        )


def _line(text: Callable[[Any], str], style: str | None = None) -> Callable[[Any], Lines]:
    """Return a function that makes one line of an event."""
    return lambda event: [(text(event), style)]


LINES: Mapping[type[Event], Callable[[Any], Lines]] = {
    Adjusted: _adjusted,
    RunMovedAside: _line(lambda e: f"moved    the old run is now {e.path}", QUIET),
    Started: _started,
    Warned: _line(lambda e: f"warning  {e.message}", WARNING),
    Loading: _line(lambda e: f"loading  {e.model}"),
    Loaded: _loaded,
    Resumed: _resumed,
    LossMeasured: _line(
        lambda e: f"measured loss {e.measured.loss:.6f} on {e.measured.backend}: {e.measured.terms()}"
    ),
    LossCompared: _compared,
    Moved: _compared,
    CheckpointSetAside: _line(lambda e: f"renamed  checkpoint newer than step {e.step} to {e.path}", QUIET),
    CheckpointSaved: _line(
        lambda e: (
            f"saved    checkpoint of step {e.step}: {size(e.bytes)} in {e.seconds:.1f} s, "
            f"training waited {e.blocked_s * 1000:.0f} ms"
        ),
        QUIET,
    ),
    CheckpointFailed: _line(lambda e: f"warning  {e.error}", ERROR),
    NonFinite: _nonfinite,
    Profiled: _profiled,
    TrackingStarted: _tracking,
    TrackingFailed: _tracking_failed,
    TrackingWaits: _line(
        lambda e: (
            f"tracking waiting for {', '.join(e.trackers)}, at most {e.seconds:.0f} s (Ctrl-C ends the wait)"
        ),
        QUIET,
    ),
    Recovered: _recovered,
    Stopped: _line(lambda e: f"stopped  by {e.reason} after step {e.step} of {e.num_steps}", WARNING),
    ResultSaved: _saved,
}
