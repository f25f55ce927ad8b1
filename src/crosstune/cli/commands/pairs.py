"""`crosstune pairs`: make preference pairs from a model's answers, and check pairs with a second judge."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from crosstune.cli.arguments import (
    ActionParser,
    Line,
    announce_command,
    at_least,
    print_result,
    read_path,
    read_run,
)
from crosstune.cli.commands.generate import MODEL, add_model_arguments, read_sampling
from crosstune.cli.terminal.output import WARNING, Column, table_lines

ACTIONS = {
    "make": "sample answers to prompts, score them, and write the best and the worst answer of each prompt",
    "check": "measure how often a second judge prefers the chosen answers",
}
EXAMPLES = """examples:
  crosstune pairs make runs/demo --prompts prompts.txt --judge runs/judge --out pairs.jsonl
  crosstune pairs make smollm2-135m --prompts chats.jsonl --judge score.py:short --num 8 --out pairs.jsonl
  crosstune pairs check pairs.jsonl --judge runs/other-judge

A judge is a run of `crosstune judge train`, or a Python function that this command imports and runs, such as
`def short(prompt, answer): return -len(answer)`; it may also have the arguments messages and reference. Higher is better.
A pairwise judge compares all answers with each other; the score of an answer is its mean probability of winning, from 0 to 1."""


def make_parser() -> ActionParser:
    parser = ActionParser("pairs", ACTIONS, description="Preference pairs:", epilog=EXAMPLES)
    given = f"for make: {MODEL}; for check: a JSON lines file with prompt, chosen and rejected"
    add_model_arguments(parser, metavar="MODEL|PAIRS", temperature=1.0, model=given)
    sampling = {action.dest for action in parser._actions} - {"help", "json", "action", "model", "backend"}
    parser.actions_of |= dict.fromkeys(sampling, ("make",))
    judge = "a judge run (folder or name), or FILE.py:FUNCTION or MODULE:FUNCTION, imported and run"
    parser.add_argument("--judge", required=True, type=read_run, help=judge)
    out = "write the pairs to this file as JSON lines; for check, with the preference of the judge"
    parser.add_argument("--out", type=read_path, metavar="FILE", help=out)
    parser.add_argument("--overwrite", action="store_true", help="replace an existing --out file")
    prompts = "one prompt per line, or JSON lines with prompt or messages, as for `crosstune generate`"
    parser.add_for("make", "--prompts", type=read_path, metavar="FILE", help=prompts)
    parser.add_for("make", "--num", type=at_least(2, high=1000), default=4, help="answers per prompt")
    parser.add_for(
        "make", "--margin", type=at_least(0.0), default=0.0, help="minimum difference between the two scores"
    )
    return parser


def run(words: Sequence[str]) -> int:
    parser = make_parser()
    own = parser.parse_args(list(words))
    parser.refuse_others(own)
    if own.action == "make" and (own.prompts is None or own.out is None):
        parser.error("make needs --prompts and --out")
    if own.temperature == 0:
        parser.error("make needs a --temperature above 0: all answers to a prompt would be the same")
    from crosstune.files.outputs import check_output

    if own.out is not None:
        inputs = [own.prompts, read_path(own.model)]
        check_output(own.out, option="out", inputs=inputs, overwrite=own.overwrite, streams=False)
    sampling = read_sampling(own)
    announce_command(f"pairs {own.action}", own.model, f"judged by {own.judge}", "importing the engine")
    from crosstune.cli.terminal.screen import Screen
    from crosstune.results.pairs import MakeRequest, check_pairs, find_scorer, make_pairs
    from crosstune.results.prompt_file import read_prompts

    with Screen(live=True) as screen:

        def show(what: str, done: int, total: int) -> None:
            screen.show_stage(what, done, total, [f"{done:,} of {total:,}"], unit="{:.3g}".format)

        if own.action == "check":
            scorer = find_scorer(own.judge, backend=own.backend)
            found = check_pairs(read_path(own.model), scorer, out=own.out, observer=screen, progress=show)
            return print_result(found, _checked_lines(found), as_json=own.json)
        names = ("model", "out", "num", "margin", "max_new_tokens", "backend", "precision")
        options = {name: getattr(own, name) for name in names} | {"sampling": sampling}
        request = MakeRequest(
            prompts=read_prompts(own.prompts, system=own.system, say=screen.output.line), **options
        )
        scorer = find_scorer(own.judge, backend=own.backend)
        found = make_pairs(request, scorer, observer=screen, progress=show)
    return print_result(found, _made_lines(found), as_json=own.json)


def _made_lines(found: Mapping[str, Any]) -> Iterator[Line]:
    yield f"written  {found['output']} ({found['num_pairs']:,} pairs from {found['num_prompts']:,} prompts)"
    yield from (f"no pair  {number:,} prompts: {why}" for why, number in found["without_pair"].items())
    yield f"scores   on average {found['mean_chosen']:.4g} chosen, {found['mean_rejected']:.4g} rejected"
    if number := found["num_cut"]:
        yield f"cut      {number:,} of {found['num_answers']:,} answers end at --max_new_tokens", WARNING
    out, model = shlex.quote(found["output"]), shlex.quote(found["model"])
    is_adapter = Path(found["model"], "adapter").is_dir()
    start = f"--base_adapter {model}/adapter" if is_adapter else f"--model_name {model}"
    yield f"check    crosstune pairs check {out} --judge ANOTHER_JUDGE"
    yield f"train    crosstune train --recipe preference {start} --dataset {out}"


def _checked_lines(found: Mapping[str, Any]) -> Iterator[Line]:
    groups = [*found["buckets"], found]
    titles = [f"margin {each['from']:.3g} to {each['to']:.3g}" for each in groups[:-1]]
    columns = {"": [*titles, "all pairs"], "agreement": [_agreement(each) for each in groups]}
    for name in ("chosen", "rejected", "tie", "unscored"):
        columns[name] = [f"{each[f'num_{name}']:,}" for each in groups]
    yield from table_lines([Column(title=title, cells=columns[title]) for title in columns], width=None)
    yield "agreement: the chosen answer is preferred, as a fraction of chosen and rejected, with a 95 % interval"
    if number := found["num_same_judge"]:
        yield f"note     {number:,} pairs were made with this judge: check them with another", WARNING
    yield f"verdict  {_verdict(found)}"


def _agreement(found: Mapping[str, Any]) -> str:
    low, high = found["interval"]
    return "-" if found["agreement"] is None else f"{found['agreement']:.1%} [{low:.1%}, {high:.1%}]"


def _verdict(found: Mapping[str, Any]) -> str:
    """Compare the interval with chance."""
    low, high = found["interval"]
    if low > 0.5:
        return f"the judge {'mostly ' * (found['agreement'] < 0.8)}agrees with the pairs"
    if high < 0.5:
        return "the judge prefers the rejected answers: find out why before you train on these pairs"
    return "no evidence that the judge agrees with the pairs: it may prefer either answer by chance"
