"""--ema_decay on both engines and with every optimizer, including those without state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import short_batches, train_step

from crosstune.config.load import make_config
from crosstune.core.weights import averaged, result_weights
from crosstune.models.locate import ModelFolder
from crosstune.planner.gather import make_plan
from crosstune.runs.open_parts import open_session

DECAY = 0.6
ENGINES = ("cpu", "mlx")


def opened(model: Path, backend: str, **options: Any) -> Any:
    if backend == "mlx":
        pytest.importorskip("mlx_lm", reason="the mlx extra is not installed")
    asked = {"backend": backend, "precision": "fp32", "model_name": str(model)} | options
    return open_session(
        make_plan(make_config(**asked)), ModelFolder(name=str(model), path=model, source="folder")
    )


def assert_same(found: Any, expected: Any, *, rtol: float = 0.0) -> None:
    assert found.keys() == expected.keys() and expected
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=rtol, atol=rtol, err_msg=name)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adafactor", "adadelta"])
@pytest.mark.parametrize("backend", ENGINES)
def test_every_optimizer_averages_its_weights(tiny_model: Path, backend: str, optimizer: str) -> None:
    session = opened(tiny_model, backend, optimizer=optimizer, ema_decay=DECAY)
    window, by_hand = short_batches(tiny_model), dict[str, Any]()
    for _ in range(3):
        train_step(session, window, lr=0.05)
        now = session.export_state().weights
        by_hand = {name: DECAY * by_hand.get(name, now[name]) + (1 - DECAY) * now[name] for name in now}
    state = session.export_state()
    assert_same(result_weights(state), by_hand, rtol=1e-6)
    assert any(np.abs(by_hand[name] - state.weights[name]).max() > 1e-5 for name in by_hand)
    of_average = session.evaluate(window).loss
    with averaged(session):
        assert_same(session.export_state().weights, result_weights(state))
    assert_same(session.export_state().weights, state.weights)

    without = opened(tiny_model, backend, optimizer=optimizer)
    without.import_state(state)
    assert without.evaluate(window).loss != of_average, "an average that no longer moves"
    assert "average" not in without.export_state().moments
    without.import_weights(result_weights(state))
    assert without.evaluate(window).loss == pytest.approx(of_average, rel=1e-6)

    again = opened(tiny_model, backend, optimizer=optimizer, ema_decay=DECAY)
    again.import_state(state)
    for each in (session, again):
        train_step(each, window, lr=0.05)
    assert_same(again.export_state().moments["average"], session.export_state().moments["average"])


def test_a_run_with_an_average_moves_between_engines(tiny_model: Path) -> None:
    torch_session = opened(tiny_model, "cpu", ema_decay=DECAY)
    mlx_session = opened(tiny_model, "mlx", ema_decay=DECAY)
    window = short_batches(tiny_model)
    train_step(torch_session, window, lr=0.01)
    mlx_session.import_state(torch_session.export_state())
    train_step(mlx_session, window, lr=0.01)
    torch_session.import_state(mlx_session.export_state())
    assert_same(
        torch_session.export_state().moments["average"], mlx_session.export_state().moments["average"]
    )
    assert torch_session.evaluate(window).loss == pytest.approx(mlx_session.evaluate(window).loss, rel=1e-5)
