"""`--batch_size auto`: found with real passes, and the training that follows is the one with that size."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from crosstune.checkpoint.read import newest_valid
from crosstune.config.load import make_config, to_yaml
from crosstune.core.out_of_memory import OutOfMemory
from crosstune.core.protocols import Backward, Memory, PreparedBatch
from crosstune.files.json_files import read_jsonl
from crosstune.planner.learned import recall_all
from crosstune.planner.search_batch import BatchSearch, most_rows
from crosstune.process.ranks import SingleProcess
from crosstune.runs.pipeline import RunResult, train
from crosstune.torch_engine.tasks.causal_lm import CausalLM


class Measured:
    """A session whose passes take 100 bytes, and 10 for each row; `most` rows make it fail."""

    def __init__(self, most: int = 10**9) -> None:
        self.most, self.tried, self.pending, self.peak = most, list[int](), 0, 100

    def prepare(self, batch: Any) -> PreparedBatch:
        return PreparedBatch(weight=batch, num_tokens=batch, arrays={})

    def backward(self, window: Any, *, loss_scale: float = 1.0) -> Backward:
        self.pending = window[0].weight
        self.tried.append(self.pending)
        if self.pending > self.most:
            raise OutOfMemory("no room")
        self.peak = 100 + 10 * self.pending
        return Backward(loss=1.0, grad_norm=1.0, weight=1, num_tokens=1)

    def discard(self) -> None:
        self.pending = 0

    def memory(self) -> Memory:
        return Memory(used_bytes=100, peak_bytes=self.peak)

    def reset_peak(self) -> None:
        self.peak = 100


def search(session: Any, *, limit: int, at_most: int = 512) -> int:
    found = BatchSearch(
        session=session,
        longest_batch=lambda size: size,  # type: ignore[arg-type, return-value]
        group=SingleProcess(),
        limit_bytes=limit,
        reserve_bytes=50,
        at_most=at_most,
    ).run()
    assert session.pending == 0, "no gradient is left"
    return found.batch_size


def test_the_size_is_doubled_and_bisected_and_no_pass_exceeds_the_limit() -> None:
    session = Measured()
    assert search(session, limit=100 + 50 + 10 * 23) in (22, 23)
    assert max(session.tried) <= 23 and session.tried[:5] == [1, 2, 4, 8, 16]


def test_an_allocation_that_fails_is_a_size_that_does_not_fit() -> None:
    session = Measured(most=11)
    assert search(session, limit=10**9) in (10, 11)
    with pytest.raises(OutOfMemory, match="not enough memory"):
        search(Measured(most=0), limit=10**9)


def test_the_search_ends_where_more_rows_are_not_wanted() -> None:
    session = Measured()
    assert search(session, limit=10**9, at_most=12) == 12
    assert session.tried == [1, 2, 4, 8, 12]
    assert most_rows(1000, micro_batches=1, rows_per_step=0, world_size=1) == 125
    assert most_rows(1000, micro_batches=5, rows_per_step=0, world_size=5) == 5
    assert most_rows(1000, micro_batches=1, rows_per_step=64, world_size=2) == 32
    assert most_rows(3, micro_batches=1, rows_per_step=0, world_size=1) == 1


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("auto")
    rows = [{"prompt": f"a {n}", "completion": "b " * (n % 5 + 1) + str(n)} for n in range(80)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model_name": str(tiny_model),
        "dataset": str(folder / "rows.jsonl"),
        "backend": "cpu",
        "precision": "fp32",
        "output_dir": str(folder / "runs"),
        "max_steps": 2,
        "lora_dropout": 0.1,
        "lr": 1e-2,
        "skip_eval": True,
    }


def bits(run: RunResult) -> list[Any]:
    newest = newest_valid(run.folder / "checkpoints")
    assert newest is not None
    found = [row["loss"] for row in read_jsonl(run.folder / "metrics.jsonl")]
    return [*found, newest.manifest.files["weights.safetensors"]["sha256"]]


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


def test_auto_is_written_as_a_word() -> None:
    config = make_config(batch_size="auto")
    assert to_yaml(config) == "batch_size: auto\n"
    assert replace(config, batch_size=4).options_asked() == {"batch_size": 4}
