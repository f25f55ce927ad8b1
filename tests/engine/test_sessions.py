"""The session interface: one suite, run with each available engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import find_nonfinite, train_step

from crosstune.config.load import make_config
from crosstune.core.errors import NonFiniteError, UserError
from crosstune.core.protocols import Session, SessionState
from crosstune.data.batches.token_batch import TokenBatch, pack_rows, split_rows
from crosstune.data.render.rendering import encode_conversation
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.loop.step import LossScale
from crosstune.models.locate import ModelFolder
from crosstune.planner.gather import make_plan
from crosstune.runs.open_parts import open_session as open_by_plan

Windows = list[list[TokenBatch]]
BACKENDS = ("cpu", "mlx")
WORDS = ["red", "green", "blue", "a much longer colour", "none", "white"]
TURNS = [
    [{"role": "user", "content": f"Say {word}."}, {"role": "assistant", "content": f"{word} it is, " * n}]
    for n, word in enumerate(WORDS, start=1)
]
PLAIN = {"optimizer": "sgd", "wd": 0.0, "apply_gradient_clipping": False}
"""A step of plain SGD with the rate 1 moves each weight by its gradient."""


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "mlx":
        pytest.importorskip("mlx_lm", reason="the mlx extra is not installed")
    return str(request.param)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_folder(tiny_model)


@pytest.fixture(scope="module")
def examples(tokenizer: Tokenizer) -> list[Any]:
    return [encode_conversation(turns, tokenizer, index=i, whole=False) for i, turns in enumerate(TURNS)]


@pytest.fixture(scope="module")
def windows(examples: list[Any]) -> Windows:
    """Four windows of two micro-batches."""
    orders = [examples, examples[::-1], examples[2:] + examples[:2], examples[3:] + examples[:3]]
    return [batches(order, 3) for order in orders]


def open_session(backend: str, model: Path, **options: Any) -> Session:
    asked = {"backend": backend, "precision": "fp32", "model_name": str(model)} | options
    folder = ModelFolder(name=str(model), path=model, source="folder")
    return open_by_plan(make_plan(make_config(**asked)), folder)


def batches(examples: list[Any], size: int) -> list[TokenBatch]:
    return list(split_rows(examples, batch_size=size, pad_id=0))


def run(session: Session, windows: Windows) -> list[tuple[float, float]]:
    results = [train_step(session, window, lr=1e-3) for window in windows]
    return [(result.loss, result.grad_norm) for result in results]


def moved(session: Session, window: list[TokenBatch]) -> dict[str, Any]:
    """Return the distance that one step at the rate 1 moves every weight."""
    before = session.export_state().weights
    train_step(session, window, lr=1.0)
    return {name: before[name] - after for name, after in session.export_state().weights.items()}


def close(ours: dict[str, Any], theirs: dict[str, Any], *, rel: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert np.abs(ours[name] - array).max() <= rel * np.abs(array).max() + 1e-8, name


@pytest.mark.parametrize("train_type", ["lora", "full"])
def test_a_window_has_the_gradient_of_one_large_batch(
    backend: str, tiny_model: Path, examples: list[Any], train_type: str
) -> None:
    options = PLAIN | {"train_type": train_type}
    whole = moved(open_session(backend, tiny_model, **options), batches(examples, 6))
    assert max(np.abs(array).max() for array in whole.values()) > 1e-3
    close(moved(open_session(backend, tiny_model, **options), batches(examples, 4)), whole, rel=1e-4)


def test_the_loss_of_a_step_is_the_mean_over_the_tokens_of_its_window(
    backend: str, tiny_model: Path, examples: list[Any]
) -> None:
    rows = batches(examples, 1)
    session = open_session(backend, tiny_model)
    losses = [session.evaluate([row]) for row in rows]
    expected = sum(part.loss * part.weight for part in losses) / sum(part.weight for part in losses)
    result = train_step(session, rows, lr=1e-3)
    assert result.loss == pytest.approx(expected, rel=1e-5)
    assert result.weight == sum(row.weight for row in rows)
    assert abs(np.mean([part.loss for part in losses]) - expected) > 1e-5  # a mean of means is something else


def test_clipping_shortens_the_gradient_and_keeps_its_direction(
    backend: str, tiny_model: Path, examples: list[Any]
) -> None:
    window = batches(examples, 3)
    free = moved(open_session(backend, tiny_model, **PLAIN), window)
    session = open_session(
        backend, tiny_model, **PLAIN | {"apply_gradient_clipping": True, "grad_norm": 0.25}
    )
    before = session.export_state().weights
    norm = train_step(session, window, lr=1.0).grad_norm
    after = session.export_state().weights
    assert norm == pytest.approx(
        np.sqrt(sum(float((array.astype(np.float64) ** 2).sum()) for array in free.values())), rel=1e-4
    )
    assert norm > 0.3
    factor = 0.25 / (norm + 1e-6)
    close(
        {name: before[name] - after[name] for name in free},
        {n: factor * a for n, a in free.items()},
        rel=1e-3,
    )


def test_checkpointing_changes_no_number(backend: str, tiny_model: Path, examples: list[Any]) -> None:
    """A layer that is computed again must drop the same inputs."""
    results, ends = [], []
    for recompute in (False, True):
        session = open_session(backend, tiny_model, lora_dropout=0.4, use_gradient_checkpointing=recompute)
        results.append([train_step(session, batches(examples, 3), lr=1e-2) for _ in range(2)])
        ends.append(dict(session.export_state().weights))
    assert results[0] == results[1]
    close(ends[1], ends[0], rel=1e-6)


def test_an_evaluation_drops_nothing_and_changes_nothing(
    backend: str, tiny_model: Path, examples: list[Any]
) -> None:
    plain = open_session(backend, tiny_model)
    dropping = open_session(backend, tiny_model, lora_dropout=0.5)
    rows = batches(examples, 3)
    before, first, second = plain.evaluate(rows), dropping.evaluate(rows), dropping.evaluate(rows)
    assert before == first == second
    assert np.isnan(plain.evaluate([]).loss)


def test_a_packed_step_is_that_of_the_same_documents_unpacked(
    backend: str, tiny_model: Path, examples: list[Any]
) -> None:
    packed = moved(
        open_session(backend, tiny_model, **PLAIN), [pack_rows([examples[:3], examples[3:]], pad_id=0)]
    )
    close(packed, moved(open_session(backend, tiny_model, **PLAIN), batches(examples, 6)), rel=1e-4)


def same_state(found: SessionState, wanted: SessionState) -> None:
    """Weights and moments, bit for bit."""
    assert found.moments.keys() == wanted.moments.keys()
    for name, weight in wanted.weights.items():
        np.testing.assert_array_equal(found.weights[name], weight, err_msg=name)
    for slot, arrays in wanted.moments.items():
        assert found.moments[slot].keys() == arrays.keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(found.moments[slot][name], array, err_msg=f"{slot} of {name}")


CASES: dict[str, dict[str, Any]] = {
    "lora": {"train_type": "lora", "lora_dropout": 0.3},
    "qlora": {"train_type": "qlora", "lora_dropout": 0.3},
    "full in bf16": {"train_type": "full", "precision": "bf16"},
    "sgd": {"train_type": "full", "optimizer": "sgd"},
    "lion": {"train_type": "full", "optimizer": "lion"},
    "adafactor": {"train_type": "full", "optimizer": "adafactor"},
}


@pytest.mark.parametrize("case", CASES)
def test_a_state_carries_on_bit_for_bit(backend: str, case: str, tiny_model: Path, windows: Windows) -> None:
    first = open_session(backend, tiny_model, **CASES[case])
    run(first, windows[:2])
    state = first.export_state()
    expected = run(first, windows[2:3])  # the state is a copy: what its session does later is not in it
    second = open_session(backend, tiny_model, **CASES[case])
    run(second, windows[:1])  # whatever it did before, its random numbers included, is replaced
    second.import_state(state)
    assert run(second, windows[2:3]) == expected
    assert all(array.dtype == np.float32 for array in state.weights.values())
    same_state(second.export_state(), first.export_state())


def test_adams_moments_have_portable_names(backend: str, tiny_model: Path, windows: Windows) -> None:
    session = open_session(backend, tiny_model)
    assert session.export_state().moments == {}
    run(session, windows[:2])
    state = session.export_state()
    assert set(state.moments) == {"first_moment", "second_moment", "step"}
    assert set(state.moments["first_moment"]) == set(state.weights)
    steps = list(state.moments["step"].values())
    assert all(step.shape == () and step.dtype == np.float32 and float(step) == 2 for step in steps)


def test_a_state_of_other_shapes_is_refused(backend: str, tiny_model: Path) -> None:
    state = open_session(backend, tiny_model, lora_rank=4).export_state()
    with pytest.raises(UserError, match="does not match the weights that this run trains") as error:
        open_session(backend, tiny_model, lora_rank=8).import_state(state)
    assert "lora_A" in error.value.why


def test_a_number_that_is_none_stops_before_the_optimizer_moves(
    backend: str, tiny_model: Path, windows: Windows
) -> None:
    session = open_session(backend, tiny_model)
    train_step(session, windows[0], lr=1e-3)
    state = session.export_state()
    name = "model.layers.1.mlp.up_proj.lora_B.weight"
    broken = state.weights[name].copy()
    broken[0, 0] = np.nan
    session.import_state(replace(state, weights={**state.weights, name: broken}))
    with pytest.raises(NonFiniteError, match="loss"):
        train_step(session, windows[1], lr=1e-3)
    after = session.export_state()
    for other, array in state.weights.items():
        np.testing.assert_array_equal(after.weights[other], broken if other == name else array)
    for slot, arrays in state.moments.items():
        np.testing.assert_array_equal(after.moments[slot][name], arrays[name])
    assert name in find_nonfinite(session, windows[1])
    session.import_state(state)
    assert np.isfinite(train_step(session, windows[1], lr=1e-3).loss)
    assert find_nonfinite(session, windows[1]) == "every value was finite when the step was run again"


def test_fp16_scales_its_loss_and_tries_again_with_less(
    backend: str, tiny_model: Path, windows: Windows
) -> None:
    session = open_session(backend, tiny_model, precision="fp16")
    exact = open_session(backend, tiny_model)
    scale = LossScale(enabled=True)
    scale.factor = 2.0**24
    result = train_step(session, windows[0], lr=1e-3, scale=scale)
    expected = train_step(exact, windows[0], lr=1e-3)
    assert result.loss == pytest.approx(expected.loss, rel=0.01)
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=0.05)
    assert 1.0 < scale.factor < 2.0**24


@pytest.mark.parametrize(("precision", "train_type"), [("bf16", "lora"), ("fp16", "full")])
def test_short_formats_follow_fp32(
    backend: str, tiny_model: Path, windows: Windows, precision: str, train_type: str
) -> None:
    short = open_session(backend, tiny_model, precision=precision, train_type=train_type)
    exact = open_session(backend, tiny_model, train_type=train_type)
    for window in windows[:2]:
        assert train_step(short, window, lr=1e-3).loss == pytest.approx(
            train_step(exact, window, lr=1e-3).loss, rel=0.02
        )


def test_an_adapter_starts_another_run_where_it_ended(
    backend: str, tiny_model: Path, windows: Windows, tmp_path: Path
) -> None:
    first = open_session(backend, tiny_model, lora_rank=4)
    run(first, windows)
    folder = first.save_result(tmp_path)
    second = open_session(backend, tiny_model, lora_rank=4, base_adapter=str(folder))
    assert second.evaluate(windows[0]).loss == first.evaluate(windows[0]).loss
    with pytest.raises(UserError, match="does not match the adapter options"):
        open_session(backend, tiny_model, base_adapter=str(folder), lora_rank=3)
    with pytest.raises(UserError, match="not an adapter folder"):
        open_session(backend, tiny_model, base_adapter=str(tmp_path))


@pytest.mark.parametrize(
    ("targets", "kinds", "layers"),
    [
        ("all", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}, {"0", "1"}),
        ("default", {"q_proj", "v_proj"}, {"0", "1"}),
        (r".*layers\.1\.mlp\..*_proj", {"gate_proj", "up_proj", "down_proj"}, {"1"}),
    ],
)
def test_targets_select_linear_layers(
    backend: str, tiny_model: Path, targets: str, kinds: set[str], layers: set[str]
) -> None:
    session = open_session(backend, tiny_model, lora_target_modules=targets)
    names = {name.partition(".lora_")[0] for name in session.export_state().weights}
    assert {name.rpartition(".")[2] for name in names} == kinds
    assert {name.split(".layers.")[1][0] for name in names} == layers
    assert len(names) == len(kinds) * len(layers)


def test_a_target_that_matches_nothing_names_what_there_is(backend: str, tiny_model: Path) -> None:
    with pytest.raises(UserError, match="matches no linear layer") as caught:
        open_session(backend, tiny_model, lora_target_modules="attentive")
    assert "q_proj" in caught.value.do
