"""Compare runs: the options that differ, the results side by side, and a page with overlaid curves."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from crosstune.core.errors import UserError
from crosstune.core.events import Resumed
from crosstune.files.paths import missing_run, named_run, sibling_runs
from crosstune.report.charts import overlay_charts
from crosstune.report.files import RunFiles, is_running, listed, load_run, mapping, number
from crosstune.report.formatting import (
    FormattedValue,
    display_of,
    ordered,
    show_bytes,
    show_count,
    show_number,
    show_option,
    show_rate,
    show_seconds,
    show_time,
)
from crosstune.report.outcome import status_of, summed
from crosstune.report.samples import Answer, SampleRow, collect_samples, compare_answers
from crosstune.report.series import Point, best_evaluation, evaluation_points, final_loss, overfitting
from crosstune.report.tables import flat
from crosstune.report.template import fill, write_page

MAX_RUNS = 12
MAX_PROMPTS = 20
_OF_THE_RECORD = frozenset({"name", "output_dir", "resume", "overwrite", "config", "profiling_output"})
"""Options that do not affect the training."""
_NOT_SET = {"num_epochs": 0, "max_steps": -1, "dataset_samples": -1}
"""Option -> the value that means no limit."""
_CHANGED = re.compile(r"(\w+): (.*) in the checkpoint, .* now")
NOT_RECORDED = "–"
_HASH = re.compile(r"[0-9a-f]{32,}")

Figure = tuple[str, list[float | None], Callable[[float], FormattedValue], int]
"""Label, a value for each run, its format, and the better direction: 1 higher, -1 lower, 0 none."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a comparison: a cell for each run."""

    label: str
    cells: list[FormattedValue]
    best: int | None = None
    """Index of the run with the best value; None if no value is better."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs with their differing options and their results."""

    runs: list[RunFiles]
    names: list[str]
    options: list[Row]
    results: list[Row]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        def table(rows: Sequence[Row]) -> dict[str, Any]:
            return {
                row.label: dict(zip(self.names, (c.text for c in row.cells), strict=True)) for row in rows
            }

        return {
            "runs": {name: str(run.folder) for name, run in zip(self.names, self.runs, strict=True)},
            "options": table(self.options),
            "results": table(self.results),
            "notes": self.notes,
        }


def compare_runs(targets: Sequence[str], *, parent: Path) -> Comparison:
    """Compare runs given by path, or by name in `parent`."""
    folders = [_find(target, parent) for target in targets]
    kept = list({folder.resolve(): folder for folder in folders}.values())
    notes = list[str]()
    if len(kept) < len(folders):
        notes.append("a run passed twice is shown once")
    if len(kept) < 2:
        raise _too_few(kept, parent)
    if len(kept) > MAX_RUNS:
        raise UserError(f"{len(kept)} runs cannot be compared at once.", do=f"specify at most {MAX_RUNS}")
    return compare_loaded([load_run(folder) for folder in kept], notes=notes)


def compare_loaded(runs: Sequence[RunFiles], *, notes: Sequence[str] = ()) -> Comparison:
    """Compare runs that were read; `notes` come first."""
    notes, names = list(notes), _names(runs)
    for name, run in zip(names, runs, strict=True):
        notes += [f"{name}: {problem}" for problem in run.problems]
    same_losses = True
    recipes = dict.fromkeys(str(_options(run).get("recipe") or "sft") for run in runs)
    if len(recipes) > 1:
        same_losses = False
        notes.append(f"the recipes differ ({', '.join(recipes)}): their losses are not comparable")
    data = [mapping(run.plan.get("data")).get("identity") for run in runs]
    if len(set(map(str, data))) > 1 and len(recipes) == 1:
        same_losses = False
        notes.append("the data differs: the losses were measured on different examples")
    results = _result_rows(runs, same_losses=same_losses)
    return Comparison(runs=list(runs), names=names, options=_option_rows(runs), results=results, notes=notes)


def _find(target: str, parent: Path) -> Path:
    path = Path(named_run(target, parent=parent)).expanduser()
    if path.is_dir():
        return path
    # Suggest similar names of the runs folder for a bare name.
    raise missing_run(path if path.parent != Path() else parent / target)


def _too_few(kept: Sequence[Path], parent: Path) -> UserError:
    others = [
        str(run) for run in sibling_runs(parent / "_") if run.resolve() not in {k.resolve() for k in kept}
    ]
    known = f"; the newest: {', '.join(others[:5])}" if others else ""
    asked = "There is only one run to compare." if kept else "There is nothing to compare."
    return UserError(asked, why="a comparison needs two runs.", do=f"specify two or more runs{known}")


def _names(runs: Sequence[RunFiles]) -> list[str]:
    """Return the names of the folders, with their parents where two names are equal."""
    folders = [run.folder for run in runs]
    counts = Counter(folder.name for folder in folders)
    return [each.name if counts[each.name] == 1 else str(Path(*each.parts[-2:])) for each in folders]


def _options(run: RunFiles) -> Mapping[str, Any]:
    return mapping(run.plan.get("options")) or run.asked


def _option_rows(runs: Sequence[RunFiles]) -> list[Row]:
    """Return the options and the facts about model, data and machine that differ."""
    tables = [_shown_options(run) | _facts(run) for run in runs]
    names = dict.fromkeys(name for table in tables for name in table)
    rows = []
    for name in names:
        if name in _OF_THE_RECORD:
            continue
        cells = [
            show_option(table[name]) if name in table else FormattedValue(NOT_RECORDED) for table in tables
        ]
        if len({cell.text for cell in cells}) > 1:
            rows.append(Row(label=name, cells=cells))
    return rows


def _shown_options(run: RunFiles) -> dict[str, Any]:
    """Return the options; an option changed by a resume has all its values, in order."""
    found = dict(flat(_options(run)))
    found |= {name: None for name, value in _NOT_SET.items() if found.get(name) == value}
    before: dict[str, list[str]] = {}
    for event in run.events:
        if event.get("kind") == Resumed.kind:
            for change in map(_CHANGED.fullmatch, map(str, listed(event.get("changed_options")))):
                if change is not None and change[1] in found:
                    before.setdefault(change[1], []).append(change[2])
    return found | {
        name: " then ".join([*values, show_option(found[name]).text]) for name, values in before.items()
    }


def _facts(run: RunFiles) -> dict[str, Any]:
    """Return facts about model, data and machine, with shortened hashes: only equality matters."""
    plan, machine = run.plan, mapping(run.plan.get("machine"))
    facts: dict[str, Any] = {
        "planned steps": plan.get("num_steps"),
        "used backend": plan.get("backend"),
        "used precision": plan.get("precision"),
        "processes": plan.get("world_size"),
        "data identity": mapping(plan.get("data")).get("identity") or None,
        "computer": machine.get("name"),
    }
    model = dict(mapping(mapping(plan.get("model")).get("identity")))
    facts |= {"model size": _size_of_files(mapping(model.pop("files", None)))}
    facts |= {f"model {name}": value for name, value in model.items()}
    versions = mapping(machine.get("versions"))
    facts |= {f"version of {name}": value for name, value in versions.items()}
    return {name: _short(value) for name, value in flat(facts) if value is not None}


def _short(value: Any) -> Any:
    return value[:12] if isinstance(value, str) and _HASH.fullmatch(value) else value


def _size_of_files(files: Mapping[str, Any]) -> str | None:
    sizes = [size for size in map(number, files.values()) if size is not None]
    return f"{show_bytes(sum(sizes)).text} in {len(sizes)} file{'s' * (len(sizes) != 1)}" if sizes else None


def _result_rows(runs: Sequence[RunFiles], *, same_losses: bool) -> list[Row]:
    """Return the results that at least one run has. Without `same_losses`, no loss or evaluation is marked as best."""
    statuses = [status_of(run, running=is_running(run.folder)) for run in runs]
    qualities = [figure if same_losses else (*figure[:3], 0) for figure in _qualities(runs)]

    def from_summary(key: str) -> list[float | None]:
        return [number(run.summary.get(key)) for run in runs]

    models = {
        str(mapping(run.plan.get("model")).get("identity") or _options(run).get("model_name")) for run in runs
    }
    same = 1 if len(models) == 1 else 0  # a smaller model is faster, not better
    tokens = [summed(run, "tokens") for run in runs]
    figures: list[Figure] = [
        ("steps", [float(run.last_step) for run in runs], show_count, 0),
        ("tokens", tokens, show_count, 0),
        ("time", from_summary("seconds"), show_seconds, -same if len({*tokens}) == 1 else 0),
        *qualities,
        ("speed", from_summary("tokens_per_s"), show_rate, same),
        ("peak memory", from_summary("peak_memory_bytes"), show_bytes, -same),
        ("trained parameters", from_summary("trained_parameters"), show_count, 0),
    ]
    rows = [Row(label="status", cells=[FormattedValue(status) for status in statuses])]
    return rows + [_row(figure) for figure in figures if any(v is not None for v in figure[1])]


def _qualities(runs: Sequence[RunFiles]) -> list[Figure]:
    best = [best_evaluation(run) for run in runs]
    final = [final_loss(run) for run in runs]
    overfits = any(overfitting(run) is not None for run in runs)  # then a lower training loss is not better
    figures: list[Figure] = [
        ("training loss of the last step", final, show_number, 0 if overfits else -1),
        ("best evaluation loss", [each.loss if each else None for each in best], show_number, -1),
        ("at step", [float(each.step) if each else None for each in best], show_count, 0),
    ]
    evaluated = [evaluation_points(run) for run in runs]
    for name in ordered(dict.fromkeys(name for points in evaluated for name in points)):
        values = [_last(points.get(name, [])) for points in evaluated]
        display = display_of(name, [value for value in values if value is not None])
        figures.append((f"last evaluation: {display.label}", values, display.show, display.better))
    return figures


def _row(figure: Figure) -> Row:
    label, values, show, better = figure
    known = {place: value for place, value in enumerate(values) if value is not None}
    best = None
    if better and len(set(known.values())) > 1:
        best = (max if better > 0 else min)(known, key=known.__getitem__)
    cells = [FormattedValue(NOT_RECORDED) if value is None else show(value) for value in values]
    if best is not None and [cell.text for cell in cells].count(cells[best].text) > 1:
        best = None  # equal as shown
    return Row(label=label, cells=cells, best=best)


def _last(points: Sequence[Point]) -> float | None:
    return next((value for _, value in reversed(points) if value is not None), None)


def write_comparison(found: Comparison, target: Path) -> Path:
    """Write the comparison as a page with overlaid curves."""
    write_page(target, render_comparison(found))
    return target


def render_comparison(found: Comparison, *, draws: bool = True) -> str:
    """Return the comparison as a page; without `draws`, without its curves."""
    return fill(
        "compare.html.jinja",
        found=found,
        charts=overlay_charts(found.runs, found.names) if draws else [],
        prompts=shared_prompts(found),
        written=show_time(datetime.now().astimezone()),
    )


def shared_prompts(found: Comparison) -> list[SampleRow]:
    """Return the prompts that at least two runs answered, with the last answer of each run."""
    tables = [{row.prompt: row for row in collect_samples(run).rows} for run in found.runs]
    counts = Counter(prompt for table in tables for prompt in table)
    rows = []
    for prompt in [prompt for prompt, count in counts.items() if count > 1][:MAX_PROMPTS]:
        each = [table.get(prompt) for table in tables]
        answers = [row.answers[-1] if row else Answer(text=None) for row in each]
        reference = next((row.reference for row in each if row and row.reference), "")
        rows.append(SampleRow(prompt=prompt, reference=reference, answers=compare_answers(answers)))
    return rows
