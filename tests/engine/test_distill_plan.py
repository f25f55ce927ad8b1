"""Plans and options of distillation: the memory and the passes of a teacher, and what `plan` says about a teacher."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import chat

from crosstune.cli.main import main
from crosstune.config.load import make_config
from crosstune.estimate.memory import GIB
from crosstune.machines.probe import load_machine
from crosstune.models.tiny import tiny_model
from crosstune.planner.gather import make_plan
from crosstune.planner.predict import predict

SMALL, LARGE = "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B"


def plan(**options: Any) -> Any:
    asked = {
        "recipe": "distill",
        "model_name": SMALL,
        "teacher": LARGE,
        "backend": "cuda",
        "context_length": 512,
    }
    return make_plan(make_config(**asked | options), machine=load_machine("h200-x1"))


def test_a_plan_counts_the_teacher_and_its_passes() -> None:
    live, alone = plan(), plan(recipe="sft", teacher=None)
    teacher = live.fitted.parts.teacher / GIB
    assert 14.2 < teacher < 15 and alone.fitted.parts.teacher == 0  # 7.6 billion weights of 16 bits
    assert 8 < live.fitted.step.extra_passes < 20  # passes of the student
    assert predict(live).time.seconds > predict(alone).time.seconds  # type: ignore[union-attr]
    small = plan(teacher_quantization="4bit").fitted.parts.teacher
    assert 0.25 * teacher * GIB < small < 0.5 * teacher * GIB


def test_a_freed_teacher_needs_memory_only_before_the_first_step() -> None:
    live, stored = plan(batch_size=32), plan(batch_size=32, teacher_top_k=64)
    parts = stored.fitted.parts
    freed = parts.gradients + parts.optimizer + parts.activations + parts.logits + parts.buffers
    assert parts.teacher == max(0, live.fitted.parts.teacher - freed)
    assert stored.fitted.step.extra_passes == 0 and stored.fitted.step.first_passes > 8


def test_the_base_under_the_adapters_costs_a_pass_and_a_copy_of_the_adapters() -> None:
    own = plan(teacher=SMALL, ce_weight=1.0).fitted
    assert own.parts.teacher == 0 and own.step.extra_passes == 1 and own.step.copies_trained
    assert plan(teacher=SMALL, train_type="full").fitted.parts.teacher > 0


def test_a_teacher_that_does_not_fit_is_reported_with_a_smaller_one() -> None:
    sentences = [each.sentence() for each in plan(teacher="Qwen/Qwen2.5-72B").adjustments]
    assert any("--teacher_quantization 4bit makes it" in sentence for sentence in sentences)


@pytest.mark.parametrize(
    ("teacher", "code", "words"),
    [
        ("teacher", 0, ["distill / lora"]),
        ("org/elsewhere", 0, ["whether the teacher org/elsewhere has the tokens of the student"]),
        ("./missing", 2, ["There is no folder"]),
        ("other", 2, ["does not have the tokens of the student"]),
    ],
)
def test_plan_checks_the_teacher(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], teacher: str, code: int, words: list[str]
) -> None:
    tiny_model(tmp_path / "student")
    tiny_model(tmp_path / "teacher", hidden=96)
    tiny_model(tmp_path / "other", vocab=400)
    (tmp_path / "data.jsonl").write_text(json.dumps(chat("Say it.", "It is so.")) + "\n")
    name = str(tmp_path / teacher) if (tmp_path / teacher).exists() else teacher
    words_of_plan = [
        "plan",
        "--recipe",
        "distill",
        "--model_name",
        str(tmp_path / "student"),
        "--teacher",
        name,
    ]
    found = main(
        [*words_of_plan, "--dataset", str(tmp_path / "data.jsonl"), "--backend", "cpu", "--skip_eval"]
    )
    said = "".join(capsys.readouterr())
    assert found == code and all(word in said for word in words), said
