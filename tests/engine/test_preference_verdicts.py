"""Detect problems of preference training, with one run for each problem; a healthy run gets no verdict."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import crosstune
from crosstune.core.intervals import wilson

Row = dict[str, str]


def plain(number: int) -> Row:
    """A pair with the same difference in all rows."""
    return {"prompt": f"What is {number} plus one?", "chosen": "yes it is", "rejected": "no it is"}


def noise(number: int) -> Row:
    """A pair whose order is random: there is nothing to learn."""
    draw = random.Random(number)
    prompt = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=6))
    chosen, rejected = draw.sample(["red", "sky"], 2)
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def partial(number: int) -> Row:
    """The rejected answer repeats the chosen answer, so that both become less likely."""
    return {
        "prompt": f"Say {number}.",
        "chosen": "so it is",
        "rejected": "so it is, so it is, so it is, so it is",
    }


def longer(number: int) -> Row:
    return {"prompt": f"Say {number}.", "chosen": "ok ok ok ok ok ok ok ok ok ok", "rejected": "ok"}


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that trains on rows of a kind, and returns the run."""

    def run(make: Callable[[int], Row], *, count: int = 60, **options: Any) -> Path:
        home = tmp_path_factory.mktemp("verdict")
        (home / "pairs.jsonl").write_text("".join(json.dumps(make(n)) + "\n" for n in range(count)))
        asked = {
            "recipe": "preference", "model_name": "tiny-random", "dataset": str(home / "pairs.jsonl"), "batch_size": 8,
            "gradient_accumulation_steps": 1, "lora_rank": 4, "backend": "cpu", "precision": "fp32", "lr_scheduler": "constant",
            "eval_fraction": 0.25, "num_samples": 0, "max_steps": 12, "warmup_steps": 0, "output_dir": str(home), "name": "run",
            "save_steps": 0, "lr": 1e-3,
        }  # fmt: skip
        return crosstune.train(**{**asked, **options}).folder

    return run


def verdicts(run: Path) -> set[str]:
    """Return the names of the verdicts; each is a warning among the events, and on the page."""
    found = json.loads((run / "summary.json").read_text()).get("verdicts", {})
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    said = [event["message"] for event in events if event["kind"] == "warning"]
    assert len(said) >= len(found)
    page = (run / "report.html").read_text()
    assert ("may have gone wrong" in page) == bool(found)
    return set(found)


def test_both_rewards_fall_and_the_advice_helps(train: Callable[..., Path]) -> None:
    assert verdicts(train(partial)) == {"both rewards fall"}
    healthy = train(partial, sft_weight=1.0, eval_steps=4)
    assert verdicts(healthy) == set()
    summary = json.loads((healthy / "summary.json").read_text())
    low, high = summary["eval_intervals"]["rewards/accuracies"]
    assert low == pytest.approx(wilson(1.0, 15)[0]) and high == 1.0
    page = (healthy / "report.html").read_text()
    for shown in ("Rewards: chosen and rejected", "chosen, training", "chosen, held-out", "95 % interval"):
        assert shown in page


def test_memorized_noise_and_a_broken_model(train: Callable[..., Path]) -> None:
    options = {"train_type": "full", "max_steps": 40, "count": 40, "eval_fraction": 0.5, "batch_size": 10}
    run = train(noise, lr=1e-2, **options)
    assert verdicts(run) == {"accuracy does not grow", "broken"}
    said = json.loads((run / "summary.json").read_text())["verdicts"]
    assert "of the held-out pairs" in said["accuracy does not grow"] and "lower --lr" in said["broken"]


def test_pairs_that_are_told_apart_at_once(train: Callable[..., Path]) -> None:
    assert verdicts(train(plain, lr=1e-2, batch_size=16, max_steps=6)) == {"accuracy too high"}


def test_an_adapter_in_few_layers_of_a_resumed_run(train: Callable[..., Path]) -> None:
    run = train(plain, layers_to_transform="0", max_steps=2, skip_eval=True)
    assert verdicts(run) == {"few layers"}
    crosstune.train(recipe="preference", resume=str(run), max_steps=3)
    assert verdicts(run) == {"few layers"}


def test_answers_that_grow(train: Callable[..., Path]) -> None:
    answers = {"num_samples": 4, "max_new_tokens": 24, "lr": 1e-2}
    short = train(longer, recipe="sft", columns="rejected=completion", max_steps=25, **answers)
    run = train(longer, base_adapter=str(short / "adapter"), max_steps=15, **answers)
    assert "answers grow" in verdicts(run)
    lengths = [
        event["metrics"]["completions/mean_length"]
        for event in map(json.loads, (run / "events.jsonl").read_text().splitlines())
        if event["kind"] == "evaluation"
    ]
    assert lengths[0] < 8 < lengths[-1]
