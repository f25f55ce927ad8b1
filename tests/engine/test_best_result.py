"""For a model that overfits, the best weights are the result, on both engines, also after a stop and a resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from crosstune.cli.main import main
from crosstune.config.load import make_config
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.files.json_files import read_json, read_jsonl
from crosstune.files.safetensors_header import read_header
from crosstune.runs.pipeline import train

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def data(tmp_path: Path) -> tuple[str, str]:
    """A few rows to learn by heart, and others that contradict them."""
    paths = []
    for name, answer in (("train", "yes"), ("val", "no")):
        rows = [{"prompt": f"question {n}", "completion": f"{answer} {n}"} for n in range(8)]
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        paths.append(str(path))
    return paths[0], paths[1]


def options(tmp_path: Path, model: Path, data: tuple[str, str], **more: Any) -> dict[str, Any]:
    return (
        {"model_name": str(model), "dataset": data[0], "eval_dataset": data[1], "backend": "cpu"}
        | {"precision": "fp32", "output_dir": str(tmp_path / "runs"), "name": "over", "max_steps": 40}
        | {"num_epochs": 99, "batch_size": 8, "gradient_accumulation_steps": 1, "eval_steps": 5}
        | {"lr": 0.02, "num_samples": 0, "lr_scheduler": "constant"}
        | more
    )


def result_bytes(folder: Path) -> bytes:
    (path,) = (folder / "adapter").glob("adapter_model.safetensors")
    read_header(path)
    return path.read_bytes()


def test_the_best_weights_are_the_result(
    tmp_path: Path, tiny_model: Path, data: tuple[str, str], capsys: Captured
) -> None:
    config = options(tmp_path, tiny_model, data, lr=0.05)
    words = [f"--{name}={value}" for name, value in config.items()]
    assert main(["train", *words, "--log_to", "stdout"]) == 0
    folder = tmp_path / "runs" / "over"
    summary = read_json(folder / "summary.json")
    losses = {int(step): loss for step, loss in summary["evaluations"].items() if int(step)}
    best = min(losses, key=lambda step: losses[step])
    assert best < 40, "the model must overfit for this test"
    assert summary["best"]["step"] == summary["result_step"] == best
    assert summary["last"]["step"] == 40
    said = capsys.readouterr()
    printed = said.out + said.err
    assert "overfitting" in printed and f"(step {best}, the best evaluation)" in printed
    warnings = [event for event in read_jsonl(folder / "events.jsonl") if event["kind"] == "warning"]
    assert any("overfitting" in event["message"] for event in warnings)

    # The same weights as those of a run that ends at the best step, evaluated on the same data.
    short = train(make_config(**config | {"name": "short", "max_steps": best, "result": "last"}))
    assert result_bytes(short.folder) == result_bytes(folder)
    last = train(make_config(**config | {"name": "last", "result": "last"}))
    assert last.summary["result_step"] == 40
    assert result_bytes(last.folder) != result_bytes(folder)

    assert main(["checkpoint", "list", str(folder)]) == 0
    (marked,) = [line for line in capsys.readouterr().out.splitlines() if line.endswith("best")]
    assert marked.startswith(f"step-{best:08d}")


def test_early_stopping_ends_a_run_once_and_for_all(
    tmp_path: Path, tiny_model: Path, data: tuple[str, str]
) -> None:
    config = options(tmp_path, tiny_model, data, early_stopping=2)
    result = train(make_config(**config))
    summary = result.summary
    assert summary["status"] == "finished" and summary["stopped_early"]
    best, steps = summary["best"]["step"], summary["steps"]
    assert steps == best + 10 < 40
    again = train(make_config(**config, resume="auto"))
    assert again.summary["steps"] == steps and again.summary["status"] == "finished"
    assert result_bytes(again.folder) == result_bytes(result.folder)
    longer = train(make_config(**config | {"early_stopping": 0, "resume": "auto"}))
    assert longer.summary["steps"] == 40


def test_evaluations_that_are_not_finite_end_with_the_last_weights_and_a_word(
    tmp_path: Path, tiny_model: Path, data: tuple[str, str]
) -> None:
    """The letter of the held-out rows has weights that are not numbers; the training never meets it."""
    model = shutil.copytree(tiny_model, tmp_path / "damaged")
    tokens = {*Tokenizer.from_folder(model).encode("Ω").ids} - {*Tokenizer.from_folder(model).encode("a").ids}
    (path,) = model.glob("*.safetensors")
    weights = dict(load_file(path))
    embedding = weights["model.embed_tokens.weight"].copy()
    embedding[sorted(tokens)] = np.nan
    save_file(weights | {"model.embed_tokens.weight": embedding}, path, metadata={"format": "pt"})
    held_out = tmp_path / "odd.jsonl"
    held_out.write_text(json.dumps({"prompt": "Ω", "completion": "no"}) + "\n")
    rows = (data[0], str(held_out))
    config = options(tmp_path, model, rows, early_stopping=2, eval_steps=2, result="best", max_steps=8)
    result = train(make_config(**config))
    assert (result.summary["status"], result.summary["stopped_early"]) == ("finished", True)
    assert result.summary["steps"] == result.summary["result_step"] == 4
    assert result.summary["best"] is None and result_bytes(result.folder)
    said = [row["message"] for row in read_jsonl(result.folder / "events.jsonl") if row["kind"] == "warning"]
    assert len(said) == 3, said
    assert "evaluation loss at step 0 is nan" in said[0]
    assert "2 evaluations in a row is not finite" in said[1]
    assert "the last weights are the result" in said[2]
    again = train(make_config(**config | {"early_stopping": 0, "resume": "auto"}))
    assert (again.summary["steps"], again.summary["result_step"]) == (8, 8)


def test_mlx_takes_the_best_weights_too(tmp_path: Path, tiny_model: Path, data: tuple[str, str]) -> None:
    pytest.importorskip("mlx_lm")
    summary = train(make_config(**options(tmp_path, tiny_model, data, backend="mlx", max_steps=20))).summary
    assert summary["result_step"] == summary["best"]["step"] < 20


def test_the_best_weights_of_the_run_that_is_continued_elsewhere(
    tmp_path: Path, tiny_model: Path, data: tuple[str, str]
) -> None:
    config = options(tmp_path, tiny_model, data, max_steps=20)
    first = train(make_config(**config))
    best = first.summary["result_step"]
    assert best < 20
    other = train(make_config(resume=str(first.folder), name="other", max_steps=25))
    assert other.summary["result_step"] == best
    assert result_bytes(other.folder) == result_bytes(first.folder)
