"""Compare runs: the options that differ, and the results side by side."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstune.core.errors import UserError
from crosstune.core.missing_paths import missing_run, runs_beside
from crosstune.report.files import RunFiles, load_run, mapping, number
from crosstune.report.live import is_running
from crosstune.report.metric import display_of, ordered
from crosstune.report.quantity import (
    Shown,
    show_bytes,
    show_count,
    show_number,
    show_option,
    show_rate,
    show_seconds,
)
from crosstune.report.run_list import status_of
from crosstune.report.series import evaluation_points, finite_values, smooth, smoothing_window, step_points
from crosstune.report.turning_points import best_evaluation

MOST_RUNS = 12
_OF_THE_RECORD = frozenset({"name", "output_dir", "resume", "overwrite", "config", "profiling_output"})
"""Options that say where a run is kept, not what it does."""
NOT_RECORDED = "–"
_HASH = re.compile(r"[0-9a-f]{32,}")

Figure = tuple[str, list[float | None], Callable[[float], Shown], int]
"""Label, a value for each run, its format, and the better direction: 1 higher, -1 lower, 0 none."""


@dataclass(frozen=True, kw_only=True)
class Row:
    label: str
    cells: list[Shown]
    best: int | None = None
    """The run with the best value, where one is better than the others."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
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
    """Return the comparison of runs given by their paths, or by their names in `parent`."""
    folders = [_find(target, parent) for target in targets]
    unique = {folder.resolve(): folder for folder in reversed(folders)}
    kept = [folder for folder in dict.fromkeys(folders) if unique[folder.resolve()] == folder]
    notes = list[str]()
    if len(kept) < len(folders):
        notes.append("a run that was named twice is shown once")
    if len(kept) < 2:
        raise _too_few(kept, parent)
    if len(kept) > MOST_RUNS:
        raise UserError(f"{len(kept)} runs cannot be compared at once.", do=f"name at most {MOST_RUNS}")
    runs = [load_run(folder) for folder in kept]
    names = _names(runs)
    for name, run in zip(names, runs, strict=True):
        notes += [f"{name}: {problem}" for problem in run.problems]
    same_losses = True
    recipes = dict.fromkeys(str(_options(run).get("recipe") or "sft") for run in runs)
    if len(recipes) > 1:
        same_losses = False
        notes.append(f"the recipes differ ({', '.join(recipes)}): their losses are not of one kind")
    data = [mapping(run.plan.get("data")).get("identity") for run in runs]
    if len(set(map(str, data))) > 1 and len(recipes) == 1:
        same_losses = False
        notes.append("the data differs, so losses are compared on different examples")
    results = _result_rows(runs, same_losses=same_losses)
    return Comparison(runs=runs, names=names, options=_option_rows(runs), results=results, notes=notes)


def _find(target: str, parent: Path) -> Path:
    path = Path(target).expanduser()
    if path.is_dir():
        return path
    inside = parent / target
    if inside.is_dir():
        return inside
    # A bare name is one of the runs folder, so that is where similar names are.
    raise missing_run(path if path.parent != Path() else inside)


def _too_few(kept: Sequence[Path], parent: Path) -> UserError:
    others = [
        str(run) for run in runs_beside(parent / "_") if run.resolve() not in {k.resolve() for k in kept}
    ]
    known = f"; the newest: {', '.join(others[:5])}" if others else ""
    asked = "There is only one run to compare." if kept else "There is nothing to compare."
    return UserError(asked, why="a comparison needs two runs.", do=f"name two or more runs{known}")


def _names(runs: Sequence[RunFiles]) -> list[str]:
    """Return names that tell the runs apart: with their parents where two folders have the same name."""
    counts = Counter(run.folder.name for run in runs)
    return [
        run.folder.name
        if counts[run.folder.name] == 1
        else str(Path(run.folder.parent.name) / run.folder.name)
        for run in runs
    ]


def _options(run: RunFiles) -> Mapping[str, Any]:
    return mapping(run.plan.get("options")) or run.asked


def _option_rows(runs: Sequence[RunFiles]) -> list[Row]:
    """Return the options, and the facts of model, data and machine, in which the runs differ."""
    tables = [dict(_flat(_options(run))) | _facts(run) for run in runs]
    names = dict.fromkeys(name for table in tables for name in table)
    rows = []
    for name in names:
        if name in _OF_THE_RECORD:
            continue
        cells = [show_option(table[name]) if name in table else Shown(NOT_RECORDED) for table in tables]
        if len({cell.text for cell in cells}) > 1:
            rows.append(Row(label=name, cells=cells))
    return rows


def _facts(run: RunFiles) -> dict[str, Any]:
    """Return what decides a training besides its options: hashes are shortened, as only equality matters."""
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
    return {name: _short(value) for name, value in _flat(facts) if value is not None}


def _flat(values: Mapping[str, Any], *, of: str = "", levels: int = 3) -> Iterator[tuple[str, Any]]:
    """Yield names and values, those of a nested value with the name that it is below in front."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value and levels:
            yield from _flat(value, of=f"{of}{name}.", levels=levels - 1)
        else:
            yield f"{of}{name}", value


def _short(value: Any) -> Any:
    return value[:12] if isinstance(value, str) and _HASH.fullmatch(value) else value


def _size_of_files(files: Mapping[str, Any]) -> str | None:
    sizes = [size for size in map(number, files.values()) if size is not None]
    return f"{show_bytes(sum(sizes)).text} in {len(sizes)} file{'s' * (len(sizes) != 1)}" if sizes else None


def _result_rows(runs: Sequence[RunFiles], *, same_losses: bool) -> list[Row]:
    """Return the results side by side. A figure that no run has is left out. Losses and evaluations of different things
    (without `same_losses`) have no best one."""
    rows = [Row(label="status", cells=[Shown(_status(run)) for run in runs])]
    figures = [
        *_totals(runs),
        *(figure if same_losses else (*figure[:3], 0) for figure in _qualities(runs)),
        *_costs(runs),
    ]
    return rows + [_row(figure) for figure in figures if any(v is not None for v in figure[1])]


def _status(run: RunFiles) -> str:
    running = is_running(run.folder)
    return status_of(run.summary, run.events, running=running, problems=run.problems)


def _totals(runs: Sequence[RunFiles]) -> list[Figure]:
    return [
        ("steps", [float(run.last_step) for run in runs], show_count, 0),
        ("tokens", [_total(run, "tokens") for run in runs], show_count, 0),
        ("time", [number(run.summary.get("seconds")) for run in runs], show_seconds, -1),
    ]


def _qualities(runs: Sequence[RunFiles]) -> list[Figure]:
    best = [best_evaluation(run) for run in runs]
    figures: list[Figure] = [
        ("training loss at the end", [_final_loss(run) for run in runs], show_number, -1),
        ("best evaluation loss", [each.loss if each else None for each in best], show_number, -1),
        ("at step", [float(each.step) if each else None for each in best], show_count, 0),
    ]
    evaluated = [evaluation_points(run) for run in runs]
    for name in ordered(dict.fromkeys(name for points in evaluated for name in points)):
        values = [_last(points.get(name, [])) for points in evaluated]
        display = display_of(name, [value for value in values if value is not None])
        figures.append((f"last evaluation: {display.label}", values, display.show, display.better))
    return figures


def _costs(runs: Sequence[RunFiles]) -> list[Figure]:
    return [
        ("speed", [number(run.summary.get("tokens_per_s")) for run in runs], show_rate, 1),
        ("peak memory", [number(run.summary.get("peak_memory_bytes")) for run in runs], show_bytes, -1),
        (
            "trained parameters",
            [number(run.summary.get("trained_parameters")) for run in runs],
            show_count,
            0,
        ),
    ]


def _row(figure: Figure) -> Row:
    label, values, show, better = figure
    known = {place: value for place, value in enumerate(values) if value is not None}
    best = None
    if better and len(set(known.values())) > 1:
        best = (max if better > 0 else min)(known, key=known.__getitem__)
    cells = [Shown(NOT_RECORDED) if value is None else show(value) for value in values]
    return Row(label=label, cells=cells, best=best)


def _total(run: RunFiles, key: str) -> float | None:
    found = number(run.summary.get(key))
    values = finite_values(step_points(run.metrics, key))
    return found if found is not None else sum(values) if values else None


def _final_loss(run: RunFiles) -> float | None:
    """Return the smoothed training loss of the last step: a single step is noise."""
    points = step_points(run.metrics, "loss")
    return _last(smooth(points, window=smoothing_window(len(points)))) or number(
        run.summary.get("final_loss")
    )


def _last(points: Sequence[tuple[float, float | None]]) -> float | None:
    return next((value for _, value in reversed(points) if value is not None), None)
