"""`crosstune judge`: train, test and use a model that scores or compares answers."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosstune.cli.arguments import (
    Parser,
    announce_command,
    at_least,
    parse_config,
    print_json,
    print_result,
    print_written,
    read_path,
    read_run,
)
from crosstune.cli.commands.train import add_machine
from crosstune.cli.judge_lines import data_lines, metric_lines, verdict_text, worst_lines
from crosstune.config.schema import Config
from crosstune.core.errors import EXIT_DONE, EXIT_STOPPED, UserError
from crosstune.core.names import unknown_name

if TYPE_CHECKING:
    from crosstune.process.ranks import Group
    from crosstune.recipes.judge.items import Item
    from crosstune.recipes.judge.verdicts import VerdictFormat
    from crosstune.runs.judges import JudgeRequest

ACTIONS = {
    "train": "train a judge, then test it on the test split",
    "eval": "test a judge (a run, an adapter or a model) on labeled data, with baselines",
    "predict": "judge unlabeled answers",
    "data": "check a dataset: splits, scores, groups, leaks; or split it",
}
"""Action -> one-line help."""
_READ = (
    *("recipe", "backend", "precision", "batch_size", "max_new_tokens", "judge_by", "dataset", "columns"),
    *("group_by", "references", "verdict", "score_scale", "verbose", "strict"),
)
READ = {
    "eval": frozenset(_READ),
    "predict": frozenset((*_READ, "overwrite")) - {"dataset"},
    "eval --predictions": frozenset(("recipe", "score_scale")),
}
"""Action -> the options of train that it reads; others are reported as without effect."""

EXAMPLES = """examples:
  crosstune judge train --model smollm2-135m --dataset judge_translations --max_samples 1000
  crosstune judge train --head scalar --dataset pairs.jsonl
  crosstune judge train --dataset ratings.csv --columns original=task,mean=score --score_scale 0-100
  crosstune judge eval runs/NAME
  crosstune judge eval runs/NAME --dataset test.jsonl --judge_by generation
  crosstune judge eval --predictions runs/NAME/test_predictions.json
  crosstune judge predict runs/NAME --input answers.jsonl --output verdicts.jsonl
  crosstune judge data ratings.csv --split_to splits

A row has a task, an answer and a score; or a task, answer_a, answer_b and a winner; or a prompt, a chosen and a rejected
answer; or messages that end with the verdict."""


def make_parser() -> Parser:
    summary = "\n".join(f"  {name:<8} {text}" for name, text in ACTIONS.items())
    parser = Parser(
        "judge",
        description="Train and use a model that scores or compares answers.\n\nusage: crosstune judge ACTION [TARGET] [options]\n\n"
        f"{summary}\n\nThe options of train are accepted too; each backend has a preset.",
        epilog=EXAMPLES,
    )
    add = parser.add_argument
    add("--input", type=read_path, metavar="FILE", help="for predict: the answers to judge")
    add("--output", type=read_path, metavar="FILE", help="for predict: write the verdicts here (JSON Lines)")
    add("--out", type=read_path, metavar="DIR", help="for eval: folder for the predictions and metrics")
    predictions = "for eval: compute metrics from a predictions file"
    add("--predictions", type=read_path, metavar="FILE", help=predictions)
    add("--base", metavar="MODEL", help="for eval and predict: the base model of an adapter")
    add("--skip_untrained", action="store_true", help="do not test the untrained model for comparison")
    shared = "do not reuse the computation of shared prompt prefixes"
    add("--no_shared_prefix", action="store_true", help=shared)
    add("--split_to", type=read_path, metavar="DIR", help="for data: write splits by group into a folder")
    show = "for data: print the first N examples (default 2)"
    add("--show", type=at_least(0), default=2, metavar="N", help=show)
    add_machine(parser)
    return parser


def run(words: Sequence[str]) -> int:
    parser = make_parser()
    if not words or words[0] in ("-h", "--help"):
        parser.print_help()
        sys.exit(0)
    action, rest = words[0], list(words[1:])
    if action not in ACTIONS:
        raise unknown_name("action of judge", action, ACTIONS)
    target = rest.pop(0) if rest and not rest[0].startswith("-") else None
    if target is not None and action == "train":
        raise UserError(
            f"judge train takes no positional argument, but got {target!r}.",
            do="pass the data with --dataset",
        )
    if target is not None and action == "data":
        rest = ["--dataset", target, *rest]
    own, config = parse_config(parser, [*rest, "--recipe", "judge"])
    own.target, own.words = read_run(target) if target is not None else None, ["crosstune", "judge", *words]
    _report_unused(action if own.predictions is None else f"{action} --predictions", config)
    return {"train": _train, "eval": _eval, "predict": _predict, "data": _data}[action](own, config)


def _report_unused(action: str, config: Config) -> None:
    """Report the options of the command line that the action does not read."""
    if action in READ:
        for name, source in config.sources.items():
            if name not in READ[action] and source.startswith("flag "):  # a file may be for a training run
                flag = source.removeprefix("flag ")
                print(f"note     {flag} has no effect on judge {action}", file=sys.stderr)


def _train(own: argparse.Namespace, config: Config) -> int:
    """Train, then test the judge in the first process after the others have exited."""
    from crosstune.cli.commands.train import finish_together, run_in_processes, show_training
    from crosstune.tracking.observe import Tracking

    trained: dict[str, Any] = {}

    def train(config: Config, group: Group) -> int:
        result, report = show_training(config, group, command=own.words, tracking=tracking, as_json=own.json)
        finish_together(result, group)
        if group.ranks.first:
            folder, page = str(result.folder), str(report) if report else None
            trained.update(result.summary, folder=folder, report=page)
        return EXIT_DONE if result.summary["status"] == "finished" else EXIT_STOPPED

    with Tracking() as tracking:
        code = run_in_processes(own, config, own.words[1:], train)
        if code == EXIT_DONE and trained.get("result") and not config.skip_eval:
            tested = _measure_run(Path(trained["folder"]), own, config)
            counts = {name: tested[name] for name in ("num_items", "num_unreadable")}
            tracking.log_test(tested["metrics"] | counts, tested["worst"])
            trained["test"] = {"metrics": tested["metrics"], "intervals": tested["intervals"], **counts}
    if own.json and trained:
        print_json(trained)
    return code


def _eval(own: argparse.Namespace, config: Config) -> int:
    if own.predictions is not None:
        return _evaluate_file(own, config)
    if own.target is None:
        raise UserError("judge eval needs a judge.", do="crosstune judge eval RUN, or --predictions FILE")
    from crosstune.files.outputs import check_output_folder

    if own.out is not None:  # before the data is read
        check_output_folder(own.out, option="out")
    announce_command("judge eval", own.target, "importing the engine")
    from crosstune.runs.judges import run_config

    folder = Path(own.target).expanduser()
    is_run = run_config(folder) is not None
    test_split = is_run and "dataset" not in config.sources
    report = _measure_run(folder, own, config) if test_split else _test_on(own, config)
    if own.json:
        print_json(report)
    return EXIT_DONE


def _measure_run(folder: Path, own: argparse.Namespace, config: Config) -> dict[str, Any]:
    """Test the judge of a run on its test split, and write the report into the run folder."""
    from crosstune.files.json_files import read_json
    from crosstune.recipes.judge.open_splits import open_judge_data
    from crosstune.results.judge import backend_for_test
    from crosstune.runs.judges import run_config

    trained = run_config(folder)
    assert trained is not None, "a run has a plan"
    data = open_judge_data(trained)
    if not data.test:
        raise UserError(
            f"The data of {folder} is too small for a test split.", do="pass --dataset with labeled items"
        )
    backend = config.backend
    if own.target is None:  # right after training
        backend = backend_for_test(config, str(read_json(folder / "plan.json").get("backend")))
    request = _make_request(own, config, target=str(folder), backend=backend)
    return _test(request, data.test, own, config, out=own.out or folder, train=data.train)


def _make_request(own: argparse.Namespace, config: Config, *, target: str, backend: str) -> JudgeRequest:
    from crosstune.runs.judges import JudgeRequest

    asked = config.sources
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
    """Test on --dataset: its test split, or all of it."""
    from crosstune.recipes.judge.open_splits import read_split
    from crosstune.results.judge import reader_for

    if "dataset" not in config.sources:
        raise UserError(f"No data to test {own.target} on.", do="pass --dataset with labeled items")
    request = _make_request(own, config, target=own.target, backend=config.backend)
    items = read_split(reader_for(request, config), config.dataset, "test")
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
    from crosstune.cli.commands.train import try_report
    from crosstune.cli.terminal.screen import Screen
    from crosstune.results.judge import measure_judge

    if own.target is None:  # right after training
        announce_command("judge eval", request.target, "importing the engine")
    with Screen(live=True) as screen:
        test = measure_judge(
            request,
            items[: config.eval_samples] if "eval_samples" in config.sources else items,
            config=config,
            observer=screen,
            train=train,
            with_untrained=not own.skip_untrained,
            out=out,
        )
    report = test.report
    lines = [*metric_lines(report), *worst_lines(report["worst"])]
    if out is not None:
        lines.append(f"written  {test.write(out)}")
        if (out / "plan.json").is_file():
            try_report(out, screen)
    if not own.json:
        print_result(report, lines, as_json=False)
    return report


def _evaluate_file(own: argparse.Namespace, config: Config) -> int:
    """Compute metrics from a predictions file."""
    from crosstune.recipes.judge.evaluation import baseline_verdicts, evaluate_items
    from crosstune.recipes.judge.items import read_scale
    from crosstune.recipes.judge.predictions import read_predictions

    scale, asked = read_scale(config.score_scale), "score_scale" in config.sources
    read = read_predictions(own.predictions, scale=scale, scale_asked=asked)
    others = read.others or baseline_verdicts(read.items, scale=read.scale)
    report = evaluate_items(read.items, read.found, scale=read.scale, others=others)
    if not read.others:
        report["notes"].append("the baselines are fitted on the same items, which favors them")
    return print_result(report, metric_lines(report), as_json=own.json)


def _predict(own: argparse.Namespace, config: Config) -> int:
    if own.target is None or own.input is None:
        raise UserError(
            "judge predict needs a judge and answers.",
            do="crosstune judge predict RUN --input FILE [--output FILE]",
        )
    from crosstune.files.outputs import check_output, write_output

    if own.output is not None:
        check_output(own.output, option="output", inputs=[own.input], overwrite=config.overwrite)
    if own.input.suffix and not own.input.exists():
        raise UserError(f"There is no file {own.input} (--input).", do="check the path")
    announce_command("judge predict", own.target, "importing the engine")
    from crosstune.cli.terminal.screen import Screen
    from crosstune.files.json_files import to_json
    from crosstune.recipes.judge.open_splits import read_split
    from crosstune.recipes.judge.predictions import prediction_row
    from crosstune.results.judge import ask, make_journal, reader_for
    from crosstune.runs.judges import open_judge

    request = _make_request(own, config, target=own.target, backend=config.backend)
    items = read_split(reader_for(request, config, labeled=False), str(own.input), "test")
    with Screen(live=True) as screen:
        judge = open_judge(request, items=items, config=config, observer=screen)
        journal = make_journal(own.output, judge, items, request, screen)
        found = ask(judge, items, request, screen, journal=journal)
    rows = [
        {name: value for name, value in prediction_row(item, one).items() if name != "expected"}
        for item, one in zip(items, found, strict=True)
    ]
    if own.output is not None:
        write_output(own.output, "".join(f"{to_json(row)}\n" for row in rows).encode())
        journal.remove()
        print_written(own.output, f"{len(rows)} verdicts")
        return EXIT_DONE
    lines = [
        f"{row['id']}  {verdict_text(row['predicted'], digits=2)}"
        + (f" ({row['confidence']:.0%} sure)" if row["confidence"] is not None else "")
        for row in rows
    ]
    return print_result(rows, lines, as_json=own.json)


def _data(own: argparse.Namespace, config: Config) -> int:
    """Show the splits and examples of a dataset, or split it by group."""
    announce_command("judge data", config.dataset or None, "reading")
    from crosstune.recipes.judge.examples import as_preference
    from crosstune.recipes.judge.items import WINNERS
    from crosstune.recipes.judge.open_splits import open_judge_data
    from crosstune.recipes.judge.verdicts import choose_format, training_messages

    if "dataset" not in config.sources:
        raise UserError(
            "judge data needs a dataset.", do="crosstune judge data FILE|FOLDER|judge_translations"
        )
    if own.split_to is not None:
        return _split(own, config)
    data = open_judge_data(replace(config, skip_bad_rows=True))
    splits = {"train": data.train, "val": data.val, "test": data.test}
    verdict = choose_format(config.verdict, scale=data.scale, items=list(data.train))
    rewards = config.head == "scalar" and verdict.name == "winner"
    examples = [
        as_preference(item).conversations()[WINNERS.index(item.winner)]["messages"]
        if rewards and item.winner
        else training_messages(item, verdict)
        for item in data.train[: own.show]
    ]
    found: dict[str, Any] = {
        "verdict": "reward" if rewards else verdict.name,
        "scale": str(verdict.scale),
        "splits": {
            name: {
                "items": len(items),
                "groups": len({item.group for item in items}),
                "with_reference": sum(bool(item.reference) for item in items),
                "labels": _labels(items, verdict),
            }
            for name, items in splits.items()
        },
        "shown": examples,
        "leaking_rows": data.num_leaking,
        "unreadable_rows": len(data.skipped),
        "notes": list(data.notes),
    }
    print_result(found, data_lines(config.dataset, found), as_json=own.json)
    if data.skipped and not config.skip_bad_rows:
        open_judge_data(config)  # raises as training does
    return EXIT_DONE


def _labels(items: Sequence[Item], verdict: VerdictFormat) -> dict[str, int]:
    counts = Counter(verdict.label_of(item) for item in items)
    return {text: counts[place] for place, text in enumerate(verdict.labels.texts)}


def _split(own: argparse.Namespace, config: Config) -> int:
    """Write judge_train.json, judge_val.json and judge_test.json without splitting a group."""
    from crosstune.cli.terminal.output import print_line
    from crosstune.data.read.dataset_list import unweighted
    from crosstune.files.json_files import write_json
    from crosstune.files.outputs import check_output_folder
    from crosstune.recipes.judge.items import common_scale
    from crosstune.recipes.judge.open_splits import HELD_OUT_SHARE, by_split, item_reader, split_groups
    from crosstune.recipes.judge.read_items import split_row

    reader, folder = item_reader(config), Path(own.split_to)
    check_output_folder(folder, option="split_to")
    paths = {name: folder / f"judge_{name}.json" for name in ("train", "val", "test")}
    if there := [path for path in paths.values() if path.exists()]:
        raise UserError(f"{there[0]} already exists.", do="choose a different folder for --split_to")
    entries = unweighted(config.dataset, option="dataset")
    found: list[Item] = [
        item for entry in entries for source in by_split(entry.name).values() for item in reader.read(source)
    ]
    scale = common_scale(found, default=reader.scale)
    splits = split_groups(found, shares=dict.fromkeys(("val", "test"), HELD_OUT_SHARE), seed=config.seed)
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    for name, items in splits.items():
        rows = [split_row(item, f"{name}-{n}", scale=scale) for n, item in enumerate(items)]
        try:
            write_json(paths[name], rows)
        except OSError:
            for path in paths.values():
                path.unlink(missing_ok=True)
            if is_new:
                folder.rmdir()
            raise
        groups = len({item.group for item in items})
        print_line(f"written  {paths[name]} ({len(items)} items in {groups} groups)")
    print_line(f"train    crosstune judge train --dataset {shlex.quote(str(folder))}")
    return EXIT_DONE
