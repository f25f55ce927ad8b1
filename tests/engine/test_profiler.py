"""Profiled runs: the same losses, fractions that add up, files that tools can read."""

from __future__ import annotations

import contextlib
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from crosstune.config.load import make_config
from crosstune.core.profiling import ProfileSettings
from crosstune.files.json_files import read_json, read_jsonl
from crosstune.runs.pipeline import train


def losses(folder: Path) -> list[tuple[float, float]]:
    return [(row["loss"], row["grad_norm"]) for row in read_jsonl(folder / "metrics.jsonl")]


def options(parent: Path, model: Path, name: str, **more: Any) -> dict[str, Any]:
    data = parent / "rows.jsonl"
    rows = [{"prompt": f"count to {n}", "completion": " ".join(map(str, range(n)))} for n in range(2, 18)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (
        {"model_name": str(model), "dataset": str(data), "backend": "cpu", "precision": "fp32"}
        | {"output_dir": str(parent / "runs"), "name": name, "max_steps": 6, "num_epochs": 9}
        | {"batch_size": 4, "gradient_accumulation_steps": 1, "lora_dropout": 0.1, "skip_eval": True}
        | {"save_steps": 3}
        | more
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("profiled")
    asked = {"profile": True, "profile_active_steps": 2, "profile_repeat": 2}
    asked |= {"profiling_frequency": 3, "profile_export_memory_timeline": True}
    asked |= {"profile_with_shapes": True, "profiling_output": str(parent / "out")}
    plain = train(make_config(**options(parent, tiny_model, "plain"))).folder
    profiled = train(make_config(**options(parent, tiny_model, "profiled", **asked))).folder
    return {"plain": plain, "profiled": profiled, "out": parent / "out" / "profiled"}


def test_the_losses_are_the_same_bit_for_bit(runs: dict[str, Path]) -> None:
    assert losses(runs["plain"]) == losses(runs["profiled"])
    assert len(losses(runs["plain"])) == 6


def test_the_shares_add_up_to_the_time_of_a_step(runs: dict[str, Path]) -> None:
    result = read_json(runs["out"] / "profile.json")
    phases = {name: phase["seconds"] for name, phase in result["phases"].items()}
    assert result["steps"] == [2, 3, 5, 6]
    assert set(phases) == {"data", "forward", "backward", "optimizer", "checkpoint", "other"}
    assert sum(phases.values()) == pytest.approx(result["step_s"], rel=0.01)
    assert phases["backward"] > 0 and phases["forward"] > 0
    # The loop times its steps by itself, without waiting for data and checkpoints.
    rows = {row["step"]: row["step_s"] for row in read_jsonl(runs["profiled"] / "metrics.jsonl")}
    own = sum(rows[step] for step in result["steps"]) / 4
    # Their own clocks, within it; a busy machine may have interrupted the step between two of them.
    assert own / 10 < sum(phases[name] for name in ("forward", "backward", "optimizer")) < 1.25 * own


def test_the_trace_opens_as_a_trace(runs: dict[str, Path]) -> None:
    traces = sorted(runs["out"].glob("trace-*.json.gz"))
    assert [path.name for path in traces] == ["trace-step-00000002.json.gz", "trace-step-00000005.json.gz"]
    with gzip.open(traces[0], "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"step 2", "step 3", "forward", "backward", "optimizer", "aten::mm"} <= names


def test_operators_limits_and_memory_are_recorded(runs: dict[str, Path]) -> None:
    result = read_json(runs["out"] / "profile.json")
    assert any(each["shapes"] for each in result["operators"])
    assert result["flops"] > 1e6 and result["limit_share"] > 0
    assert result["limits"]["flops_per_s"] > 1e8 and result["limits"]["bytes_per_s"] > 1e8
    assert result["device_busy_share"] is None  # the CPU computes
    assert max(size for _, size in result["memory_timeline"]) > 10_000


def test_products_and_attention_are_counted() -> None:
    from crosstune.torch_engine.session.profiler import count_flops

    assert count_flops("aten::mm", [[3, 5], [5, 7]]) == 2 * 3 * 5 * 7
    assert count_flops("aten::addmm", [[7], [3, 5], [5, 7]]) == 2 * 3 * 5 * 7
    assert count_flops("aten::bmm", [[2, 3, 5], [2, 5, 7]]) == 2 * 2 * 3 * 5 * 7
    shapes = [[2, 4, 9, 16], [2, 4, 11, 16], [2, 4, 11, 16]]
    forward = count_flops("aten::_scaled_dot_product_flash_attention_for_cpu", shapes)
    assert forward == 2 * (2 * 2 * 4 * 9 * 11 * 16)
    backward = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"
    assert count_flops(backward, [[2, 4, 9, 16], *shapes]) == 2.5 * forward
    assert count_flops("aten::linear", [[3, 5], [7, 5]]) == 0  # its product is counted
    assert count_flops("aten::mm", []) == count_flops("aten::mm", [[3], [5]]) == 0


def test_mlx_is_profiled_by_phases(tmp_path: Path, tiny_model: Path) -> None:
    pytest.importorskip("mlx.core")
    asked = options(tmp_path, tiny_model, "plain", backend="mlx", max_steps=3, batch_size=2, save_steps=0)
    asked |= {"lora_dropout": 0.0}
    plain = train(make_config(**asked)).folder
    profiled = train(make_config(**asked | {"name": "profiled", "profile": True})).folder
    assert losses(plain) == losses(profiled)
    result = read_json(profiled / "profiles" / "profile.json")
    assert {"data", "forward and backward", "optimizer"} <= set(result["phases"])
    with gzip.open(profiled / "profiles" / "trace-phases.json.gz", "rt") as file:
        assert "step 2" in {event["name"] for event in json.load(file)["traceEvents"]}


@pytest.mark.cuda
def test_the_device_is_busy_and_its_memory_recorded(tmp_path: Path, tiny_model: Path) -> None:
    asked = {
        "backend": "cuda",
        "profile": True,
        "profile_memory": True,
        "profile_export_memory_timeline": True,
    }
    plain = train(make_config(**options(tmp_path, tiny_model, "plain", backend="cuda"))).folder
    folder = train(make_config(**options(tmp_path, tiny_model, "profiled", **asked))).folder
    assert losses(plain) == losses(folder)
    result = read_json(folder / "profiles" / "profile.json")
    assert 0 < result["device_busy_share"] <= 1
    assert 0 < result["limit_share"] < 1 and result["limits"]["bytes_per_s"] > 1e11
    assert list((folder / "profiles").glob("memory-*.pickle"))
    assert max(size for _, size in result["memory_timeline"]) > 10_000


def test_a_trace_on_a_full_disk_leaves_nothing_and_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """torch reports it only with a line on standard error."""
    import resource

    import torch

    from crosstune.torch_engine.session.profiler import TorchProfiler

    settings = ProfileSettings(stacks=False, shapes=True, memory=True, memory_timeline=True, trace=True)
    profiler = TorchProfiler(torch.device("cpu"), settings, dtype=torch.float32)
    profiler.warm_up()
    profiler.start()
    for _ in range(50):
        torch.randn(16, 16) @ torch.randn(16, 16)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match="the disk is full or a limit was reached"):
            profiler.stop(tmp_path, step=1, evaluating=contextlib.nullcontext())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
    assert "output_json" not in capfd.readouterr().err
