"""Score answers with a trained judge, or with a Python function of the user."""

from __future__ import annotations

import importlib
import inspect
import math
import numbers
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from crosstune.config.load import make_config
from crosstune.core.errors import UserError, shown
from crosstune.core.events import Observer
from crosstune.files.journal import file_stamps
from crosstune.recipes.judge.items import Item, read_scale
from crosstune.results.judge import JudgeRequest, check_verdicts, find_judge, open_judge, run_config

ROUNDING = 1e-4
"""A judge's score moves by up to this fraction of its scale with the batch: a smaller difference is a tie."""
ARGUMENTS = ("prompt", "answer", "messages", "reference")
"""The arguments that a function may have."""
Score = Callable[[Sequence[Item]], list[float | None]]
"""Return the score of each item; None if it exceeds the judge's context."""


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """A judge, not loaded yet, or a function."""

    name: str
    open: Callable[[Observer], Score]
    identity: Any
    """The identity of the scores, for a journal."""
    compares: bool = False
    """True if an item has two answers: the score is then the probability that the first is better."""
    span: float = math.inf
    """The largest possible difference of two scores."""
    tie: float = 0.0
    """The largest difference of equal scores."""
    runs_code: bool = False


def find_scorer(name: str, *, backend: str = "auto") -> Scorer:
    """Find a function, or a trained judge: a run, an adapter or a model folder."""
    file, _, function = name.rpartition(":")
    if file and not Path(name).expanduser().exists():
        return _find_function(file, function)
    run_config(Path(name).expanduser())  # raises for a run of a different recipe
    request = JudgeRequest(target=name, backend=backend)
    trained, settings = find_judge(request)
    if settings is None:
        do = "pass --judge RUN, made by `crosstune judge train`, or --judge FILE.py:FUNCTION"
        is_here = Path(name).expanduser().exists()
        why = (
            "there is no judge.json with its weights."
            if is_here
            else "there is no run and no folder of this name."
        )
        raise UserError(f"{shown(name)} is not a judge.", why=why, do=do)

    def open_scorer(observer: Observer) -> Score:
        judge = open_judge(request, items=(), config=make_config(recipe="judge"), observer=observer)

        def score(items: Sequence[Item]) -> list[float | None]:
            judged = judge.judge(items)
            check_verdicts(judged, name)
            return [
                one.score if one.winner is None else one.probabilities[0] + one.probabilities[2] / 2
                for one in judged
            ]

        return score

    compares = settings.verdict == "winner" and not settings.is_reward
    scale = 1.0 if settings.verdict == "winner" else read_scale(settings.scale).span
    files = file_stamps(trained.adapter, Path(trained.base).expanduser())
    identity, span = [asdict(request), asdict(settings), files], math.inf if settings.is_reward else scale
    kind: Any = {"compares": compares, "span": span, "tie": ROUNDING * scale}
    return Scorer(name=name, open=open_scorer, identity=identity, **kind)


def _is_finite(found: Any) -> bool:
    try:
        return isinstance(found, numbers.Real) and math.isfinite(float(found))
    except OverflowError:
        return False


def _find_function(file: str, name: str) -> Scorer:
    """Import a function of the user, which runs the code of its module."""
    path, spec = Path(file).expanduser().absolute(), f"{file}:{name}"
    is_file = path.suffix == ".py"
    if is_file and not path.is_file():
        raise UserError(f"There is no file {file} (--judge).", do="check the path")
    sys.path.insert(0, str(path.parent if is_file else Path.cwd()))  # as `python FILE` does
    try:
        module = runpy.run_path(str(path)) if is_file else vars(importlib.import_module(file))
    except (Exception, SystemExit) as error:
        why, do = f"{type(error).__name__}: {error}.", "correct the file, or install what it imports"
        if not is_file and isinstance(error, ModuleNotFoundError) and error.name == file:
            do = "a function is FILE.py:FUNCTION or MODULE:FUNCTION"
        raise UserError(f"--judge {spec} cannot be imported.", why=why, do=do) from error
    define, function = f"define it as `def {name}(prompt, answer)`, and return a number", module.get(name)
    if not callable(function):
        raise UserError(f"{file} has no function {name}.", do=define)
    takes = inspect.signature(function).parameters.values()
    takes_all = any(each.kind is each.VAR_KEYWORD for each in takes)
    names = [each for each in ARGUMENTS if takes_all or each in {one.name for one in takes}]
    needed = {one.name for one in takes if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD}
    if "answer" not in names or not needed <= {*ARGUMENTS}:
        wrong = ", ".join(sorted(needed - {*ARGUMENTS}))
        found = f"it needs {wrong}, but" if wrong else "it has no argument answer, and"
        why = f"{found} is called by name with {', '.join(ARGUMENTS)}, if it accepts them."
        raise UserError(f"{spec} cannot score.", why=why, do=define)

    def score(item: Item) -> float:
        values = {**item.extra, "answer": item.answers[0], "reference": item.reference or None}
        place = f"prompt {item.group} ({shown(values['prompt'])})"
        do = "correct the function, then run the same command again"
        try:
            found = function(**{each: values[each] for each in names})
        except (Exception, SystemExit) as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            why = f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})."
            raise UserError(f"{spec} failed for {place}.", why=why, do=do) from error
        if not _is_finite(found):
            why = f"it returned {shown(found)}, which is not a finite number."
            raise UserError(f"{spec} did not score {place}.", why=why, do=do)
        return float(found)

    def open_scorer(observer: Observer) -> Score:
        return lambda items: [score(item) for item in items]

    identity = [spec, file_stamps(Path(str(module.get("__file__"))))]
    return Scorer(name=spec, open=open_scorer, identity=identity, runs_code=True)
