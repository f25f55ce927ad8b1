"""Choose the learning rate of a run that is resumed with more steps than it was started for."""

from __future__ import annotations

from dataclasses import replace

from crosstune.checkpoint.manifest import Manifest
from crosstune.config.schema import Config
from crosstune.core.schedule import Extension
from crosstune.loop.train import rate_of_step

_CURVE = ("lr", "lr_scheduler", "warmup_steps", "warmup_ratio", "cosine_min_lr_ratio")
_NOTICED = 0.05
"""Smallest fraction of --lr that is reported as a jump."""


def extend(manifest: Manifest, config: Config, *, num_steps: int) -> tuple[Extension | None, list[str]]:
    """Return the schedule from the checkpoint on, if it differs from one schedule over all steps, and a message about it."""
    carried = Extension.from_json(manifest.schedule.get("extended"))
    before, done = manifest.schedule.get("num_steps"), manifest.step
    if before is None or num_steps <= before or not done:
        idle = carried is None and "on_extend" in config.sources and before is not None
        return carried, [f"on_extend has no effect: the run already had {before} steps"] if idle else []
    curve = {name: manifest.options[name] for name in _CURVE if name in manifest.options}
    last = rate_of_step(done - 1, replace(config, **curve), num_steps=before, extension=carried)
    extension = None
    if config.on_extend != "stretch":
        extension = Extension(start=done, lr=last if config.on_extend == "constant" else None)
    following = rate_of_step(done, config, num_steps=num_steps, extension=extension)
    grows = f"the run grows from {before} to {num_steps} steps"
    if extension is not None and extension.lr is not None:
        return extension, [f"{grows}: the learning rate stays at {last:.3g}"]
    peak = max(
        rate_of_step(s, config, num_steps=num_steps, extension=extension) for s in _sampled(done, num_steps)
    )
    if max(abs(following - last), peak - last) < _NOTICED * config.lr:
        return extension, []
    shape = (
        f"a new {config.lr_scheduler} schedule"
        if extension
        else f"{config.lr_scheduler} over all {num_steps} steps"
    )
    told = f"{grows}: the learning rate goes from {last:.3g} to {following:.3g} at step {done + 1}"
    told += f" and up to {peak:.3g}" if peak > following else ""
    told += f" ({shape})"
    if extension is None:
        told += f"; --on_extend constant keeps {last:.3g}, --on_extend restart begins a new warm-up"
    return extension, [told]


def _sampled(first: int, end: int) -> range:
    """Return about a thousand steps, enough to find the peak of a schedule."""
    return range(first, end, max(1, (end - first) // 1000))
