"""Judge the same items by label probabilities and by generation, with and without a shared prefix: seconds and agreement.

    python benchmarks/judge_speed.py --backend cuda --method lora --steps 150 --items 128 --out judge-speed.json

A judge is trained on the bundled translations first, with verdicts `Score: N/10` and their issues, so that what it generates
is a verdict. All items carry the same rubric, which a shared prefix computes once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from judge_runs import (
    held_out_items,
    make_parser,
    open_trained,
    timed,
    train_judge,
    training_options,
    write_results,
)

from crosstune.recipes.judge.judge import Judge
from crosstune.recipes.judge.metrics.correlation import pearson
from crosstune.recipes.judge.predictions import prediction_row

RUBRIC = " ".join(
    [
        "A wrong word costs three points, for the reader is told something else than what was written.",
        "A wrong number, a missing part and a part that was not translated cost two points each.",
        "A repeated part, a wrong order and a misspelling cost one point each, for the meaning is still there.",
        "Ten points are for a translation without errors; no translation has less than zero points.",
    ]
    * 3
)


def main() -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--items", type=int, default=128)
    parser.add_argument("--max_new_tokens", type=int, default=96)
    own = parser.parse_args()
    options = training_options(own) | {"dataset": "judge_translations", "verdict": "score", "name": "speed"}
    run, _ = train_judge(options | {"max_steps": own.steps, "num_epochs": 0})
    items = [replace(item, rubric=RUBRIC) for item in held_out_items(run)[0][: own.items]]
    sharing = open_trained(str(run), backend=own.backend, items=items, like=run)
    alone = Judge(
        session=sharing.session,
        tokenizer=sharing.tokenizer,
        settings=sharing.settings,
        batch_size=sharing.batch_size,
        share_prefixes=False,
    )
    for judge in (sharing, alone):  # the first call of each shape is slower
        judge.judge(items[: sharing.batch_size])
    by_prefix, prefix_s = timed(sharing, items)
    by_probabilities, probabilities_s = timed(alone, items)
    by_generation, generation_s = timed(alone, items, by="generation", max_new_tokens=own.max_new_tokens)
    readable = [place for place, one in enumerate(by_generation) if one.is_parsed]
    first = np.array([by_probabilities[place].score for place in readable], dtype=np.float64)
    second = np.array([by_generation[place].score for place in readable], dtype=np.float64)
    results: dict[str, Any] = {
        "items": len(items),
        "generation_s_per_item": generation_s,
        "probabilities_s_per_item": probabilities_s,
        "shared_prefix_s_per_item": prefix_s,
        "probabilities_over_generation": generation_s / probabilities_s,
        "shared_prefix_over_whole_prompts": probabilities_s / prefix_s,
        "largest_score_difference_by_prefix": max(
            abs((one.score or 0) - (other.score or 0))
            for one, other in zip(by_prefix, by_probabilities, strict=True)
        ),
        "unreadable": len(items) - len(readable),
        "within_1": float((np.abs(first - second) <= 1).mean()) if readable else None,
        "pearson": pearson(first, second),
        "example": prediction_row(items[0], by_generation[0]),
    }
    for name, value in results.items():
        if isinstance(value, (int, float)):
            print(f"{name:<36} {value:.6g}")
    write_results(own.out, results)


if __name__ == "__main__":
    main()
