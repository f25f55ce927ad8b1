"""Judge the same items by label probabilities and by generation, with and without a shared prefix: seconds and agreement.

    python benchmarks/judge_speed.py --backend cuda --method lora --steps 150 --items 128 --out judge-speed.json

A judge is trained on the bundled translations first, with verdicts `Score: N/10` and their issues, so that it generates a
verdict. For the shared prefix, all items then have the same rubric.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
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

from crosstune.recipes.judge.examples import common_length
from crosstune.recipes.judge.items import Item
from crosstune.recipes.judge.judge import Judge
from crosstune.recipes.judge.metrics import are_within, pearson
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
    parser.add_argument("--test_only", action="store_true", help="do not train: the run is there")
    own = parser.parse_args()
    options = training_options(own) | {"dataset": "judge_translations", "verdict": "score", "name": "speed"}
    run = own.runs / "speed"
    if not own.test_only:
        run, _ = train_judge(options | {"max_steps": own.steps, "num_epochs": 0, "skip_eval": True})
    items = list(judge_data(run).test)[: own.items]
    sharing = open_trained(run, own, items=items)
    alone = dataclasses.replace(sharing, share_prefixes=False)
    results = _compare_generation(alone, sharing, items, own.max_new_tokens)
    write_results(own.out, results)
    results |= _compare_prefixes(sharing, alone, [dataclasses.replace(item, rubric=RUBRIC) for item in items])
    write_results(own.out, results)


def _compare_generation(
    judge: Judge, sharing: Judge, items: Sequence[Item], max_new_tokens: int
) -> dict[str, Any]:
    """Judge by probabilities and by generation, both without a shared prefix, and by probabilities with it, as is usual:
    prompts begin with the same instructions."""
    for one in (judge, sharing):
        one.judge(items[: judge.batch_size])  # the first call of each shape is slower
    probabilities, probabilities_s = timed(judge, items, what="by probabilities")
    _, usual_s = timed(sharing, items, what="by probabilities, instructions once")
    generated, generation_s = timed(
        judge, items, what="by generation", by="generation", max_new_tokens=max_new_tokens
    )
    readable = [place for place, one in enumerate(generated) if one.is_parsed]
    first = np.array([probabilities[place].score for place in readable], dtype=np.float64)
    second = np.array([generated[place].score for place in readable], dtype=np.float64)
    # The text is generated token by token, so its score is the most probable label, or a label with as likely a beginning.
    labels = judge.verdict.labels.values
    likeliest = np.array([labels[int(np.argmax(probabilities[place].probabilities))] for place in readable])
    lengths = [len(judge.tokenizer.encode(one.text).ids) for one in generated]
    return _shown(
        {
            "items": len(items),
            "prompt_tokens": float(np.mean([len(prompt) for prompt in judge.prompts(items)])),
            "generated_tokens": float(np.mean(lengths)),
            "generation_s_per_item": generation_s,
            "probabilities_s_per_item": probabilities_s,
            "probabilities_over_generation": generation_s / probabilities_s,
            "common_tokens": float(common_length(judge.prompts(items))),
            "usual_probabilities_s_per_item": usual_s,
            "usual_probabilities_over_generation": generation_s / usual_s,
            "unreadable": len(items) - len(readable),
            "most_probable_is_generated": float((likeliest == second).mean()),
            "agreement_within_1": float(are_within(first, second, distance=1.0).mean()),
            "agreement_pearson": pearson(first, second),
        }
    ) | {"example": prediction_row(items[0], generated[0])}


def _compare_prefixes(sharing: Judge, alone: Judge, items: Sequence[Item]) -> dict[str, Any]:
    """Judge items with a common rubric, computed once or for each item."""
    for judge in (sharing, alone):
        judge.judge(items[: judge.batch_size])
    once, once_s = timed(sharing, items, what="rubric once")
    each, each_s = timed(alone, items, what="rubric for each")
    prompts = alone.prompts(items)
    return _shown(
        {
            "rubric_prompt_tokens": float(np.mean([len(prompt) for prompt in prompts])),
            "shared_tokens": float(common_length(prompts)),
            "shared_prefix_s_per_item": once_s,
            "whole_prompts_s_per_item": each_s,
            "shared_prefix_over_whole_prompts": each_s / once_s,
            "largest_score_difference_by_prefix": max(
                abs((one.score or 0) - (other.score or 0)) for one, other in zip(once, each, strict=True)
            ),
        }
    )


def _shown(results: dict[str, Any]) -> dict[str, Any]:
    for name, value in results.items():
        print(f"{name:<36} {value:.6g}", flush=True)
    return results


if __name__ == "__main__":
    main()
