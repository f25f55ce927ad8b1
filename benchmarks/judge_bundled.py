"""Train a judge on the bundled translations and print the table of its test beside the baselines.

    python benchmarks/judge_bundled.py --backend cpu --method lora --batch_size 8 --rows 900 --epochs 1 --lr 1e-3

About five minutes on two quiet cores of a laptop.
"""

from __future__ import annotations

import dataclasses

from judge_runs import (
    held_out_items,
    make_parser,
    open_trained,
    timed,
    train_judge,
    training_options,
    write_results,
)

from crosstune.cli.judge_table import table_lines
from crosstune.recipes.judge.evaluation import baselines, evaluate_items


def main() -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument(
        "--dataset", default="judge_translations", choices=("judge_translations", "judge_pairs")
    )
    parser.add_argument("--rows", type=int, default=-1, help="training rows; -1 for all")
    parser.add_argument("--verdict", default="auto")
    own = parser.parse_args()
    options = training_options(own) | {
        "dataset": own.dataset,
        "dataset_samples": own.rows,
        "verdict": own.verdict,
    }
    run, seconds = train_judge(options | {"name": f"bundled-{own.method}"})
    items, train = held_out_items(run)
    judge = open_trained(str(run), backend=own.backend, items=items, like=run)
    scale, settings = judge.verdict.scale, judge.settings
    report = evaluate_items(items, timed(judge, items)[0], scale=scale)
    report["baselines"] = baselines(items, scale=scale, train=train)
    base = open_trained(str(run), backend=own.backend, items=items, like=run, untrained=True)
    report["baselines"]["untrained model"] = evaluate_items(items, timed(base, items)[0], scale=scale)
    print("\n".join(table_lines(report)))
    print(f"trained in {seconds:.0f} s")
    write_results(own.out, report | {"seconds": seconds, "settings": dataclasses.asdict(settings)})


if __name__ == "__main__":
    main()
