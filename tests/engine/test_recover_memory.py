"""A step or an evaluation that does not fit into memory is repeated with smaller micro-batches, with the same result."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from crosstune.cli.terminal.event_lines import event_lines
from crosstune.config.load import make_config
from crosstune.core.events import Recovered
from crosstune.core.out_of_memory import EVALUATING, GENERATING, STEP, UPDATING
from crosstune.files.json_files import read_jsonl
from crosstune.loop.step import halve
from crosstune.runs.pipeline import RunResult, train
from crosstune.torch_engine.tasks.causal_lm import CausalLM

ROWS = 13
EVALUATED = {"skip_eval": False, "eval_samples": 16, "num_samples": 1, "max_new_tokens": 2}


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("memory")
    data = folder / "rows.jsonl"
    rows = [{"prompt": f"a {n}", "completion": "b " * (n % 5 + 1) + str(n)} for n in range(40)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (
        {"model_name": str(tiny_model), "dataset": str(data), "eval_dataset": str(data)}
        | {"precision": "fp32", "output_dir": str(folder / "runs"), "max_steps": 2, "batch_size": ROWS}
        | {"lr": 1e-2, "lora_dropout": 0.0, "context_length": 64, "save_steps": 0, "skip_eval": True}
    )


@pytest.fixture(scope="module")
def unforced(options: dict[str, Any]) -> Callable[..., list[dict[str, Any]]]:
    found: dict[tuple[str, bool], list[dict[str, Any]]] = {}

    def steps(backend: str, *, packing: bool = False) -> list[dict[str, Any]]:
        if (backend, packing) not in found:
            run = train(
                make_config(**options, backend=backend, packing=packing, name=f"straight-{backend}-{packing}")
            )
            assert run.summary["recoveries"] == []
            found[backend, packing] = read_jsonl(run.folder / "metrics.jsonl")
        return found[backend, packing]

    return steps


def limit_rows(monkeypatch: pytest.MonkeyPatch, backend: str, *, most: int, first: int = 0) -> None:
    """Let training on more than `most` rows at a time fail in the backward pass, after `first` passes."""
    calls: list[int] = []

    def fits(arrays: Any) -> bool:
        calls.append(1)
        return len(arrays["input_ids"]) <= most or len(calls) <= first

    if backend == "mlx":
        from crosstune.mlx_engine.task import Gradients

        gradients = Gradients.__call__

        def limited(self: Any, weights: Any, arrays: Any, key: Any, **scale: Any) -> Any:
            found = gradients(self, weights, arrays, key, **scale)
            if not fits(arrays):
                raise RuntimeError("[malloc] Unable to allocate 9 bytes.")
            return found

        monkeypatch.setattr(Gradients, "__call__", limited)
        return
    loss = CausalLM.loss

    def with_loss(self: Any, model: Any, arrays: Any) -> Any:
        found, sums = loss(self, model, arrays)
        return (found if not model.training or fits(arrays) else _FailsBackward.apply(found)), sums

    monkeypatch.setattr(CausalLM, "loss", with_loss)


class _FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")


def check_same(run: RunResult, wanted: list[dict[str, Any]]) -> None:
    found = read_jsonl(run.folder / "metrics.jsonl")
    assert [(row["tokens"], row["supervised_tokens"]) for row in found] == [
        (row["tokens"], row["supervised_tokens"]) for row in wanted
    ]
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose([r[name] for r in found], [r[name] for r in wanted], rtol=1e-4)


@pytest.mark.parametrize(("backend", "packing"), [("cpu", False), ("cpu", True), ("mlx", False)])
def test_a_step_is_repeated_with_smaller_micro_batches(
    options: dict[str, Any],
    unforced: Callable[..., list[dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    packing: bool,
) -> None:
    if backend == "mlx":
        pytest.importorskip("mlx.core")
    wanted = unforced(backend, packing=packing)
    limit_rows(monkeypatch, backend, most=4)
    run = train(make_config(**options, backend=backend, packing=packing, name=f"{backend}-{packing}"))
    check_same(run, wanted)
    found = run.summary["recoveries"]
    assert [step["changed"] for step in found] == [
        {"batch_size": 6, "gradient_accumulation_steps": 3},
        {"batch_size": 3, "gradient_accumulation_steps": 5},
    ]
    assert found[-1]["next_time"] == f"--batch_size 3 --rows_per_step {ROWS}"
    rows = [row for row in read_jsonl(run.folder / "events.jsonl") if row["kind"] == Recovered.kind]
    assert [row["changed"] for row in rows] == [row["changed"] for row in found]
    shown = [line for row in found for line, _ in event_lines(Recovered(**row))]
    assert len(shown) == 2 and "next time use --batch_size 3" in shown[1]


def test_an_evaluation_is_repeated_with_fewer_rows_and_the_steps_stay_as_they_are(
    options: dict[str, Any], unforced: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = unforced("cpu")
    plain = CausalLM.evaluate

    def limited(self: Any, model: Any, arrays: Any) -> Any:
        if len(arrays["input_ids"]) > 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return plain(self, model, arrays)

    monkeypatch.setattr(CausalLM, "evaluate", limited)
    run = train(make_config(**options | EVALUATED, backend="cpu", name="evaluation"))
    found = read_jsonl(run.folder / "metrics.jsonl")
    assert [row["loss"] for row in found] == [row["loss"] for row in wanted], "bit for bit"
    assert [step["changed"] for step in run.summary["recoveries"]] == [
        {"eval_batch_size": 6},
        {"eval_batch_size": 3},
        {"eval_batch_size": 1},
    ]
    assert run.summary["eval_loss"] is not None


@pytest.mark.parametrize("strict", [False, True])
def test_one_row_that_does_not_fit_ends_the_run_with_a_checkpoint_and_advice(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    limit_rows(monkeypatch, "cpu", most=0, first=1)
    quick = {"batch_size": 2, "strict": strict, "name": f"ends-{strict}"}
    run = train(make_config(**options | quick, backend="cpu"))
    assert run.failure is not None and run.failure.exit_code == 2
    advice = str(run.failure)
    assert ("--batch_size 1" in advice) == strict, "the sizes in use are not advised"
    assert "--use_gradient_checkpointing" in advice
    assert run.summary["steps"] == 1 and run.summary["checkpoint"].endswith("step-00000001")


def test_what_can_be_halved() -> None:
    config = make_config(batch_size=8, gradient_accumulation_steps=3)
    half = halve(config, doing=STEP)
    assert half is not None
    assert (half.batch_size, half.gradient_accumulation_steps, half.rows_per_step) == (4, 6, 24)
    assert halve(make_config(batch_size=1), doing=STEP) is None
    assert halve(config, doing=UPDATING) is None, "the weights may be half updated"
    for doing in (EVALUATING, GENERATING):
        smaller = halve(make_config(batch_size=1), doing=doing)
        assert smaller is not None and smaller.eval_batch_size == 1
        assert halve(smaller, doing=doing) is None


@pytest.mark.cuda
def test_a_real_limit_on_the_allocator_of_a_gpu(options: dict[str, Any]) -> None:
    long = options | {"dataset": "dummy", "eval_dataset": None, "context_length": 512, "batch_size": 256}
    straight = train(make_config(**long, backend="cuda", name="cuda-straight"))
    wanted = read_jsonl(straight.folder / "metrics.jsonl")
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    limit = torch.cuda.memory_allocated() + 0.6 * straight.summary["peak_memory_bytes"]
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        run = train(make_config(**long, backend="cuda", name="cuda-limited"))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert run.summary["recoveries"], "the limit was met"
    check_same(run, wanted)
