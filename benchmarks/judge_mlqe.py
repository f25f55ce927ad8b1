"""Train a judge on human scores of translations, and correlate its scores with human scores on the test split.

    python benchmarks/judge_mlqe.py --data FOLDER --method full --rows 500,1000,2000,4000,7000 --out mlqe-full.json

FOLDER has train.tsv, dev.tsv and test.tsv with the columns original, translation, mean (0-100) and z_mean, as in MLQE-PE. The
last number of --rows is the main result, the others are its learning curve. Pearson's correlation is with z_mean, the mean of
scores normalized by annotator; 95 % bootstrap intervals.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from judge_runs import (
    judge_data,
    make_parser,
    open_trained,
    timed,
    train_judge,
    training_options,
    write_results,
)

from crosstune.recipes.judge.items import Item
from crosstune.recipes.judge.judge import Judgement
from crosstune.recipes.judge.metrics import bootstrap_draws, intervals, pearson, spearman


def main() -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rows", default="7000", help="numbers of training rows, with commas between them")
    parser.add_argument("--test_items", type=int, default=-1, help="test items; -1 for all")
    own = parser.parse_args()
    results: list[dict[str, Any]] = []
    counts = [int(text) for text in own.rows.split(",")]
    for number, count in enumerate(counts, start=1):
        print(f"point {number} of {len(counts)}: {count} rows", flush=True)
        options = training_options(own) | {
            "dataset": str(own.data),
            "score_scale": "0-100",
            "dataset_samples": count,
            "name": f"mlqe-{own.method}-{count}",
            "skip_eval": True,
        }
        run, seconds = train_judge(options)
        items = list(judge_data(run).test)[: own.test_items if own.test_items > 0 else None]
        if not results:
            base = open_trained(run, own, items=items, untrained=True)
            results.append(_row("untrained", items, timed(base, items, what="untrained")[0]))
            del base
        found, per_item = timed(open_trained(run, own, items=items), items)
        facts = {"rows": count, "seconds": seconds, "seconds_per_item": per_item}
        results.append(_row(f"{own.method}, {count} rows", items, found) | facts)
        asked = {name: str(value) for name, value in vars(own).items()}
        write_results(own.out, {"command": asked, "results": results})


def _row(name: str, items: list[Item], found: list[Judgement]) -> dict[str, Any]:
    expected = np.array([float(item.extra["z_mean"]) for item in items])
    scores = np.array([one.score for one in found], dtype=np.float64)
    measures = {"pearson": lambda at: pearson(expected[at], scores[at])}
    bounds = intervals(measures, bootstrap_draws(len(items))).get("pearson")
    row = {
        "name": name,
        "pearson": pearson(expected, scores),
        "interval": bounds,
        "spearman": spearman(expected, scores),
        "num_items": len(items),
    }
    shown = f"[{bounds[0]:.3f}, {bounds[1]:.3f}]" if bounds else ""
    print(f"{name:<20} Pearson {row['pearson']:.3f} {shown}  Spearman {row['spearman']:.3f}", flush=True)
    return row


if __name__ == "__main__":
    main()
