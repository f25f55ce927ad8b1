"""Open a trained judge, or any model as a judge, and score answers with it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from crosstune.config.load import make_config
from crosstune.config.schema import Config, option_list
from crosstune.core.errors import UserError, shown
from crosstune.core.events import Observer, Warned
from crosstune.core.logit_distance import check_finite
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.files.journal import file_stamps
from crosstune.files.json_files import read_json
from crosstune.models.file_hashes import sha256_of
from crosstune.models.folder import longest_context
from crosstune.models.identity import identity, recorded_sha256
from crosstune.planner.gather import make_plan
from crosstune.recipes.judge.items import Item, Scale, Score, Scorer, common_scale, read_scale
from crosstune.recipes.judge.judge import Judge, Judgement, judge_task
from crosstune.recipes.judge.verdicts import JudgeSettings, choose_format, read_judge_settings
from crosstune.runs.open_parts import find_model, open_session
from crosstune.runs.trained_folder import Trained, check_base, find_trained

ROUNDING = 1e-4
"""A judge's score moves by up to this fraction of its scale with the batch: a smaller difference is a tie."""


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


def open_judge(request: JudgeRequest, *, items: Sequence[Item], config: Config, observer: Observer) -> Judge:
    """Open a run, an adapter or a model as a judge. A model that was not trained as a judge uses the format of `config`."""
    trained, settings = find_judge(request)
    # Items without a scale use --score_scale, otherwise the judge's scale.
    own_scale = settings is not None and "score_scale" not in config.sources
    default = read_scale(settings.scale if settings is not None and own_scale else config.score_scale)
    scale = common_scale(items, default=default)
    if settings is None:
        verdict = choose_format(config.verdict, scale=scale, items=list(items))
        settings = verdict.settings()
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


def find_judge(request: JudgeRequest) -> tuple[Trained, JudgeSettings | None]:
    """Find the target, and its settings if it was trained as a judge. A run with a scalar head has a whole model."""
    model = Path(request.target).expanduser() / "model"
    settings = read_judge_settings(model)
    is_scalar = settings is not None and settings.head == "scalar"
    trained = find_trained(str(model) if is_scalar else request.target, base=request.base)
    return trained, read_judge_settings(trained.adapter or Path(trained.base).expanduser())


def find_judge_scorer(name: str, *, backend: str = "auto") -> Scorer:
    """Find a trained judge or reward model: a run, an adapter or a model folder. It is loaded when the scorer is opened."""
    run_config(Path(name).expanduser())  # raises for a run of a different recipe
    request = JudgeRequest(target=name, backend=backend)
    trained, settings = find_judge(request)
    if settings is None:
        do = "pass a run of `crosstune judge train`, or a function as FILE.py:FUNCTION"
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

    def content() -> str:
        if trained.adapter is None:
            weights = [identity(Path(trained.base).expanduser())["sha256"]]
        else:
            file = trained.adapter / "adapter_model.safetensors"
            weights = [sha256_of(file), recorded_sha256(trained.record)]
        return hashlib.sha256(json.dumps([weights, asdict(settings)]).encode()).hexdigest()

    compares = settings.verdict == "winner" and not settings.is_reward
    low, scale = 0.0, 1.0
    if settings.verdict != "winner":
        low, scale = read_scale(settings.scale).low, read_scale(settings.scale).span
    files = file_stamps(trained.adapter, Path(trained.base).expanduser())
    asked, span = [asdict(request), asdict(settings), files], math.inf if settings.is_reward else scale
    kind: Any = {"compares": compares, "span": span, "low": low, "tie": ROUNDING * scale}
    return Scorer(name=name, open=open_scorer, identity=asked, content=content, **kind)


def check_verdicts(judged: Sequence[Judgement], name: str) -> None:
    """Raise a UserError if a judge computed a score or a probability that is not finite."""
    numbers = [[one.score or 0.0, *one.probabilities, *one.rewards] for one in judged]
    check_finite([np.array(each) for each in numbers], name)


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
