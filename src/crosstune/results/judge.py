"""Open a trained judge, or any model as a judge, and test it and its baselines on labeled items."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstune.config.schema import Config
from crosstune.core.errors import shown
from crosstune.core.events import Evaluating, Observer, Warned
from crosstune.files.journal import Journal, file_stamps
from crosstune.files.json_files import write_json
from crosstune.files.outputs import check_output_folder
from crosstune.files.run_record import JUDGE_METRICS, JUDGE_PREDICTIONS
from crosstune.recipes.judge.evaluation import (
    UNTRAINED,
    Report,
    baseline_verdicts,
    evaluate_items,
    worst_items,
)
from crosstune.recipes.judge.items import Item, Scale, read_scale
from crosstune.recipes.judge.judge import Judge, Judgement
from crosstune.recipes.judge.open_splits import item_reader, without_ties
from crosstune.recipes.judge.predictions import prediction_row, write_predictions
from crosstune.recipes.judge.read_items import ItemReader
from crosstune.runs.judges import JudgeRequest, check_verdicts, find_judge, open_judge

_BATCHES_AT_ONCE = 16
"""Batches whose verdicts are kept together; items are sorted by length within them."""
_NAMED = 5
"""Long items in a warning."""


def backend_for_test(config: Config, trained_on: str) -> str:
    """Return the backend that tests a trained judge: by default not a GPU, which two models would share."""
    if config.eval_backend != "auto":
        return config.eval_backend
    return trained_on if trained_on not in ("cuda", "rocm", "xpu", "mps") else "cpu"


def reader_for(request: JudgeRequest, config: Config, *, labeled: bool = True) -> ItemReader:
    """Return a reader of the items for a judge: by default on its scale."""
    _, settings = find_judge(request)
    scale = read_scale(settings.scale) if settings is not None else None
    rewards = settings is not None and settings.is_reward
    return item_reader(config, labeled=labeled, scale=scale, rewards=rewards)


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

    def show(done: int, total: int) -> None:
        finished = len(journal.rows) + len(block) * done // total
        observer.on_event(Evaluating(done=finished, total=len(items), what="items", stage="judge"))

    with journal:
        for start in range(len(journal.rows), len(items), journal.block):
            block = items[start : start + journal.block]
            judged = judge.judge(block, by=request.by, max_new_tokens=request.max_new_tokens, progress=show)
            check_verdicts(judged, request.target)
            journal.add(dataclasses.asdict(one) for one in judged)
    found = [_read_judgement(row) for row in journal.rows]
    if long := [item for item, one in zip(items, found, strict=True) if one.too_long]:
        names = ", ".join(shown(item.id) for item in long[:_NAMED]) + " ..." * (len(long) > _NAMED)
        message = (
            f"{len(long)} of {len(items)} items exceed the model's context of {judge.max_tokens} tokens: "
            f"{names}; they are not judged, and their verdicts count as unreadable"
        )
        observer.on_event(Warned(message=message))
    return found


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
    report = evaluate_items(items, found, scale=scale, others=others)
    report["judge"] = dataclasses.asdict(settings) | {"by": request.by, "target": request.target}
    report["worst"] = [prediction_row(items[place], found[place]) for place in worst_items(items, found)]
    return JudgeTest(items=items, found=found, others=others, scale=scale, report=report, journals=journals)
