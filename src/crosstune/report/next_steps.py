"""Suggest commands after a run: use its result, continue it, or improve it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstune.config.recipe_spec import next_commands
from crosstune.files.paths import shown_path
from crosstune.report.files import RunFiles, mapping, number, read_mapping
from crosstune.report.outcome import RunEnd
from crosstune.report.series import best_evaluation, evaluation_losses

STILL_FALLING = 0.98
"""More steps may help if the last evaluation loss is below this multiple of the previous one."""


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A suggested command."""

    label: str
    command: str
    why: str = ""


def use_result(summary: Mapping[str, Any], folder: Path, *, options: Any) -> Iterator[Suggestion]:
    """Yield commands that use the result: the recipe's commands, or the usual commands for a language model."""
    run = shlex.quote(shown_path(folder))
    if own := next_commands(shown_path(folder), options):
        yield from (Suggestion(label=label, command=command) for label, command in own)
        return
    if not summary.get("generates"):
        return
    yield Suggestion(label="try it", command=f'crosstune generate {run} --prompt "..."', why="one answer")
    yield Suggestion(label="chat", command=f"crosstune chat {run}", why="a conversation")
    if Path(str(summary.get("result"))).name == "adapter":
        yield Suggestion(
            label="merge", command=f"crosstune merge {run}", why="the adapter into its base, as one model"
        )
    to, why = (
        ("gguf", "for llama.cpp and Ollama") if _writes_gguf(summary, folder) else ("hf", "for other tools")
    )
    yield Suggestion(label="export", command=f"crosstune export {run} --to {to}", why=why)


def _writes_gguf(summary: Mapping[str, Any], folder: Path) -> bool:
    """Return True if the result of a run can be exported as GGUF."""
    from crosstune.models.gguf_writer import can_write_gguf

    place = Path(str(summary.get("result")))
    if place.name == "adapter":
        base = mapping(read_mapping(folder / "plan.json", []).get("model")).get("path")
        place = Path(str(base))
    return place.is_dir() and can_write_gguf(place)


def next_steps(run: RunFiles, end: RunEnd) -> list[Suggestion]:
    """Return suggestions, the most useful first."""
    found = list[Suggestion]()
    summary = run.summary
    folder = shlex.quote(shown_path(run.folder))
    if end.status == "running":
        return [Suggestion(label="watch", command=f"crosstune report {folder}", why="update this page")]
    if end.status != "finished":
        found.append(_continue(run, folder))
    found += _advice(run, folder)
    if summary.get("result"):
        found += use_result(summary, run.folder, options=run.plan.get("options"))
    compare = f"crosstune compare {folder} OTHER --out compare.html"
    return [*found, Suggestion(label="compare", command=compare, why="with another run")]


def _continue(run: RunFiles, folder: str) -> Suggestion:
    if run.summary.get("checkpoint") or (run.folder / "checkpoints" / "latest").exists():
        command = f"crosstune train --resume {folder}"
        return Suggestion(label="continue", command=command, why="from the last checkpoint")
    why = "no checkpoint was saved, so it starts over; --save_steps keeps some"
    return Suggestion(label="again", command="crosstune train --overwrite ... --save_steps 100", why=why)


def _advice(run: RunFiles, folder: str) -> Iterator[Suggestion]:
    """Yield suggestions from the evaluation curve."""
    best = best_evaluation(run)
    if best is None and run.summary.get("eval_after"):
        return  # an evaluation without a loss, as of rewards
    if best is None:
        why = "no held-out data was evaluated, so it is unknown whether the model improved"
        yield Suggestion(label="evaluate", command="crosstune train ... --eval_dataset FILE", why=why)
    elif best.overfits:
        why = f"the evaluation loss was lowest at step {best.step:,.0f} and rose afterwards"
        yield Suggestion(label="stop early", command="crosstune train ... --early_stopping 3", why=why)
    elif best.is_last and _still_falls(run):
        why = "the evaluation loss was still falling at the end"
        command = f"crosstune train --resume {folder} {_twice_as_long(run)}"
        if run.summary.get("checkpoint"):
            yield Suggestion(label="train longer", command=command, why=why)


def _twice_as_long(run: RunFiles) -> str:
    """Return the options that double the length of the run, in epochs or steps as requested."""
    options = mapping(run.plan.get("options"))
    epochs, steps = number(options.get("num_epochs")), number(options.get("max_steps"))
    if epochs and (steps is None or steps < 0):
        return f"--num_epochs {2 * epochs:g}"
    longer = f" --num_epochs {2 * epochs:g}" if epochs else ""  # the steps may end before or after the epochs
    return f"--max_steps {2 * run.last_step}{longer}"


def _still_falls(run: RunFiles) -> bool:
    losses = [loss for _, loss in evaluation_losses(run) if loss is not None]
    return len(losses) > 1 and losses[-1] < STILL_FALLING * losses[-2]
