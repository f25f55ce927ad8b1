"""Open a trained judge, or any model as a judge, and test it and its baselines on labeled items."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from crosstune.config.load import make_config
from crosstune.config.schema import Config, option_list
from crosstune.core.errors import UserError, shown
from crosstune.core.events import Evaluating, EvaluationStarted, Observer, Warned
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.files.journal import Journal, file_stamps
from crosstune.files.json_files import read_json, write_json
from crosstune.files.outputs import check_output_folder
from crosstune.files.run_record import JUDGE_METRICS, JUDGE_PREDICTIONS
from crosstune.models.folder import longest_context
from crosstune.planner.gather import make_plan
from crosstune.recipes.judge.evaluation import (
    UNTRAINED,
    Report,
    baseline_verdicts,
    evaluate_with_baselines,
    worst_items,
)
from crosstune.recipes.judge.items import Item, Scale, common_scale, read_scale
from crosstune.recipes.judge.judge import Judge, Judgement, judge_task
from crosstune.recipes.judge.open_splits import item_reader, without_ties
from crosstune.recipes.judge.predictions import prediction_row, write_predictions
from crosstune.recipes.judge.read_items import ItemReader
from crosstune.recipes.judge.verdicts import JudgeSettings, choose_format, read_judge_settings
from crosstune.results.opened import check_base
from crosstune.results.trained_folder import Trained, find_trained
from crosstune.results.verify import check_finite
from crosstune.runs.open_parts import find_model, open_session

_BATCHES_AT_ONCE = 16
"""Batches whose verdicts are kept together; items are sorted by length within them."""
_NAMED = 5
"""Long items in a warning."""


@dataclass(frozen=True, kw_only=True)
class JudgeRequest:
    """A judge to open, its device, and the way to get its verdicts."""

    target: str
    base: str | None = None
    backend: str = "auto"
    precision: str = "fp32"
    by: str = "probabilities"
    batch_size: int = 16
    max_new_tokens: int = 256
    share_prefixes: bool = True
    untrained: bool = False
    """Open the untrained base model instead."""


def run_config(folder: Path) -> Config | None:
    """Return the options of a judge run; None if the folder is not a run. Raise for a run of a different recipe."""
    if not (folder / "plan.json").is_file():
        return None
    plan = read_json(folder / "plan.json")
    options, asked = (
        found if isinstance(found := plan.get(name), dict) else {} for name in ("options", "asked")
    )
    if options.get("recipe") != "judge":
        raise UserError(
            f"The run {folder} did not train a judge.",
            why=f"its recipe is {options.get('recipe')}.",
            do="train one with `crosstune judge train`",
        )
    known = {option.name for option in option_list()}
    config = make_config(**{name: value for name, value in options.items() if name in known})
    return dataclasses.replace(config, sources=dict.fromkeys(asked, f"the run {folder.name}"))


def backend_for_test(config: Config, trained_on: str) -> str:
    """Return the backend that tests a trained judge: by default not a GPU, which two models would share."""
    if config.eval_backend != "auto":
        return config.eval_backend
    return trained_on if trained_on not in ("cuda", "rocm", "xpu", "mps") else "cpu"


def open_judge(request: JudgeRequest, *, items: Sequence[Item], config: Config, observer: Observer) -> Judge:
    """Open a run, an adapter or a model as a judge. A model that was not trained as a judge uses the format of `config`."""
    trained, settings = find_judge(request)
    # Items without a scale use --score_scale, otherwise the judge's scale.
    own_scale = settings is not None and "score_scale" not in config.sources
    default = read_scale(settings.scale if settings is not None and own_scale else config.score_scale)
    scale = common_scale(items, default=default)
    if settings is None:
        verdict = choose_format(config.verdict, scale=scale, items=list(items))
        settings = JudgeSettings(verdict=verdict.name, scale=str(verdict.scale), explains=verdict.explains)
    _check_items(settings, items, scale)
    if request.untrained:  # it has no scalar head yet: read its score tokens
        settings = dataclasses.replace(settings, head="tokens", temperature=1.0)
    options = trained.options()
    if request.untrained:
        options = {"model_name": _untrained_base(trained, request), "train_type": "full"}
    options |= {"backend": request.backend, "precision": request.precision}
    plan = make_plan(make_config(**options), base=None if request.untrained else trained.base_choice)
    model = find_model(plan.config, observer)
    if not request.untrained:
        for sentence in check_base(trained, model):
            observer.on_event(Warned(message=sentence))
    session = open_session(plan, model, task=judge_task(settings.head, plan.engine), trained=False)
    tokenizer = Tokenizer.from_folder(trained.tokenizer_folder(model.path), model=model.path)
    return Judge(
        session=session,
        tokenizer=tokenizer,
        settings=settings,
        batch_size=request.batch_size,
        share_prefixes=request.share_prefixes,
        max_tokens=longest_context(model.path),
    )


def reader_for(request: JudgeRequest, config: Config, *, labelled: bool = True) -> ItemReader:
    """Return a reader of the items for a judge: by default on its scale."""
    _, settings = find_judge(request)
    scale = read_scale(settings.scale) if settings is not None else None
    rewards = settings is not None and settings.is_reward
    return item_reader(config, labelled=labelled, scale=scale, rewards=rewards)


def find_judge(request: JudgeRequest) -> tuple[Trained, JudgeSettings | None]:
    """Find the target, and its settings if it was trained as a judge. A run with a scalar head has a whole model."""
    model = Path(request.target).expanduser() / "model"
    settings = read_judge_settings(model)
    is_scalar = settings is not None and settings.head == "scalar"
    trained = find_trained(str(model) if is_scalar else request.target, base=request.base)
    return trained, read_judge_settings(trained.adapter or Path(trained.base).expanduser())


def make_journal(
    output: Path | None, judge: Judge, items: Sequence[Item], request: JudgeRequest, observer: Observer
) -> Journal:
    """Return the journal of the verdicts for an output; the same judge, items and options continue it."""
    trained, _ = find_judge(request)
    asked = {
        "request": dataclasses.asdict(request),
        "judge": dataclasses.asdict(judge.settings),
        "files": file_stamps(trained.adapter, Path(trained.base).expanduser()),
        "items": repr(list(items)),
    }
    block = _BATCHES_AT_ONCE * request.batch_size
    return Journal(output, asked, say=lambda said: observer.on_event(Warned(message=said)), block=block)


def ask(
    judge: Judge, items: Sequence[Item], request: JudgeRequest, observer: Observer, *, journal: Journal
) -> list[Judgement]:
    """Judge the items that the journal lacks, add them to it, and show the progress."""
    if long := judge.too_long(items):
        names = ", ".join(shown(item.id) for item in long[:_NAMED]) + " ..." * (len(long) > _NAMED)
        observer.on_event(
            Warned(
                message=f"{len(long)} of {len(items)} items exceed the model's context of {judge.max_tokens} tokens: "
                f"{names}; they are not judged, and their verdicts count as unreadable"
            )
        )
    observer.on_event(EvaluationStarted(step=0, when="test"))

    def show(done: int, total: int) -> None:
        finished = len(journal.rows) + len(block) * done // total
        observer.on_event(Evaluating(done=finished, total=len(items), what="items"))

    with journal:
        for start in range(len(journal.rows), len(items), journal.block):
            block = items[start : start + journal.block]
            judged = judge.judge(block, by=request.by, max_new_tokens=request.max_new_tokens, progress=show)
            check_verdicts(judged, request.target)
            journal.add(dataclasses.asdict(one) for one in judged)
    return [_read_judgement(row) for row in journal.rows]


def check_verdicts(judged: Sequence[Judgement], name: str) -> None:
    """Raise a UserError if a judge computed a score or a probability that is not finite."""
    numbers = [[one.score or 0.0, *one.probabilities, *one.rewards] for one in judged]
    check_finite([np.array(each) for each in numbers], name)


def _read_judgement(row: Mapping[str, Any]) -> Judgement:
    lists = {name: tuple(row.get(name, ())) for name in ("probabilities", "issues", "rewards")}
    return Judgement(**{**row, **lists})


@dataclass(frozen=True, kw_only=True)
class JudgeTest:
    """Labeled items with the verdicts of a judge and its baselines, and their metrics."""

    items: Sequence[Item]
    found: Sequence[Judgement]
    others: Mapping[str, Sequence[Judgement]]
    scale: Scale
    report: Report

    journals: Sequence[Journal] = ()

    def write(self, folder: Path) -> Path:
        """Write the predictions and the metrics, and remove the journals; return the predictions file."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / JUDGE_PREDICTIONS
        write_predictions(path, self.items, self.found, scale=self.scale, others=self.others)
        write_json(folder / JUDGE_METRICS, self.report)
        for journal in self.journals:
            journal.remove()
        return path


def measure_judge(
    request: JudgeRequest,
    items: Sequence[Item],
    *,
    config: Config,
    observer: Observer,
    train: Sequence[Item] = (),
    with_untrained: bool = True,
    out: Path | None = None,
) -> JudgeTest:
    """Judge labeled items, and measure the agreement with the labels and with the baselines. Finished verdicts are kept in
    the folder `out` until the test is written."""
    if out is not None:
        check_output_folder(out, option="out")
    judge = open_judge(request, items=items, config=config, observer=observer)
    if judge.settings.is_reward:
        items = without_ties(items)
    output = None
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        output = out / JUDGE_PREDICTIONS
    journals = [make_journal(output, judge, items, request, observer)]
    found = ask(judge, items, request, observer, journal=journals[0])
    scale, settings = judge.verdict.scale, judge.settings
    del judge  # free its memory for the untrained model
    others = baseline_verdicts(items, scale=scale, train=train)
    if with_untrained:
        untrained = dataclasses.replace(request, untrained=True)
        base = open_judge(untrained, items=items, config=config, observer=observer)
        output = output.with_name(f"{output.name}.untrained") if output is not None else None
        journals.append(make_journal(output, base, items, untrained, observer))
        others[UNTRAINED] = ask(base, items, untrained, observer, journal=journals[1])
    report = evaluate_with_baselines(items, found, scale=scale, others=others)
    report["judge"] = dataclasses.asdict(settings) | {"by": request.by, "target": request.target}
    report["worst"] = [prediction_row(items[place], found[place]) for place in worst_items(items, found)]
    return JudgeTest(items=items, found=found, others=others, scale=scale, report=report, journals=journals)


def _untrained_base(trained: Trained, request: JudgeRequest) -> str:
    """Return the model that the judge was trained from."""
    base: Any = trained.record.get("base") if trained.adapter is None else None
    if isinstance(base, dict) and base.get("name"):
        return str(base["name"])
    return trained.base if trained.adapter is not None else request.base or trained.base


def _check_items(settings: JudgeSettings, items: Sequence[Item], scale: Scale) -> None:
    if settings.is_reward and any(item.score is not None for item in items):
        raise UserError(
            "A reward model cannot be tested on scores.",
            why="its rewards have no scale.",
            do="pass pairs of answers; `crosstune judge predict` gives the rewards of single answers",
        )
    if items and items[0].is_pair != (settings.verdict == "winner") and not settings.is_reward:
        kind = "pairs of answers" if items[0].is_pair else "single answers"
        learned = "which of two answers is better" if settings.verdict == "winner" else "to score an answer"
        raise UserError(
            f"This judge cannot judge {kind}.", why=f"it learned {learned}.", do="pass different data"
        )
    if any(item.score is not None for item in items) and scale != read_scale(settings.scale):
        raise UserError(
            f"This judge scores on the scale {settings.scale}, but the data is on {scale}.",
            why="the scores cannot be compared.",
            do=f"convert the data to the scale {settings.scale}; --score_scale specifies its scale",
        )
