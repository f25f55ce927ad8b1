"""Run the tasks of lm-evaluation-harness on a run and its base model, and keep each finished task in the run folder."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from crosstune.config.load import make_config
from crosstune.core.errors import UserError, shown
from crosstune.core.events import Evaluating, Observer, Warned
from crosstune.core.names import did_you_mean
from crosstune.data.read.files import file_part
from crosstune.files.hub_connection import offline_if_unreachable
from crosstune.files.journal import Journal
from crosstune.files.json_files import read_json, to_json, write_json
from crosstune.files.plain_files import kind_of, read_plain_text
from crosstune.files.run_record import BENCHMARKS
from crosstune.files.yaml_files import VALUES_LIMIT, YAML_LIMIT
from crosstune.process.this_process import hide_output
from crosstune.results.chat_model import ChatModel, open_chat_model
from crosstune.results.export import weights_key
from crosstune.results.harness_model import Answers, harness_model
from crosstune.runs.open_parts import find_model
from crosstune.runs.trained_folder import Trained, find_trained

_BOOTSTRAPS = 1000
_FEWSHOT_SEED = 1234
"""The harness's own, so that numbers can be compared with its command line."""


@dataclass(frozen=True, kw_only=True)
class EvalRequest:
    target: str
    tasks: Sequence[str]
    """Names of tasks, or YAML files."""
    chat_template: bool = False
    num_fewshot: int | None = None
    """None: the task's own number."""
    limit: int | None = None
    batch_size: int = 64
    backend: str = "auto"
    precision: str = "auto"


def check_harness() -> None:
    """Raise a UserError if lm-evaluation-harness is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            "crosstune eval needs the evaluation harness.",
            why="the Python package lm_eval is not installed.",
            do="pip install 'crosstune[eval]'",
        )


def evaluate(request: EvalRequest, *, observer: Observer) -> list[dict[str, Any]]:
    """Evaluate the target, and before it the base model of a run; return and keep the results of all tasks."""
    check_harness()
    trained = find_trained(request.target)
    place = trained.home / BENCHMARKS if trained.is_run and trained.home is not None else None
    kept = _read_results(place)
    found = list[dict[str, Any]]()
    index, tasks = _load_tasks(request)  # before a model is opened
    for side, target, its in _sides(request, trained):
        model = find_model(make_config(**its.options()), observer)
        weights = weights_key(its, model)
        chat_model: ChatModel | None = None
        for asked, definition in tasks.items():
            facts = {  # they identify a result
                "side": side,
                "asked": asked,
                "definition": definition,
                "weights": weights,
                "chat_template": request.chat_template,
                "num_fewshot_asked": request.num_fewshot,
                "limit": request.limit,
                "precision": request.precision,
            }
            rows = [row for row in kept if row | facts == row]
            if rows:
                message = f"{asked} ({side} training) is not computed again: its result is in {place}"
                observer.on_event(Warned(message=message))
            else:
                if chat_model is None:
                    chat_model = open_chat_model(
                        target,
                        observer=observer,
                        backend=request.backend,
                        precision=request.precision,
                        chats=False,
                    )
                    if request.chat_template and chat_model.tokenizer.chat_template is None:
                        do = "remove --chat, to evaluate with plain prompts"
                        raise UserError(f"{target} has no chat template.", do=do)
                with _open_journal(place, facts, observer) as journal:
                    show = _progress(observer, side, asked)
                    answers = Answers(journal, show)
                    harness = harness_model(chat_model, model.path, answers, batch_size=request.batch_size)
                    rows = [facts | row for row in _run_task(asked, harness, index, request)]
                kept = [*_read_results(place), *rows]  # another evaluation may have finished in between
                if place is not None:
                    write_json(place, {"format": 1, "lm_eval": _version(), "results": kept})
                journal.remove()
            found += rows
    return found


def _open_journal(place: Path | None, facts: Mapping[str, Any], observer: Observer) -> Journal:
    """Return the journal of a task's answers, next to the results of its run."""
    asked = {**facts, "lm_eval": _version()}
    key = hashlib.sha256(to_json(asked).encode()).hexdigest()[:12]
    output = place.with_name(f"{place.name}.{key}") if place is not None else None
    return Journal(output, asked, say=lambda said: observer.on_event(Warned(message=said)))


def _read_results(place: Path | None) -> list[dict[str, Any]]:
    found = read_json(place).get("results") if place is not None else None
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


def _sides(request: EvalRequest, trained: Trained) -> Iterator[tuple[str, str, Trained]]:
    """Yield the base model of a run as `before`, and the target as `after`."""
    base: str | None = None
    if trained.adapter is not None:
        base = trained.base
    elif trained.is_run and trained.home is not None:
        model = read_json(trained.home / "plan.json").get("model") or {}
        base = next((name for name in (model.get("name"), model.get("path")) if name), None)
    if base is not None:
        yield "before", base, find_trained(base)
    yield "after", request.target, trained


def _load_tasks(request: EvalRequest) -> tuple[Any, dict[str, str | None]]:
    """Return the harness's index of tasks, and the tasks with the hash of their definition (None for a built-in task).

    The index of its own tasks takes many seconds, so it is made once, and only if it is needed."""
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    files = [task for task in request.tasks if Path(task).suffix in (".yaml", ".yml")]
    if not request.tasks:
        raise UserError("crosstune eval needs a task.", do="pass --tasks with names or YAML files")
    for task in files:
        if not Path(task).is_file():
            raise UserError(f"There is no task file {task}.", do="check the path of the YAML file")
        _check_data_files(task)
    index = TaskManager(include_defaults=len(files) < len(request.tasks))
    for task in request.tasks:
        if task not in files and task not in index.all_tasks:
            do = f"{did_you_mean(task, index.all_tasks)}To list the {len(index.all_tasks):,} tasks: lm_eval ls tasks"
            raise UserError(f"Unknown task {shown(task)}.", do=do)
    return index, {task: _definition(task, index) if task in files else None for task in request.tasks}


def _check_data_files(task: str) -> None:
    """Raise a UserError if the `data_files` of a task are pipes or devices, on which the datasets library would wait, or have
    lines that are no JSON objects, on which it crashes; or if its aliases expand to more than a task can have."""
    num_values = 0

    def check(node: Any, *, names_files: bool) -> None:
        nonlocal num_values
        num_values += 1
        if num_values > VALUES_LIMIT:
            why = f"with its aliases it has more than {VALUES_LIMIT:,} values."
            raise UserError(
                f"The task {task} cannot be evaluated.", why=why, do="write it with fewer aliases"
            )
        if isinstance(node, yaml.ScalarNode) and names_files:
            path = Path(node.value)
            if path.exists() and not path.is_file():
                why = f"{path} is {kind_of(path)}."
                raise UserError(
                    f"The task {task} cannot be evaluated.", why=why, do="write its rows to a file"
                )
            if path.suffix == ".jsonl" and path.exists():
                collections.deque(file_part(path).rows(), maxlen=0)
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                check(value, names_files=names_files or key.value == "data_files")
        elif isinstance(node, yaml.SequenceNode):
            for value in node.value:
                check(value, names_files=names_files)

    with _explained(task):
        check(yaml.compose(read_plain_text(Path(task), limit=YAML_LIMIT), yaml.SafeLoader), names_files=False)


def _definition(task: str, index: Any) -> str:
    """Return a hash of the settings, functions and rows of a task file."""
    sha = hashlib.sha256()
    with _explained(task), hide_output():
        for name, each in sorted(index.load([task])["tasks"].items()):
            config = each.config.to_dict() | {"metadata": None}  # it has the path of the file
            text = json.dumps([name, config], default=str, sort_keys=True)
            sha.update(re.sub(r" at 0x[0-9a-f]+", "", text).encode())
            for split, rows in sorted(each.dataset.items()):
                sha.update(split.encode())
                for row in rows:
                    sha.update(json.dumps(row, default=str, sort_keys=True).encode())
    return sha.hexdigest()


@contextlib.contextmanager
def _explained(task: str) -> Iterator[None]:
    """Turn an error of the harness into a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of the harness, of datasets, of a template or of the code in a task
        raise UserError(
            f"The task {task} cannot be evaluated.",
            why=f"{type(error).__name__}: {error}",
            do="check the task's file, and for a task of the harness that its dataset can be downloaded",
        ) from error


def _run_task(task: str, model: Any, index: Any, request: EvalRequest) -> Iterator[dict[str, Any]]:
    """Yield a row for each metric of a task."""
    from lm_eval.evaluator import evaluate as evaluate_tasks

    with _explained(task), hide_output():  # without the progress bars of the harness and of datasets
        loaded = index.load([task])
        for each in loaded["tasks"].values():
            shots = each.get_config("num_fewshot")
            if shots != 0:  # a task that sets 0 itself is without examples
                each.set_config(
                    key="num_fewshot", value=shots if request.num_fewshot is None else request.num_fewshot
                )
            if each.get_config("num_fewshot") is None:
                each.set_config(key="num_fewshot", value=0)
            each.set_fewshot_seed(seed=_FEWSHOT_SEED)
        with offline_if_unreachable():
            report = evaluate_tasks(
                lm=model,
                task_dict=loaded,
                limit=request.limit,
                bootstrap_iters=_BOOTSTRAPS,
                log_samples=False,
                apply_chat_template=request.chat_template,
                fewshot_as_multiturn=request.chat_template,
            )
    assert report is not None, "this process has rank 0"
    names = [name for name in (task, *report.get("groups", {})) if name in report["results"]]
    for name in names or report["results"]:
        for key, value in report["results"][name].items():
            metric, _, filtered = key.partition(",")
            if not filtered or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            noise = report["results"][name].get(f"{metric}_stderr,{filtered}")
            yield {
                "task": name,
                "metric": metric if filtered == "none" else f"{metric} ({filtered})",
                "value": float(value),
                "stderr": float(noise) if isinstance(noise, (int, float)) else None,
                "num_samples": report.get("n-samples", {}).get(name, {}).get("effective"),
                "num_fewshot": report.get("n-shot", {}).get(name),
                "higher_is_better": report.get("higher_is_better", {}).get(name, {}).get(metric),
                "version": report.get("versions", {}).get(name),
            }


def _version() -> str:
    return importlib.metadata.version("lm_eval")


def _progress(observer: Observer, side: str, task: str) -> Callable[[int, int], None]:
    """Return a callback that reports finished requests."""
    stage = f"evaluate {Path(task).stem} {side}"

    def show(done: int, total: int) -> None:
        observer.on_event(Evaluating(done=done, total=total, what="requests", stage=stage))

    return show
