"""A rehearsal counts what a real run does: collectives to the byte, memory within 5 %."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from ranks import run_ranks

from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.estimate.rehearsal import Rehearsal
from crosstune.models.tiny import tiny_model
from crosstune.planner.gather import make_plan
from crosstune.planner.rehearse import rehearse
from crosstune.process.ranks import Ranks

LENGTH, ROWS = 256, 2

# What every rank does: count its first step, then measure the allocations of the second with torch's profiler.
REAL = f"""
import json, sys
from pathlib import Path
import numpy as np, torch
from torch.profiler import profile, ProfilerActivity
from crosstune.config.load import make_config
from crosstune.data.batches.token_batch import Example, pad_rows
from crosstune.planner.gather import make_plan
from crosstune.torch_engine.rehearse import CountStep, count_first_step
from crosstune.torch_engine.open import open_session

for number, (folder, options) in enumerate(json.loads(Path(FOLDER, "cases.json").read_text())):
    plan = make_plan(make_config(**options), ranks=group.ranks)
    session = open_session(plan, model_folder=Path(folder), group=group)
    tokens = np.arange({LENGTH}, dtype=np.int32) % 500
    row = Example(tokens=tokens, supervised=np.ones({LENGTH}, np.bool_), index=0)
    window = [session.prepare(pad_rows([row] * {ROWS}, pad_id=0)) for _ in range(group.ranks.size)]
    counter = CountStep(num_local=group.ranks.local_size)
    counted = count_first_step(session, lambda: session.backward(window), counter)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        session.backward(window)
        session.update(lr=1e-6)
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = counted.weights + counted.optimizer
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    if group.ranks.first:
        found = {{"counted": counted.to_json(), "measured": peak}}
        Path(FOLDER, f"real-{{number}}.json").write_text(json.dumps(found))
    session.parallel.mesh = None
    del session
"""


def cases(folder: Path, *, world: int) -> list[tuple[str, dict[str, object]]]:
    own = str(tiny_model(folder / "own", hidden=128, intermediate=384, num_layers=3))
    tied = str(tiny_model(folder / "tied", hidden=128, intermediate=384, num_layers=3, tied=True))
    common = {
        "backend": "cpu",
        "world_size": world,
        "batch_size": ROWS,
        "context_length": LENGTH,
        "kernels": "general",
    }
    return [
        (own, common | {"train_type": "full", "precision": "bf16", "sharding_strategy": "full_shard"}),
        (
            tied,
            common
            | {
                "train_type": "lora",
                "precision": "fp32",
                "sharding_strategy": "hybrid_full_shard",
                "use_gradient_checkpointing": True,
            },
        ),
    ]


@pytest.mark.slow
def test_counts_equal_a_real_run(tmp_path: Path) -> None:
    world, host = 4, 2
    asked = cases(tmp_path, world=world)
    (tmp_path / "cases.json").write_text(json.dumps(asked))
    run_ranks([{"world": world, "host": host, "runs": []}], hook=f"FOLDER = {str(tmp_path)!r}\n{REAL}")
    ranks = Ranks(engine="torch", size=world, local_size=host, num_nodes=world // host)
    for number, (folder, options) in enumerate(asked):
        plan = make_plan(make_config(**options, model_name=folder), ranks=ranks)
        assert plan.fitted is not None
        step = replace(plan.fitted.step, batch=ROWS, context=LENGTH)
        plan = replace(plan, fitted=replace(plan.fitted, step=step))
        found = rehearse(plan, num_nodes=world // host, folder=Path(folder)).counted
        real = json.loads((tmp_path / f"real-{number}.json").read_text())
        expected = Rehearsal.from_json(real["counted"])
        assert found.collectives == expected.collectives
        assert found.parameters == expected.parameters
        for part in ("weights", "gradients", "optimizer", "activations", "peak"):
            assert getattr(found, part) == pytest.approx(getattr(expected, part), rel=0.05), part
        assert found.peak == pytest.approx(real["measured"], rel=0.05)


def test_a_plan_that_cannot_be_rehearsed_is_refused(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model")
    plan = make_plan(make_config(backend="cpu", model_name=str(folder)))
    with pytest.raises(UserError, match="cannot be rehearsed") as error:
        rehearse(plan, num_nodes=1, folder=folder)
    assert "2 to 4,096 processes" in error.value.why
