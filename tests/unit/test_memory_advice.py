"""Advice for a run that does not fit into memory: only changes that are new and help on its backend."""

from __future__ import annotations

from typing import Any

import planned
import pytest

from crosstune.config.resolve.memory_advice import advise, with_advice
from crosstune.config.resolve.plan import Plan
from crosstune.core.backend import backend_specs
from crosstune.core.out_of_memory import EVALUATING, LOADING, OutOfMemory
from crosstune.estimate.model_shape import shape_for_size


def plan_on(machine: str, **asked: Any) -> Plan:
    return planned.plan_on(machine, shape=shape_for_size(0.135), **asked)


def said(plan: Plan, *, doing: str = "a step", longest_row: int | None = None) -> str:
    return with_advice(OutOfMemory("no room", doing=doing), plan, longest_row=longest_row).do


RELAXED = {"batch_size": 4, "gradient_accumulation_steps": 2}
TIGHT = {"batch_size": 1, "use_gradient_checkpointing": True, "low_memory": True, "context_length": 128}
BATCH = "--batch_size 2 --gradient_accumulation_steps 4 (the same rows per step)"


@pytest.mark.parametrize(
    ("machine", "asked", "advised"),
    [
        (
            "h200",
            RELAXED,
            f"continue with {BATCH}, --use_gradient_checkpointing or --low_memory; or start a new run with --train_type qlora, a --context_length below 2048 or a smaller model",
        ),
        ("h200", {**TIGHT, "train_type": "qlora"}, "start a new run with a smaller model"),
        (
            "h200",
            {**TIGHT, "batch_size": 3},
            "continue with --batch_size 1 --gradient_accumulation_steps 6 (the same rows per step); or start a new run with --train_type qlora or a smaller model",
        ),
    ],
)
def test_a_step_that_failed(machine: str, asked: dict[str, Any], advised: str) -> None:
    asked = {"gradient_accumulation_steps": 2, **asked}
    assert said(plan_on(machine, **asked)) == advised


def test_the_watermark_is_advised_on_mps_until_it_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_on("apple-m2-max-64gb", backend="mps", train_type="qlora", **TIGHT)
    monkeypatch.delenv("PYTORCH_MPS_HIGH_WATERMARK_RATIO", raising=False)
    assert "PYTORCH_MPS_HIGH_WATERMARK_RATIO above 0.7" in said(plan)
    monkeypatch.setenv("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "0")
    assert "PYTORCH_MPS" not in said(plan)
    assert "PYTORCH_MPS" not in said(plan_on("h200", **TIGHT))


def test_advice_is_for_what_did_not_fit() -> None:
    plan = plan_on("h200", **RELAXED)
    loading, evaluating = said(plan, doing=LOADING), said(plan, doing=EVALUATING)
    assert loading == "start a new run with --train_type qlora or a smaller model"
    assert BATCH in evaluating and "checkpointing" not in evaluating and "--low_memory" not in evaluating


def test_short_rows_are_not_to_be_shortened() -> None:
    plan = plan_on("h200", **RELAXED)
    assert "--context_length below 300" in said(plan, longest_row=300)
    assert "--context_length" not in said(plan, longest_row=100)


def test_every_train_type_that_is_advised_exists() -> None:
    for method in ("lora", "dora", "llama_pro"):
        plan = plan_on("h200", train_type=method)
        advice = advise(
            plan.config.options(),
            report=plan.backend,
            spec=backend_specs()["cuda"],
            method=plan.method,
            quantizer="none",
            environment={},
        )
        [advised] = [text.removeprefix("--train_type ") for text in advice.new_run if "--train_type" in text]
        assert plan_on("h200", train_type=advised).quantizer != "none"
