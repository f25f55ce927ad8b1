"""`--batch_size auto` finds the size with real passes; the run equals a run with that size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from crosstune.checkpoint.read import newest_valid
from crosstune.config.load import make_config
from crosstune.files.json_files import read_jsonl
from crosstune.planner.measurements import recall_all
from crosstune.runs.pipeline import RunResult, train
from crosstune.torch_engine.tasks.causal_lm import CausalLM


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("auto")
    rows = [{"prompt": f"a {n}", "completion": "b " * (n % 5 + 1) + str(n)} for n in range(80)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (
        {"model_name": str(tiny_model), "dataset": str(folder / "rows.jsonl"), "backend": "cpu"}
        | {"precision": "fp32", "output_dir": str(folder / "runs"), "max_steps": 2, "lora_dropout": 0.1}
        | {"lr": 1e-2, "skip_eval": True}
    )


def bits(run: RunResult) -> list[Any]:
    newest = newest_valid(run.folder / "checkpoints")
    assert newest is not None
    found = [row["loss"] for row in read_jsonl(run.folder / "metrics.jsonl")]
    return [*found, newest.manifest.files["weights.safetensors"]["sha256"]]


@pytest.mark.slow
def test_a_run_finds_its_size_and_is_bit_equal_to_one_that_asked_for_it(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CROSSTUNE_CACHE", str(tmp_path / "cache"))
    loss, rows = CausalLM.loss, list[int]()

    def limited(self: Any, model: Any, arrays: Any) -> Any:
        rows.append(len(arrays["input_ids"]))
        if rows[-1] > 5:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return loss(self, model, arrays)

    monkeypatch.setattr(CausalLM, "loss", limited)
    found = train(make_config(**options, batch_size="auto", name="auto"))
    assert rows[:4] == [1, 2, 4, 8] and found.summary["recoveries"] == []
    searched = len(rows)
    asked = train(make_config(**options, batch_size=5, name="five"))
    assert bits(found) == bits(asked)
    kept = (found.folder / "config.yaml").read_text()
    assert "batch_size: 5" in kept, "a resumed run does not search again"
    events = read_jsonl(found.folder / "events.jsonl")
    said = [row["sentence"] for row in events if row.get("option") == "batch_size"]
    assert len(said) == 1 and "5 (found by" in said[0]
    again = train(make_config(**options, batch_size="auto", name="again"))
    assert bits(again) == bits(asked)
    assert len(rows) - searched == 2 * 2, "the size is remembered: no pass beside the steps of two runs"
    [entry] = recall_all("batch_sizes").values()
    assert entry["value"] == {"batch_size": 5}
