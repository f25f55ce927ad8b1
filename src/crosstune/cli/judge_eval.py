"""`crosstune judge eval`: test a judge on labelled data, beside baselines."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosstune.cli.arguments import print_json
from crosstune.cli.judge_table import table_lines, worst_lines
from crosstune.config.schema import Config
from crosstune.core.errors import EXIT_DONE, UserError

if TYPE_CHECKING:
    from crosstune.recipes.judge.items import Item
    from crosstune.results.judge import JudgeRequest


def run_action(own: argparse.Namespace, config: Config) -> int:
    if own.predictions is not None:
        return _evaluate_file(own, config)
    if own.target is None:
        raise UserError("judge eval needs a judge.", do="crosstune judge eval RUN, or --predictions FILE")
    from crosstune.results.judge import run_config

    folder = Path(own.target).expanduser()
    trained = run_config(folder)
    if trained is not None and "dataset" not in config.asked:
        report = measure_run(folder, own, config)
    else:
        report = _test_on(own, config)
    if own.json:
        print_json(report)
    return EXIT_DONE


def measure_run(folder: Path, own: argparse.Namespace, config: Config) -> dict[str, Any]:
    """Test the judge of a run on its own test split, and write what it says into the run."""
    from crosstune.core.json_files import read_json
    from crosstune.recipes.judge.open_splits import open_judge_data
    from crosstune.results.judge import backend_for_test, run_config

    trained = run_config(folder)
    assert trained is not None, "a run has a plan"
    data = open_judge_data(trained)
    if not data.test:
        raise UserError(
            f"The data of {folder} is too small for a test split.", do="pass --dataset with labelled items"
        )
    backend = config.backend
    if own.target is None:  # right after the training
        backend = backend_for_test(config, str(read_json(folder / "plan.json").get("backend")))
    items = data.test[: config.eval_samples] if "eval_samples" in config.asked else data.test
    request = make_request(own, config, target=str(folder), backend=backend)
    return _test(request, items, own, config, out=own.out or folder, train=data.train)


def make_request(own: argparse.Namespace, config: Config, *, target: str, backend: str) -> JudgeRequest:
    from crosstune.results.judge import JudgeRequest

    asked = config.asked
    return JudgeRequest(
        target=target,
        base=own.base,
        backend=backend,
        precision=config.precision if "precision" in asked else "fp32",
        by=config.judge_by,
        batch_size=config.batch_size if own.target and "batch_size" in asked else 16,
        max_new_tokens=config.max_new_tokens if "max_new_tokens" in asked else 256,
        share_prefixes=not own.no_shared_prefix,
    )


def _test_on(own: argparse.Namespace, config: Config) -> dict[str, Any]:
    """Test on the data of --dataset: its test split, or all of it."""
    from crosstune.recipes.judge.open_splits import item_reader, read_split
    from crosstune.results.judge import judge_scale

    if "dataset" not in config.asked:
        raise UserError(f"What should {own.target} be tested on?", do="pass --dataset with labelled items")
    request = make_request(own, config, target=own.target, backend=config.backend)
    items = read_split(item_reader(config, scale=judge_scale(request)), config.dataset, "test")
    if "eval_samples" in config.asked:
        items = items[: config.eval_samples]
    return _test(request, items, own, config, out=own.out, train=())


def _test(
    request: JudgeRequest,
    items: Sequence[Item],
    own: argparse.Namespace,
    config: Config,
    *,
    out: Path | None,
    train: Sequence[Item],
) -> dict[str, Any]:
    from crosstune.cli.output import print_line
    from crosstune.cli.screen import Screen
    from crosstune.report import write_report
    from crosstune.results.judge import measure_judge

    with Screen(live=True) as screen:
        test = measure_judge(
            request,
            items,
            config=config,
            observer=screen,
            train=train,
            with_untrained=not own.skip_untrained,
        )
    report = test.report
    written = test.write(out) if out is not None else None
    if out is not None and (out / "plan.json").is_file():
        write_report(out)
    if not own.json:
        for line in (*table_lines(report), *worst_lines(report["worst"])):
            print_line(line)
        if written is not None:
            print_line(f"written  {written}")
    return report


def _evaluate_file(own: argparse.Namespace, config: Config) -> int:
    """Compute the metrics of predictions that were made before."""
    from crosstune.cli.output import print_line
    from crosstune.recipes.judge.evaluation import baseline_verdicts, evaluate_beside
    from crosstune.recipes.judge.predictions import read_predictions
    from crosstune.recipes.judge.scale import read_scale

    scale, asked = read_scale(config.score_scale), "score_scale" in config.asked
    read = read_predictions(own.predictions, scale=scale, scale_asked=asked)
    others = read.others or baseline_verdicts(read.items, scale=read.scale)
    report = evaluate_beside(read.items, read.found, scale=read.scale, others=others)
    if not read.others:
        report["notes"].append("the baselines are fitted on these very items, which favours them")
    if own.json:
        print_json(report)
    else:
        for line in table_lines(report):
            print_line(line)
    return EXIT_DONE
