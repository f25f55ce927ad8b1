"""The memory that a step may use: the same value in the plan, the manager and the tables of the docs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import planned
import pytest

from crosstune.config.resolve.plan import Plan
from crosstune.core.backend import backend_specs
from crosstune.estimate.machine import Machine, held_score_bits
from crosstune.estimate.memory import (
    GIB,
    backward_bytes,
    kept_bytes,
    largest_batch,
    layer_bytes,
    usable_bytes,
)
from crosstune.estimate.model_shape import Step, shape_for_size
from crosstune.machines.probe import load_machine

HIGH, LOW = "PYTORCH_MPS_HIGH_WATERMARK_RATIO", "PYTORCH_MPS_LOW_WATERMARK_RATIO"


def apple(total_gib: int) -> Machine:
    """An Apple machine with this much memory, of which Metal recommends two thirds up to 36 GiB, then three quarters."""
    like = load_machine("apple-m2-max-64gb")
    device_bytes = int(total_gib * GIB * (2 / 3 if total_gib <= 36 else 3 / 4))
    device = dataclasses.replace(
        like.backends["mps"].devices[0], memory_total_bytes=device_bytes, memory_free_bytes=device_bytes
    )
    backends = {
        name: dataclasses.replace(report, devices=(device,)) if report.unified_memory else report
        for name, report in like.backends.items()
    }
    return dataclasses.replace(like, memory_total_bytes=total_gib * GIB, backends=backends)


def usable_gib(machine: Machine, backend: str, **environment: str) -> float:
    report = machine.backends[backend]
    return usable_bytes(machine, report, backend_specs()[backend], environment=environment) / GIB


@pytest.mark.parametrize(
    ("environment", "share"),
    [
        ({}, 0.7),
        ({HIGH: "0.5"}, 0.5),
        ({HIGH: "1.0"}, 1.0),
        ({LOW: "0.9"}, 0.9),  # raises the high watermark, which may not be below it
        ({LOW: "0.2"}, 0.7),
    ],
)
def test_the_watermark_of_mps_is_its_share(environment: dict[str, str], share: float) -> None:
    assert usable_gib(apple(64), "mps", **environment) == pytest.approx(48 * share)
    assert usable_gib(apple(64), "mlx", **environment) == pytest.approx(48 * 0.9)
    assert usable_gib(apple(64), "cpu", **environment) == pytest.approx(64 * 0.9)


@pytest.mark.parametrize("value", ["0", "0.0", "1.9"])
def test_without_a_limit_the_system_still_keeps_its_part(value: str) -> None:
    assert usable_gib(apple(64), "mps", **{HIGH: value}) == pytest.approx(64 * 0.9)


def plan_on(machine: Machine, *, environment: dict[str, str], **asked: Any) -> Plan:
    return planned.plan_on(machine, shape=shape_for_size(7), facts={"environment": environment}, **asked)


@pytest.mark.parametrize(("asked", "rows"), [({}, 4), ({"use_gradient_checkpointing": False}, 1)])
def test_the_largest_batch_is_that_of_the_plan_with_its_checkpointing(
    asked: dict[str, Any], rows: int
) -> None:
    """Without checkpointing not even one row fits here."""
    plan = plan_on(apple(32), environment={}, backend="mps", train_type="qlora", batch_size="auto", **asked)
    assert plan.config.batch_size == rows
    if not asked:
        assert plan.config.use_gradient_checkpointing and plan.estimated_bytes <= plan.usable_bytes


def test_the_watermark_reaches_the_plan() -> None:
    asked: dict[str, Any] = {"backend": "mps", "train_type": "qlora", "batch_size": 8}
    usual, small = (plan_on(apple(64), environment=env, **asked) for env in ({}, {HIGH: "0.3"}))
    assert (usual.usable_bytes, small.usable_bytes) == (int(48 * GIB * 0.7), int(48 * GIB * 0.3))
    assert (usual.config.batch_size, small.config.batch_size) == (8, 4)
    assert plan_on(apple(64), environment={HIGH: "0"}, **asked).usable_bytes == int(64 * GIB * 0.9)


# The rows of `docs/guide/mps.md`: LoRA over 4 bits, rank 16, 2048 tokens per row, activations recomputed.
BATCHES = {16: (1, 0, 0), 32: (4, 2, 0), 64: (8, 4, 0), 128: (16, 16, 4), 192: (32, 16, 8)}


@pytest.mark.parametrize(
    ("total_gib", "batches"), [(16, BATCHES[16]), (64, BATCHES[64]), (192, BATCHES[192])]
)
def test_batch_sizes_of_apple_machines(total_gib: int, batches: tuple[int, ...]) -> None:
    machine = apple(total_gib)
    report = machine.backends["mps"]
    limit = usable_bytes(machine, report, backend_specs()["mps"], environment={})
    bits = held_score_bits(report, flash=None, compute_bits=16)
    found = tuple(
        largest_batch(
            shape_for_size(size_b),
            Step(quantizer="bnb", n_bits=4, checkpointing=True, score_bits=bits),
            limit_bytes=limit,
        )
        for size_b in (7, 13, 70)
    )
    assert found == batches


def test_scores_are_counted_where_no_kernel_avoids_them() -> None:
    shape = shape_for_size(7)
    flash, plain = (Step(context=2048, score_bits=bits) for bits in (0, 32))
    scores = 32 * 2048**2 * 4  # heads, scores, bytes
    assert layer_bytes(shape, plain) - layer_bytes(shape, flash) == scores
    assert kept_bytes(shape, plain) - kept_bytes(shape, flash) == 32 * scores
    assert backward_bytes(shape, plain) - backward_bytes(shape, flash) == 2 * scores
    apple_64, cuda = load_machine("apple-m2-max-64gb").backends, load_machine("h200").backends["cuda"]
    assert held_score_bits(apple_64["mps"], flash=None, compute_bits=16) == 32
    assert held_score_bits(apple_64["mlx"], flash=None, compute_bits=16) == 16
    assert held_score_bits(cuda, flash=None, compute_bits=16) == 0
    assert held_score_bits(cuda, flash=False, compute_bits=16) == 32
    assert held_score_bits(cuda, flash=None, compute_bits=16, shares_keys=True) == 0
    assert held_score_bits(cuda, flash=None, compute_bits=32, shares_keys=True) == 32
    assert held_score_bits(cuda, flash=None, compute_bits=32) == 0


def test_the_docs_show_these_batches() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guide" / "mps.md").read_text(encoding="utf-8")
    for total_gib, batches in BATCHES.items():
        row = " | ".join(str(batch or "-") for batch in batches)
        assert f"| {total_gib} GB | {usable_gib(apple(total_gib), 'mps'):.1f} GiB | {row} |" in page
