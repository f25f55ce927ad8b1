"""Allocations that fail for real, in each part of a run: exit code 2, advice, and nothing lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from injection import memory_limit
from injection.bench import Bench, differences, read_bits
from safetensors.numpy import load_file

from crosstune.checkpoint.read import newest_valid
from crosstune.cli.main import main
from crosstune.files.json_files import read_json, read_jsonl

TOO_MUCH = 1 << 60


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("memory"))


def torch_allocation() -> None:
    import torch

    torch.empty(TOO_MUCH, dtype=torch.uint8)


def numpy_allocation() -> None:
    import numpy as np

    np.empty(TOO_MUCH, np.uint8)


def fail(where: str, name: str, allocate: Callable[[], None], *, call: int) -> None:
    """Make one call of a function or method allocate more than there is, at its beginning."""
    import pkgutil

    home: Any = pkgutil.resolve_name(where)
    plain, calls = getattr(home, name), []

    def failing(*args: Any, **options: Any) -> Any:
        calls.append(name)
        if len(calls) == call:
            allocate()
        return plain(*args, **options)

    setattr(home, name, failing)


SESSION = "crosstune.torch_engine.session.session.TorchSession"
RECIPE, TASK = "crosstune.recipes.sft.SftRecipe", "crosstune.torch_engine.tasks.causal_lm.CausalLM"


@pytest.mark.parametrize(
    ("allocate", "where", "name", "call", "steps", "advice"),
    [
        (torch_allocation, SESSION, "compute_gradients", 4, 3, "--use_gradient_checkpointing"),
        (numpy_allocation, RECIPE, "micro_batches", 4, 3, "--use_gradient_checkpointing"),
        (torch_allocation, TASK, "build", 1, 0, "start a new run with --train_type qlora"),
    ],
)
def test_a_step_or_a_load_that_does_not_fit(
    bench: Bench, allocate: Callable[[], None], where: str, name: str, call: int, steps: int, advice: str
) -> None:
    folder = bench.home / f"{name}-{allocate.__name__}"
    failing = partial(fail, where, name, allocate, call=call)
    # --strict: the step is not repeated with fewer rows
    ended = bench.start("lora", folder, before=failing, strict=True).wait()
    assert ended.code == 2 and "Traceback" not in ended.said, ended
    assert "not enough memory" in ended.said and advice in ended.said
    newest = newest_valid(folder / "checkpoints")
    assert (newest.step if newest else 0) == steps
    again = bench.start("lora", folder, resume="auto").wait()
    assert again.code == 0, again
    assert differences(read_bits(folder), bench.reference("lora")) == []


def test_a_start_that_fails_before_its_first_step_leaves_its_name_free(bench: Bench) -> None:
    folder = bench.home / "free"
    failing = partial(fail, TASK, "build", torch_allocation, call=1)
    assert bench.start("lora", folder, before=failing).wait().code == 2
    assert bench.start("lora", folder).wait().code == 0
    assert list(folder.parent.glob("free~*")) == []
    assert differences(read_bits(folder), bench.reference("lora")) == []
    refused = bench.start("lora", folder).wait()
    assert refused.code == 2 and "already contains a run" in refused.said


def test_a_last_evaluation_that_does_not_fit_costs_neither_checkpoint_nor_result(bench: Bench) -> None:
    folder = bench.home / "evaluation"
    state = "crosstune.torch_engine.session.state"
    failing = partial(fail, state, "separate_random", torch_allocation, call=2)
    options = {"skip_eval": False, "eval_samples": 4, "save_steps": 0, "strict": True}
    ended = bench.start("full", folder, before=failing, **options).wait()
    assert ended.code == 2 and "Traceback" not in ended.said, ended
    assert "not enough memory for an evaluation" in ended.said
    assert read_json(folder / "summary.json")["status"] == "finished"
    assert len(read_jsonl(folder / "metrics.jsonl")) == 4
    assert list(folder.glob("*/*.safetensors")), "the result is there"
    newest = newest_valid(folder / "checkpoints")
    assert newest is not None and newest.step == 4


@pytest.mark.parametrize("call", [1, 2])
def test_a_copy_that_does_not_fit_is_written_without_one(bench: Bench, call: int) -> None:
    folder = bench.home / f"copy-{call}"
    failing = partial(fail, SESSION, "export_state", numpy_allocation, call=call)
    ended = bench.start("lora", folder, before=failing).wait()
    assert ended.code == 0, ended
    assert differences(read_bits(folder), bench.reference("lora")) == []


def test_a_result_that_does_not_fit_leaves_a_checkpoint_to_make_it_from(bench: Bench) -> None:
    folder = bench.home / "result"
    failing = partial(fail, TASK, "write_model", torch_allocation, call=1)
    ended = bench.start("full", folder, before=failing, save_steps=0).wait()
    assert ended.code == 2 and "Traceback" not in ended.said, ended
    assert "not enough memory to save the run" in ended.said
    newest = newest_valid(folder / "checkpoints")
    assert newest is not None and newest.step == 4


@pytest.mark.parametrize(
    "error",
    [
        SystemError("error return without exception set"),
        ImportError("libtorch.so: failed to map segment from shared object"),
        RuntimeError("can't start new thread"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_python_itself_without_memory(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(words: object) -> int:
        raise error

    monkeypatch.setattr("crosstune.cli.commands.options.run", fail)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # which `main` replaces
    assert main(["options"]) == 2
    said = capsys.readouterr().err
    assert "without" not in said, "Python's own words say nothing about memory"
    assert "There is not enough memory for crosstune options." in said and "Traceback" not in said
    monkeypatch.setattr(
        "crosstune.cli.commands.options.run", lambda words: (_ for _ in ()).throw(SystemError("a bug"))
    )
    with pytest.raises(SystemError):
        main(["options"])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux refuses memory by RLIMIT_AS")
def test_a_run_in_too_little_memory_takes_half_the_rows_at_a_time_and_learns_the_same(tmp_path: Path) -> None:
    """Whole micro-batches need all of what the run without a limit took, halves little more than half of it: 85 % is allowed."""
    words = [sys.executable, memory_limit.__file__, str(tmp_path), "16", "0.85"]
    ended = subprocess.run(
        words, env=os.environ | memory_limit.ENVIRONMENT, capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stderr
    measured = json.loads(ended.stdout.splitlines()[-1])
    assert measured["failures"] == [] and measured["needed_bytes"] > 200 * 2**20
    free, limited = tmp_path / "free", tmp_path / "limited"
    assert read_json(free / "summary.json")["recoveries"] == []
    recoveries = read_json(limited / "summary.json")["recoveries"]
    assert 1 <= len(recoveries) <= 2, "how much else a run holds depends on the machine"
    halved = recoveries[0]
    assert halved["changed"] == {"batch_size": 8, "gradient_accumulation_steps": 2}
    assert halved["cause"].startswith("DefaultCPUAllocator: ") and "bytes" in halved["cause"]
    steps = [row["step"] for row in read_jsonl(limited / "events.jsonl") if row["kind"] == "recovery"]
    assert steps[0] == 1 and len(steps) == len(recoveries)
    losses = [[row["loss"] for row in read_jsonl(run / "metrics.jsonl")] for run in (free, limited)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=0, atol=1e-5)
    assert losses[0][-1] < losses[0][0]
    wanted, found = (load_file(run / "adapter" / "adapter_model.safetensors") for run in (free, limited))
    for name, weight in wanted.items():
        np.testing.assert_allclose(found[name], weight, rtol=0, atol=1e-5, err_msg=name)
