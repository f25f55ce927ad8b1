"""Score answers with a trained judge, or with a Python function of the user."""

from __future__ import annotations

import importlib
import inspect
import math
import numbers
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

from crosstune.core.errors import UserError, shown
from crosstune.core.events import Observer
from crosstune.files.journal import file_stamps
from crosstune.recipes.judge.items import Item
from crosstune.recipes.judge.scoring import Score, Scorer
from crosstune.runs.judges import find_judge_scorer

ARGUMENTS = ("prompt", "answer", "messages", "reference")
"""The arguments that a function may have."""


def find_scorer(name: str, *, backend: str = "auto") -> Scorer:
    """Find a function, or a trained judge: a run, an adapter or a model folder."""
    file, _, function = name.rpartition(":")
    if file and not Path(name).expanduser().exists():
        return _find_function(file, function)
    return find_judge_scorer(name, backend=backend)


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
