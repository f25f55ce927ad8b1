"""Train a judge on the bundled translations, and print its test results next to the baselines.

    python benchmarks/judge_bundled.py --out bundled.json
    python benchmarks/judge_bundled.py --test_only --out bundled.json      (test the trained run again)

The defaults are for five minutes of two quiet cores (the CPU time is printed too, since a shared machine takes longer): LoRA
on few rows with short prompts. The temperature of the confidence is fitted on validation items; with --validate, the table is
for the validation items, to choose settings.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence

from judge_runs import (
    judge_data,
    make_parser,
    open_trained,
    timed,
    train_judge,
    training_options,
    write_results,
)

from crosstune.cli.commands.judge import metric_lines as table_lines
from crosstune.recipes.judge.evaluation import UNTRAINED, baseline_verdicts, evaluate_items
from crosstune.recipes.judge.items import Item
from crosstune.recipes.judge.judge import Judge


def main() -> None:
    parser = make_parser(__doc__ or "")
    parser.set_defaults(backend="cpu", method="lora", batch_size=4, lr=1e-3, epochs=1)
    parser.add_argument(
        "--dataset", default="judge_translations", choices=("judge_translations", "judge_pairs")
    )
    parser.add_argument("--rows", type=int, default=280, help="training rows; -1 for all")
    parser.add_argument("--verdict", default="auto")
    parser.add_argument("--head", default="scalar", choices=("tokens", "scalar"))
    parser.add_argument(
        "--chat_template", default="chatml", help="chatml has no system message, which saves tokens"
    )
    parser.add_argument("--temperature_items", type=int, default=48, help="validation items for calibration")
    parser.add_argument("--test_items", type=int, default=300)
    parser.add_argument(
        "--validate", action="store_true", help="judge the validation items in place of the test"
    )
    parser.add_argument("--test_only", action="store_true", help="do not train: the run is there")
    own = parser.parse_args()
    options = training_options(own) | {
        "dataset": own.dataset,
        "dataset_samples": own.rows,
        "verdict": own.verdict,
        "head": own.head,
        "chat_template": own.chat_template,
        "skip_eval": True,
        "name": f"bundled-{own.method}-{own.head}",
    }
    run = own.runs / str(options["name"])
    times = run / "times.json"
    if not own.test_only:
        started = os.times()
        run, seconds = train_judge(options)
        spent = os.times()
        cpu = spent.user + spent.system - started.user - started.system
        times.write_text(json.dumps({"seconds": seconds, "cpu_seconds": cpu}))
        print(f"trained in {seconds:.0f} s, {cpu:.0f} s of CPU time", flush=True)
    data = judge_data(run, skip_eval=False, eval_samples=own.test_items)
    items = list(data.val if own.validate else data.test)[: own.test_items]
    judge = open_trained(run, own, items=items)
    if own.temperature_items and not own.validate:
        judge = _calibrated(judge, list(data.val)[: own.temperature_items])
    found = timed(judge, items, what="the judge")[0]
    scale, settings = judge.verdict.scale, judge.settings
    del judge
    others = baseline_verdicts(items, scale=scale, train=data.train)
    base = open_trained(run, own, items=items, untrained=True)
    others[UNTRAINED] = timed(base, items, what="the untrained model")[0]
    report = evaluate_items(items, found, scale=scale, others=others)
    print("\n".join(table_lines(report)))
    facts = json.loads(times.read_text()) | {"settings": dataclasses.asdict(settings), "rows": own.rows}
    write_results(own.out, report | facts)


def _calibrated(judge: Judge, items: Sequence[Item]) -> Judge:
    temperature = judge.fit_temperature(items, timed(judge, items, what="validation items")[0])
    return dataclasses.replace(judge, settings=dataclasses.replace(judge.settings, temperature=temperature))


if __name__ == "__main__":
    main()
