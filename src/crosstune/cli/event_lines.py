"""Say in lines what an event of a run means. Events that change the live line are handled by the screen."""

from __future__ import annotations

from collections.abc import Iterator
from functools import singledispatch

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

Lines = Iterator[tuple[str, str | None]]
"""Pairs of a line and its style."""


@singledispatch
def event_lines(event: Event) -> Lines:
    """Yield the lines for an event; there are none for a class without a handler."""
    yield from ()


@event_lines.register
def _adjusted(event: Adjusted) -> Lines:
    style = WARNING if event.adjustment_kind in ("change", "warning") else QUIET
    label = {"change": "changed ", "warning": "warning ", "name": "read as "}.get(
        event.adjustment_kind, "chosen  "
    )
    yield f"{label} {event.sentence}", style


@event_lines.register
def _moved_aside(event: RunMovedAside) -> Lines:
    yield f"moved    the old run is now {event.path}", QUIET


@event_lines.register
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


@event_lines.register
def _warned(event: Warned) -> Lines:
    yield f"warning  {event.message}", WARNING


@event_lines.register
def _loading(event: Loading) -> Lines:
    yield f"loading  {event.model}", None


@event_lines.register
def _loaded(event: Loaded) -> Lines:
    trained, everything = event.trained_parameters, event.parameters
    share = 100 * trained / everything
    yield f"loaded   {count(everything)} parameters, {count(trained)} trained ({share:.3g} %)", None


@event_lines.register
def _resumed(event: Resumed) -> Lines:
    yield f"resumed  at step {event.step} from {event.checkpoint}", STRONG
    for sentence in dict.fromkeys((*event.adapted, *event.allowed_differences, *event.changed_options)):
        yield f"changed  {sentence}", WARNING


@event_lines.register
def _measured(event: LossMeasured) -> Lines:
    measured = event.measured
    yield f"measured loss {measured.loss:.6f} on {measured.backend}: {measured.terms()}", None


@event_lines.register(LossCompared)
@event_lines.register(Moved)
def _compared(event: LossCompared | Moved) -> Lines:
    compared = event.comparison
    there, here = compared.there, compared.here
    text = (
        f"compared the same batches: {there.loss:.6f} on {there.backend} ({there.terms()}), "
        f"{here.loss:.6f} on {here.backend} ({here.terms()}): relative difference {compared.difference:.2e}, "
        f"at most {compared.bound:g} allowed"
    )
    yield text, GOOD if compared.difference <= compared.bound else ERROR


@event_lines.register
def _set_aside(event: CheckpointSetAside) -> Lines:
    yield f"aside    a checkpoint after step {event.step} is now {event.path}", QUIET


@event_lines.register
def _checkpoint(event: CheckpointSaved) -> Lines:
    text = (
        f"saved    checkpoint of step {event.step}: {size(event.bytes)} in {event.seconds:.1f} s, "
        f"training waited {event.blocked_s * 1000:.0f} ms"
    )
    yield text, QUIET


@event_lines.register
def _checkpoint_failed(event: CheckpointFailed) -> Lines:
    yield f"warning  {event.error}", ERROR


@event_lines.register
def _nonfinite(event: NonFinite) -> Lines:
    ending = f"step skipped ({event.allowed} allowed)" if event.skipped else "stopping"
    yield f"warning  step {event.step}: {event.error} {event.blame}; {ending}", ERROR


@event_lines.register
def _profiled(event: Profiled) -> Lines:
    from crosstune.loop.profile_result import profile_lines

    for line in profile_lines(event.result):
        yield line, None
    yield f"profile  {event.path}", STRONG


@event_lines.register
def _tracking(event: TrackingStarted) -> Lines:
    yield f"tracking {event.tracker}: {event.where}", None
    if event.view:
        yield f"         {event.view}", QUIET


@event_lines.register
def _tracking_failed(event: TrackingFailed) -> Lines:
    yield f"warning  {event.tracker}: {event.error}", WARNING
    yield "         the run goes on without it; metrics.jsonl has every value", QUIET


@event_lines.register
def _tracking_waits(event: TrackingWaits) -> Lines:
    late = ", ".join(event.trackers)
    yield f"tracking waiting for {late}, at most {event.seconds:.0f} s (Ctrl-C ends the wait)", QUIET


@event_lines.register
def _recovered(event: Recovered) -> Lines:
    changed = ", ".join(f"{option} {value}" for option, value in event.changed.items())
    rows = " (the same rows per step)" if "batch_size" in event.changed else ""
    yield (
        f"warning  step {event.step}: not enough memory for {event.doing}; repeating it with {changed}{rows}; "
        f"next time use {event.next_time}",
        WARNING,
    )


@event_lines.register
def _stopped(event: Stopped) -> Lines:
    yield f"stopped  by {event.reason} after step {event.step} of {event.num_steps}", WARNING


@event_lines.register
def _saved(event: ResultSaved) -> Lines:
    yield f"saved    {event.path}", None
    for name, agreement in (event.against_trained or {}).items():
        text = (
            f"warning  the new blocks are saved with the {name} weights; the logits differ by "
            f"{agreement['relative']:.2g} (relative) from those of the trained model; "
            "crosstune export --to hf --into dequantized writes the trained model itself"
        )
        yield text, WARNING
