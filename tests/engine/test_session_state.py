"""The state of torch sessions beyond test_sessions.py: state specific to torch, and the search for non-finite values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import find_nonfinite, short_batches, train_step

from crosstune.config.load import make_config
from crosstune.core.errors import NonFiniteError
from crosstune.data.batches.token_batch import TokenBatch
from crosstune.planner.gather import make_plan
from crosstune.torch_engine.open import open_session as open_torch
from crosstune.torch_engine.session.session import TorchSession


def open_session(model: Path, **options: Any) -> TorchSession:
    asked = {"backend": "cpu", "precision": "fp32", "model_name": str(model)} | options
    return open_torch(make_plan(make_config(**asked)), model_folder=model)


@pytest.fixture(scope="module")
def windows(tiny_model: Path) -> list[list[TokenBatch]]:
    first, second = short_batches(tiny_model)
    return [[first, second], [second], [first], [second, first], [first], [second]]


def run(session: TorchSession, windows: list[list[TokenBatch]]) -> list[tuple[float, float]]:
    results = [train_step(session, window, lr=1e-2) for window in windows]
    return [(result.loss, result.grad_norm) for result in results]


# What the torch engine has alone; the other cases are in tests/engine/test_sessions.py, for both engines.
CASES: dict[str, dict[str, Any]] = {
    "bnb": {"train_type": "qlora", "quantization_backend": "bnb", "lora_dropout": 0.3},
    "hqq": {"train_type": "hqq_lora", "lora_dropout": 0.3},
    "llama_pro": {"train_type": "llama_pro"},
    "adamw_8bit": {"train_type": "full", "optimizer": "adamw_8bit"},
    "lion_8bit": {"train_type": "full", "optimizer": "lion_8bit"},
    "fused_adamw": {"train_type": "full", "optimizer": "fused_adamw"},
}


@pytest.mark.parametrize("case", CASES)
def test_a_state_of_torch_alone_carries_on_bit_for_bit(
    case: str, tiny_model: Path, windows: list[list[TokenBatch]]
) -> None:
    straight = open_session(tiny_model, **CASES[case])
    expected = run(straight, windows)
    first = open_session(tiny_model, **CASES[case])
    before = run(first, windows[:3])
    state = first.export_state()
    run(first, windows[3:])  # the state is a copy: what its session does later is not in it
    second = open_session(tiny_model, **CASES[case])
    torch.manual_seed(999)
    second.import_state(state)
    assert before + run(second, windows[3:]) == expected
    ended, wanted = second.export_state(), straight.export_state()
    for name, weight in wanted.weights.items():
        np.testing.assert_array_equal(ended.weights[name], weight, err_msg=name)
    assert ended.moments.keys() == wanted.moments.keys()
    for slot, arrays in wanted.moments.items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(ended.moments[slot][name], array, err_msg=f"{slot} of {name}")


def test_the_search_names_the_layer_whose_output_went_bad(
    tiny_model: Path, windows: list[list[TokenBatch]]
) -> None:
    session = open_session(tiny_model)
    layer = session.model.model.layers[1].mlp.down_proj
    with torch.no_grad():
        layer.base.weight[0, 0] = torch.inf
    with pytest.raises(NonFiniteError):
        train_step(session, windows[0], lr=1e-3)
    assert "model.layers.1.mlp.down_proj" in find_nonfinite(session, windows[0])


def test_the_search_leaves_the_random_state_alone(tiny_model: Path, windows: list[list[TokenBatch]]) -> None:
    session = open_session(tiny_model, lora_dropout=0.3)
    train_step(session, windows[0], lr=1e-3)
    before = session.export_state().random["torch.cpu"]
    assert find_nonfinite(session, windows[0]) == "every value was finite when the step was run again"
    np.testing.assert_array_equal(session.export_state().random["torch.cpu"], before)


@pytest.mark.cuda
@pytest.mark.parametrize("optimizer", ["adamw", "fused_adamw", "adamw_8bit", "paged_adamw_8bit"])
@pytest.mark.parametrize("train_type", ["lora", "qlora", "full"])
def test_a_state_carries_on_on_a_gpu(
    optimizer: str, train_type: str, tiny_model: Path, windows: list[list[TokenBatch]]
) -> None:
    options = {"backend": "cuda", "precision": "bf16", "optimizer": optimizer, "train_type": train_type}
    options["lora_dropout"] = 0.3 if train_type != "full" else 0.0
    expected = run(open_session(tiny_model, **options), windows)
    first = open_session(tiny_model, **options)
    before = run(first, windows[:3])
    state = first.export_state()
    second = open_session(tiny_model, **options)
    second.import_state(state)
    assert before + run(second, windows[3:]) == expected


@pytest.mark.cuda
def test_a_step_that_does_not_fit_leaves_everything_as_it_was(
    tiny_model: Path, windows: list[list[TokenBatch]]
) -> None:
    from crosstune.core.out_of_memory import OutOfMemory

    options = {"backend": "cuda", "precision": "fp32", "lora_dropout": 0.3}
    expected = run(open_session(tiny_model, **options), windows)
    session = open_session(tiny_model, **options)
    before = run(session, windows[:3])
    row = windows[3][0]
    many = {
        name: np.repeat(getattr(row, name)[:1], 100_000, axis=0)
        for name in ("input_ids", "targets", "segments", "positions")
    }
    allowed = torch.cuda.memory_reserved() + 2**26  # one activation of so many rows needs more
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.mem_get_info()[1])
    try:
        with pytest.raises(OutOfMemory, match="not enough memory"):
            train_step(session, [*windows[3], TokenBatch(**many)], lr=1e-2)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert before + run(session, windows[3:]) == expected
