"""Compiled blocks: the same training, an evaluation and answers without them, and errors of the compiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import find_nonfinite, short_batches, train_step

from crosstune.config.load import make_config
from crosstune.config.resolve.fit_compute import check_compiler, missing_compiler
from crosstune.core.errors import UserError
from crosstune.data.batches.token_batch import TokenBatch
from crosstune.planner.gather import make_plan
from crosstune.torch_engine.device import is_compiled
from crosstune.torch_engine.open import open_session

needs_compiler = pytest.mark.skipif(missing_compiler("cpu") is not None, reason="no C++ compiler here")


@pytest.fixture(scope="module")
def windows(tiny_model: Path) -> list[list[TokenBatch]]:
    """Windows of micro-batches of different lengths."""
    return [[batch] for batch in short_batches(tiny_model)]


def open_tiny(folder: Path, **asked: Any) -> Any:
    config = make_config(backend="cpu", precision="fp32", model_name=str(folder), **asked)
    return open_session(make_plan(config), model_folder=folder)


@needs_compiler
@pytest.mark.slow
def test_compiled_blocks_train_alike(
    tiny_model: Path, windows: list[list[TokenBatch]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, compiled = open_tiny(tiny_model), open_tiny(tiny_model, torch_compile=True)
    assert is_compiled(compiled.model) and not is_compiled(plain.model)
    assert any("2 blocks are compiled" in note for note in compiled.notes)
    assert compiled.trained_shapes() == plain.trained_shapes()
    torch._dynamo.utils.counters.clear()
    for window in [*windows, *windows]:
        expected, found = (train_step(session, window, lr=1e-2) for session in (plain, compiled))
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
    counters = torch._dynamo.utils.counters
    made = counters["stats"]["unique_graphs"]
    assert 0 < made <= 2 and not counters["graph_break"]
    # Other passes use the blocks as they are, and make no further program.
    assert compiled.evaluate(windows[0]).loss == pytest.approx(plain.evaluate(windows[0]).loss, rel=1e-5)
    assert compiled.generate([[5, 6, 7]], max_new_tokens=4) == plain.generate([[5, 6, 7]], max_new_tokens=4)
    assert "every value was finite" in find_nonfinite(compiled, windows[0])
    assert counters["stats"]["unique_graphs"] == made
    # A resumed run takes the same steps, bit for bit.
    resumed = open_tiny(tiny_model, torch_compile=True)
    resumed.import_state(compiled.export_state())
    pair = [train_step(session, windows[1], lr=1e-2) for session in (compiled, resumed)]
    assert pair[0].loss == pair[1].loss and pair[0].grad_norm == pair[1].grad_norm


def test_an_error_of_the_compiler_is_told(
    tiny_model: Path, windows: list[list[TokenBatch]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.exc import TorchDynamoException

    session = open_tiny(tiny_model, torch_compile=True)

    def fail(*args: Any, **more: Any) -> Any:
        raise TorchDynamoException("no such operator\nand a long story")

    for block in session.model.model.layers:
        block._compiled_call_impl = fail
    with pytest.raises(UserError, match="--torch_compile does not work with LlamaForCausalLM") as caught:
        train_step(session, windows[0], lr=1e-2)
    assert "no such operator" in str(caught.value) and "long story" not in str(caught.value)


def test_a_machine_without_compiler_is_told(monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> None:
    plan = make_plan(make_config(backend="cpu", model_name=str(tiny_model), torch_compile=True))
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UserError, match=r"--torch_compile on cpu needs a C\+\+ compiler"):
        check_compiler(plan)
    assert missing_compiler("mps") is None
