"""`crosstune judge`: train, test and use a model that scores or compares answers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from crosstune.cli.arguments import Parser, at_least, parse_config, read_path
from crosstune.core.errors import UserError
from crosstune.core.names import unknown_name

ACTIONS = {
    "train": "train a judge, then test it on the test split",
    "eval": "test a judge (a run, an adapter or a model) on labelled data, beside baselines",
    "predict": "judge answers that have no label",
    "data": "check a data set: splits, scores, groups, leaks; or split it",
}
"""Action -> its one-line help. The code is in crosstune.cli.judge_<action>, imported on use."""

EXAMPLES = """examples:
  crosstune judge train --model smollm2-135m --dataset judge_translations --max_samples 1000
  crosstune judge train --dataset ratings.csv --columns original=task,mean=score --score_scale 0-100
  crosstune judge eval runs/NAME
  crosstune judge eval runs/NAME --dataset test.jsonl --judge_by generation
  crosstune judge eval --predictions runs/NAME/test_predictions.json
  crosstune judge predict runs/NAME --input answers.jsonl --output verdicts.jsonl
  crosstune judge data ratings.csv --split_to splits

A row has a task, an answer and a score; or a task, answer_a, answer_b and a winner; or messages that end with the verdict."""


def make_parser() -> Parser:
    summary = "\n".join(f"  {name:<8} {text}" for name, text in ACTIONS.items())
    parser = Parser(
        "judge",
        description="Train and use a model that grades.\n\nusage: crosstune judge ACTION [TARGET] [options]\n\n"
        f"{summary}\n\nThe options are those of train besides these; each backend has a preset.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--input", type=read_path, metavar="FILE", help="for predict: the answers to judge")
    parser.add_argument(
        "--output", type=read_path, metavar="FILE", help="for predict: where to write verdicts (JSON Lines)"
    )
    parser.add_argument(
        "--out", type=read_path, metavar="DIR", help="for eval: folder for the predictions and metrics"
    )
    parser.add_argument(
        "--predictions",
        type=read_path,
        metavar="FILE",
        help="for eval: compute the metrics of a file of predictions",
    )
    parser.add_argument("--base", metavar="MODEL", help="for eval and predict: the base model of an adapter")
    parser.add_argument(
        "--skip_untrained", action="store_true", help="do not test the untrained model beside the judge"
    )
    parser.add_argument(
        "--no_shared_prefix",
        action="store_true",
        help="compute the beginning of every prompt again, even if it is the same",
    )
    parser.add_argument(
        "--split_to", type=read_path, metavar="DIR", help="for data: write splits by group into a folder"
    )
    parser.add_argument(
        "--show",
        type=at_least(0),
        default=2,
        metavar="N",
        help="for data: print the first N examples (default 2)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON on standard output")
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
        raise UserError(f"judge train takes no {target!r}.", do="give the data with --dataset")
    if target is not None and action == "data":
        rest = ["--dataset", target, *rest]
    own, config = parse_config(parser, [*rest, "--recipe", "judge"])
    own.target, own.words = target, ["crosstune", "judge", *words]
    return int(importlib.import_module(f"crosstune.cli.judge_{action}").run_action(own, config))
