"""Train a judge on pairs of answers with human labels, in folds by instruction, and report its accuracy next to baselines.

    python benchmarks/judge_pandalm.py --data testset-v1.json --method full --epochs 3 --out pandalm.json

The file has instruction, input, response1, response2 and three annotators' labels (0 tie, 1, 2), as PandaLM's test set. Every
pair is judged once, by a judge that was not trained on its instruction; --rows limits the training pairs for a learning
curve.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import dataclass, field
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

from crosstune.recipes.judge.evaluation import baseline_verdicts, evaluate_items
from crosstune.recipes.judge.items import Item, Scale
from crosstune.recipes.judge.judge import Judgement

SCALE = Scale(low=0, high=1)  # winners have no scale


def main() -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=-1, help="use the first pairs of the file; -1 for all")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument(
        "--rows", default="-1", help="numbers of training pairs per fold, with commas; -1 for all"
    )
    own = parser.parse_args()
    rows = _rows(own.data)[: own.pairs if own.pairs > 0 else None]
    results: list[dict[str, Any]] = []
    counts = [int(text) for text in own.rows.split(",")]
    for number, count in enumerate(counts, start=1):
        print(f"point {number} of {len(counts)}: {'all' if count == -1 else count} pairs a fold", flush=True)
        point = _judge_folds(rows, own, count, with_untrained=not results)
        if not results:
            for name, verdicts in baseline_verdicts(point.items, scale=SCALE).items():
                results.append(_row(name, evaluate_items(point.items, verdicts, scale=SCALE)))
            results.append(_row("untrained", evaluate_items(point.items, point.untrained, scale=SCALE)))
        report = evaluate_items(point.items, point.found, scale=SCALE)
        name = f"{own.method}, {'all' if count == -1 else count} pairs a fold"
        results.append(_row(name, report) | {"seconds": point.seconds})
        write_results(own.out, {"folds": own.folds, "results": results})


@dataclass(kw_only=True)
class Point:
    """Every pair, judged by the judge of its fold."""

    items: list[Item] = field(default_factory=list)
    found: list[Judgement] = field(default_factory=list)
    untrained: list[Judgement] = field(default_factory=list)
    seconds: float = 0.0


def _judge_folds(
    rows: list[dict[str, Any]], own: argparse.Namespace, count: int, *, with_untrained: bool
) -> Point:
    point = Point()
    for fold in range(own.folds):
        folder = _write_fold(rows, fold, own.folds, own.runs / f"pandalm-data-{fold}")
        options = training_options(own) | {
            "dataset": str(folder),
            "dataset_samples": count,
            "name": f"pandalm-{own.method}-{count}-{fold}",
            "skip_eval": True,
        }
        run, took = train_judge(options)
        point.seconds += took
        items = list(judge_data(run).test)
        point.items += items
        point.found += timed(open_trained(run, own, items=items), items, what=f"fold {fold}")[0]
        if with_untrained:
            base = open_trained(run, own, items=items, untrained=True)
            point.untrained += timed(base, items, what=f"fold {fold}, untrained")[0]
    return point


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    for row in json.loads(path.read_text(encoding="utf-8")):
        labels = Counter(row[f"annotator{number}"] for number in (1, 2, 3))
        winner = {0: "tie", 1: "A", 2: "B"}[labels.most_common(1)[0][0]]
        rows.append(
            {
                "id": f"pair-{row['idx']}",
                "group": row["instruction"] or row["input"],
                "task": f"{row['instruction']}\n\n{row['input']}".strip() or "(no instruction)",
                "answer_a": row["response1"] or "(no answer)",
                "answer_b": row["response2"] or "(no answer)",
                "winner": winner,
            }
        )
    return rows


def _write_fold(rows: list[dict[str, Any]], fold: int, num_folds: int, folder: Path) -> Path:
    """Write the instructions of one fold as test, some others as validation, and the rest as training."""
    groups = sorted({row["group"] for row in rows})
    order = np.random.default_rng(0).permutation(len(groups))
    place = {groups[group]: number for number, group in enumerate(order)}
    folder.mkdir(parents=True, exist_ok=True)
    named: dict[str, list[dict[str, Any]]] = {"train": [], "val": [], "test": []}
    for row in rows:
        number = place[row["group"]]
        split = (
            "test"
            if number % num_folds == fold
            else "val"
            if number % (num_folds * 4) == (fold + 1) % num_folds
            else "train"
        )
        named[split].append(row)
    for split, chosen in named.items():
        (folder / f"{split}.json").write_text(json.dumps(chosen), encoding="utf-8")
    return folder


def _row(name: str, report: dict[str, Any]) -> dict[str, Any]:
    metrics, bounds = report["metrics"], report.get("intervals", {}).get("accuracy")
    shown = f"[{bounds[0]:.3f}, {bounds[1]:.3f}]" if bounds else ""
    print(
        f"{name:<28} accuracy {metrics['accuracy']:.3f} {shown}  macro-F1 {metrics['macro_f1']:.3f}  kappa {metrics['kappa']:.3f}"
        f"  swap consistency {metrics['swap_consistency']:.3f}",
        flush=True,
    )
    return {
        "name": name,
        "metrics": metrics,
        "intervals": report.get("intervals"),
        "num_items": report["num_items"],
    }


if __name__ == "__main__":
    main()
