"""Runs of the distill recipe: stored distributions, resumes, moves, the student's own answers, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import chat

import crosstune
from crosstune.core.errors import UserError
from crosstune.models.tiny import tiny_model
from crosstune.recipes.distill.recipe import find_problems


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("distill")
    tiny_model(home / "student")
    tiny_model(home / "teacher", hidden=96, num_layers=3)
    rows = [chat(f"Say {n}, please.", f"{n} it is" + " and so on" * (n % 4)) for n in range(30)]
    (home / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return home


def train(home: Path, out: Path, **options: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train, and return the metrics of all steps and the summary."""
    asked = {
        "recipe": "distill", "model_name": str(home / "student"), "teacher": str(home / "teacher"),
        "dataset": str(home / "data.jsonl"), "batch_size": 2, "gradient_accumulation_steps": 2, "lr": 1e-3, "lora_rank": 4,
        "backend": "cpu", "precision": "fp32", "eval_samples": 4, "num_samples": 0, "max_steps": 4, "output_dir": str(out),
        "name": "run",
    }  # fmt: skip
    run = crosstune.train(**{**asked, **options})
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], json.loads((run.folder / "summary.json").read_text())


def losses(rows: list[dict[str, Any]]) -> list[float]:
    return [row["loss"] for row in rows]


@pytest.mark.parametrize(("backend", "packing"), [("cpu", True), ("mlx", False)])
def test_stored_distributions_of_all_tokens_equal_the_live_teacher(
    home: Path, tmp_path: Path, backend: str, packing: bool
) -> None:
    options: dict[str, Any] = {"backend": backend, "packing": packing, "context_length": 128, "max_steps": 2}
    live, summary = train(home, tmp_path, name="live", **options)
    stored, same = train(home, tmp_path, name="stored", teacher_top_k=10**6, **options)
    assert losses(stored) == pytest.approx(losses(live), rel=1e-5)
    assert same["eval_after"] == pytest.approx(summary["eval_after"], rel=1e-4)
    assert {"kl", "cross_entropy", "agreement", "teacher_cross_entropy"} <= live[0].keys() & summary[
        "eval_after"
    ].keys()


def test_a_run_with_stored_distributions_moves_and_resumes_without_its_teacher(
    home: Path, tmp_path: Path
) -> None:
    shutil.copytree(home / "teacher", tmp_path / "teacher")
    options: dict[str, Any] = {"teacher": str(tmp_path / "teacher"), "teacher_top_k": 8}
    rows, _ = train(home, tmp_path, save_steps=2, **options)
    shutil.rmtree(tmp_path / "teacher")
    point = str(tmp_path / "run" / "checkpoints" / "step-00000002")
    again, _ = train(home, tmp_path, name="again", resume=point, **options)
    assert losses(again) == losses(rows)
    moved, _ = train(home, tmp_path, name="moved", resume=point, **{**options, "backend": "mlx"})
    assert losses(moved) == pytest.approx(losses(rows), rel=1e-4)
    with pytest.raises(UserError, match="There is no folder"):
        train(home, tmp_path, name="anew", **options)


@pytest.mark.parametrize(
    "options",
    [
        {"on_policy_share": 0.5, "distill_loss": "jsd", "ce_weight": 0.3, "max_new_tokens": 6},
        {"on_policy_share": 0.5, "max_new_tokens": 6, "backend": "mlx"},
    ],
)
def test_a_resumed_run_continues_bit_by_bit(home: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    rows, _ = train(home, tmp_path, save_steps=1, keep_last_n=4, lora_dropout=0.1, **options)
    point = str(tmp_path / "run" / "checkpoints" / "step-00000001")
    again, _ = train(home, tmp_path, name="again", resume=point, lora_dropout=0.1, **options)
    assert losses(again) == losses(rows)
    assert [row["on_policy"] for row in rows] == [0, 1, 0, 1]
    assert 1 <= rows[1]["completions/mean_length"] <= 6


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_the_base_under_the_adapters_teaches_like_a_copy(home: Path, tmp_path: Path, backend: str) -> None:
    options: dict[str, Any] = {"ce_weight": 0.5, "backend": backend}
    own, summary = train(home, tmp_path, name="own", teacher=str(home / "student"), **options)
    tiny = shutil.copytree(home / "student", tmp_path / "copy")
    config = json.loads((tiny / "config.json").read_text())  # other weights by identity, equal in value
    (tiny / "config.json").write_text(json.dumps(config | {"initializer_range": 0.03}))
    copied, _ = train(home, tmp_path, name="copied", teacher=str(tiny), **options)
    assert losses(own) == pytest.approx(losses(copied), rel=1e-6)
    assert own[0]["kl"] == pytest.approx(0, abs=1e-6) and own[3]["kl"] > 1e-4
    assert "verdicts" not in summary or not summary["verdicts"]
    stored, _ = train(
        home, tmp_path, name="stored", teacher=str(home / "student"), teacher_top_k=10**6, **options
    )
    assert losses(stored) == pytest.approx(losses(own), rel=1e-5)


def test_the_divergence_falls(home: Path, tmp_path: Path) -> None:
    """On the rows and on own answers in turn."""
    options: dict[str, Any] = {"max_steps": 30, "lr": 3e-3, "num_epochs": 20, "train_type": "full"}
    _, summary = train(home, tmp_path, on_policy_share=0.5, max_new_tokens=16, **options)
    assert summary["eval_after"]["kl"] < 0.5 * summary["eval_before"]["kl"]


def test_a_quantized_teacher_is_close_to_the_teacher(home: Path, tmp_path: Path) -> None:
    found = {
        bits: train(home, tmp_path, name=bits, max_steps=1, skip_eval=True, teacher_quantization=bits)[0][0]["loss"]
        for bits in ("none", "8bit", "4bit")
    }  # fmt: skip
    assert len(set(found.values())) == 3
    assert list(found.values()) == pytest.approx([found["none"]] * 3, rel=0.1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"teacher": None}, ["needs a teacher", "same tokenizer"]),
        ({"teacher": "STUDENT"}, ["is the model that is trained", "ce_weight"]),
        (
            {"teacher": "OTHER"},
            ["does not have the tokens of", "only the student has", "only the teacher has 1 tokens, such as"],
        ),
        ({"teacher": "./missing"}, ["teacher", "There is no folder"]),
        ({"teacher": "http://127.0.0.1:8000/v1"}, ["is a server", "teacher_top_k"]),
        ({"teacher_top_k": 4, "on_policy_share": 0.5}, ["cannot be combined with on_policy_share"]),
        ({"packing": True, "on_policy_share": 0.5}, ["cannot be combined with packing"]),
        ({"dataset": "TEXT", "on_policy_share": 0.5}, ["have no prompts"]),
    ],
)
def test_what_cannot_work_is_refused_before_the_run(
    home: Path, tmp_path: Path, options: dict[str, Any], words: list[str]
) -> None:
    other = tiny_model(tmp_path / "other")
    written = json.loads((other / "tokenizer.json").read_text())
    old = next(token for token, number in written["model"]["vocab"].items() if number == 500)
    written["model"]["vocab"] = {
        ("zebra" if token == old else token): number for token, number in written["model"]["vocab"].items()
    }
    written["model"]["merges"] = [
        merge for merge in written["model"]["merges"] if old not in (*merge, "".join(merge))
    ]
    (other / "tokenizer.json").write_text(json.dumps(written))
    (tmp_path / "text.txt").write_text("Once there was a ship.\n" * 40)
    places = {"STUDENT": home / "student", "OTHER": other, "TEXT": tmp_path / "text.txt"}
    options = {name: str(places.get(str(value), value)) if value is not None and isinstance(value, str) else value for name, value in options.items()}  # fmt: skip
    with pytest.raises(UserError) as found:
        train(home, tmp_path, **options)
    text = str(found.value)
    assert all(word in text for word in words), text
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_damaged_distributions_are_found(home: Path, tmp_path: Path) -> None:
    train(home, tmp_path, teacher_top_k=8, save_steps=2)
    path = tmp_path / "run" / "reference.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    point = str(tmp_path / "run" / "checkpoints" / "step-00000002")
    with pytest.raises(UserError, match="is damaged"):
        train(home, tmp_path, name="again", resume=point, teacher_top_k=8)


def test_another_loss_is_another_training(home: Path, tmp_path: Path) -> None:
    train(home, tmp_path, save_steps=2)
    point = str(tmp_path / "run" / "checkpoints" / "step-00000002")
    with pytest.raises(UserError, match="does not match the checkpoint"):
        train(home, tmp_path, name="again", resume=point, distill_loss="reverse_kl")
    written = json.loads((home / "teacher" / "config.json").read_text())
    try:
        (home / "teacher" / "config.json").write_text(json.dumps(written | {"initializer_range": 0.5}))
        _, summary = train(home, tmp_path, name="changed", resume=point)
    finally:
        (home / "teacher" / "config.json").write_text(json.dumps(written))
    events = (tmp_path / "changed" / "events.jsonl").read_text()
    assert "weights of the teacher" in events and summary["status"] == "finished"


def test_verdicts() -> None:
    def metrics(kl: float, student: float = 3.0, teacher: float = 2.0) -> dict[str, float]:
        return {"kl": kl, "cross_entropy": student, "teacher_cross_entropy": teacher}

    def problems(evaluations: dict[int, dict[str, float]]) -> dict[str, str]:
        return find_problems(evaluations, "big", ce_weight=1.0)

    assert not any(problems({0: metrics(1.0)}).values())
    assert "big is no better" in problems({0: metrics(1.0, teacher=3.1)})["teacher is no better"]
    stays = problems({0: metrics(1.0), 5: metrics(0.4), 9: metrics(0.98)})
    assert "divergence is 1.000 before training and 0.980 now" in stays["student stays away"]
    assert not any(problems({0: metrics(1.0), 9: metrics(0.4)}).values())
    assert not any(problems({0: metrics(0.0), 9: metrics(0.01)}).values())


@pytest.mark.cuda
def test_on_a_gpu_the_fast_layers_give_the_loss_of_the_general_layers(home: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "backend": "cuda",
        "precision": "bf16",
        "distill_loss": "jsd",
        "ce_weight": 0.5,
    }
    for more in ({}, {"packing": True, "context_length": 128}, {"on_policy_share": 0.5, "max_new_tokens": 8}):
        found = [
            losses(
                train(
                    home,
                    tmp_path,
                    name=f"{kernels}-{len(more)}",
                    overwrite=True,
                    kernels=kernels,
                    **options,
                    **more,
                )[0]
            )
            for kernels in ("fast", "general")
        ]
        assert np.isfinite(found).all()
        steps = (
            slice(0, 1) if "on_policy_share" in more else slice(None)
        )  # sampled tokens may differ by rounding
        assert found[0][steps] == pytest.approx(found[1][steps], rel=2e-2)
