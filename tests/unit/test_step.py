"""One optimizer step with a scripted session: the calls, their order, and the loss scale."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest

from crosstune.core.errors import NonFiniteError, PeerLost, UserError
from crosstune.core.out_of_memory import OutOfMemory
from crosstune.core.protocols import Backward, PreparedBatch
from crosstune.loop.step import START, LossScale, check_weight, prepare_window, take_step

GOOD = Backward(loss=1.0, grad_norm=2.0, weight=3, num_tokens=4)
OVERFLOW = Backward(loss=1.0, grad_norm=math.inf, weight=3, num_tokens=4)
NO_LOSS = Backward(loss=math.nan, grad_norm=math.nan, weight=3, num_tokens=4)
WINDOW = [PreparedBatch(weight=3, num_tokens=4, arrays={})]


@dataclass
class Scripted:
    """A session whose backward passes give these answers, one after the other."""

    answers: list[Any]
    calls: list[Any] = field(default_factory=list)

    def backward(self, window: Any, *, loss_scale: float) -> Backward:
        self.calls.append(("backward", loss_scale))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def discard(self) -> None:
        self.calls.append("discard")

    def update(self, *, lr: float) -> None:
        self.calls.append(("update", lr))


def step(session: Any, scale: LossScale | None = None) -> Backward:
    return take_step(session, WINDOW, lr=0.5, scale=scale)


def test_a_good_step_updates_once_and_is_counted() -> None:
    session, scale = Scripted([GOOD]), LossScale(enabled=True)
    assert step(session, scale) is GOOD
    assert session.calls == [("backward", START), ("update", 0.5)]
    assert (scale.factor, scale.good_steps) == (START, 1)


def test_without_a_scale_the_loss_is_not_scaled() -> None:
    session = Scripted([GOOD])
    assert step(session) is GOOD
    assert session.calls == [("backward", 1.0), ("update", 0.5)]


def test_an_overflow_is_tried_again_with_half_the_scale() -> None:
    session, scale = Scripted([OVERFLOW, OVERFLOW, GOOD]), LossScale(enabled=True)
    assert step(session, scale) is GOOD
    assert session.calls == [
        ("backward", START),
        "discard",
        ("backward", START / 2),
        "discard",
        ("backward", START / 4),
        ("update", 0.5),
    ]
    assert (scale.factor, scale.good_steps) == (START / 4, 1)


@pytest.mark.parametrize(
    ("enabled", "answer", "word"), [(True, NO_LOSS, "loss"), (False, OVERFLOW, "gradient")]
)
def test_what_a_smaller_scale_cannot_mend_stops_before_the_update(
    enabled: bool, answer: Backward, word: str
) -> None:
    session, scale = Scripted([answer]), LossScale(enabled=enabled)
    scale.good_steps = 7
    before = scale.to_json()
    with pytest.raises(NonFiniteError, match=f"The {word} is not a finite number"):
        step(session, scale)
    assert [call if call == "discard" else call[0] for call in session.calls] == ["backward", "discard"]
    assert scale.to_json() == before


def test_a_scale_that_is_used_up_is_put_back() -> None:
    session, scale = Scripted([OVERFLOW] * 40), LossScale(enabled=True)
    scale.grow()
    before = scale.to_json()
    with pytest.raises(NonFiniteError, match="gradient"):
        step(session, scale)
    tried = [call[1] for call in session.calls if call != "discard"]
    assert tried == [START / 2**n for n in range(17)]
    assert session.calls.count("discard") == 17 and scale.to_json() == before


@pytest.mark.parametrize("error", [OutOfMemory("no room"), PeerLost("gone")])
def test_a_step_that_fails_leaves_session_and_scale_as_they_were(error: Exception) -> None:
    session, scale = Scripted([OVERFLOW, error]), LossScale(enabled=True)
    before = scale.to_json()
    with pytest.raises(type(error)):
        step(session, scale)
    assert session.calls == [("backward", START), "discard", ("backward", START / 2), "discard"]
    assert scale.to_json() == before


def test_a_window_without_weight_is_refused_before_anything_runs() -> None:
    session: Any = Scripted([GOOD])
    empty = PreparedBatch(weight=0, num_tokens=4, arrays={})
    with pytest.raises(UserError, match="no supervised tokens"):
        take_step(session, [empty, empty], lr=0.5)
    assert session.calls == []
    check_weight([empty, *WINDOW])


def test_a_window_is_prepared_batch_by_batch() -> None:
    class Doubles:
        def prepare(self, batch: int) -> int:
            return 2 * batch

    session, window = Doubles(), [1, 2, 3]
    assert prepare_window(session, window) == [2, 4, 6]  # type: ignore[arg-type, comparison-overlap]
