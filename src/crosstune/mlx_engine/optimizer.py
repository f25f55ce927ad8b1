"""Update fp32 masters with the rules of torch's optimizers of the same names, and export optimizer state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from crosstune.core.errors import UserError
from crosstune.core.protocols import Array
from crosstune.core.weights import LION_BETAS, SLOT
from crosstune.mlx_engine.adapters import canonical_name, model_path

_ADADELTA_RHO, _ADADELTA_EPSILON = 0.9, 1e-6
_ADAFACTOR_DECAY, _ADAFACTOR_FLOOR = -0.8, 1.0
_FP32_EPSILON = 2.0**-23

COUNT = "step"
"""The slot of the step count in a checkpoint."""

Slots = dict[str, mx.array]
Moments = Mapping[str, Mapping[str, Array]]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The update rule of one weight."""

    start: Callable[[mx.array], Slots]
    numbers: Callable[[float, float, int], Sequence[float]]
    """Coefficients from learning rate, weight decay and step count, in double precision: 1 - 0.999 loses half its digits
    in fp32."""
    move: Callable[[mx.array, mx.array, Slots, mx.array], tuple[mx.array, Slots]]
    counts: bool = True


@dataclass(frozen=True, kw_only=True)
class Adam:
    """The update rules of Adam and AdamW."""

    beta1: float
    beta2: float
    epsilon: float

    def rates(self, lr: float, count: int) -> tuple[float, float]:
        return lr / (1 - self.beta1**count), math.sqrt(1 - self.beta2**count)

    def decoupled(
        self, weight: mx.array, gradient: mx.array, slots: Slots, numbers: mx.array
    ) -> tuple[mx.array, Slots]:
        step, kept = self._step(gradient, slots, numbers[1], numbers[2])
        return weight * numbers[0] - step, kept

    def coupled(
        self, weight: mx.array, gradient: mx.array, slots: Slots, numbers: mx.array
    ) -> tuple[mx.array, Slots]:
        step, kept = self._step(gradient + numbers[0] * weight, slots, numbers[1], numbers[2])
        return weight - step, kept

    def _step(
        self, gradient: mx.array, slots: Slots, rate: mx.array, root: mx.array
    ) -> tuple[mx.array, Slots]:
        """Return the update and the new moments."""
        first = self.beta1 * slots["first_moment"] + (1 - self.beta1) * gradient
        second = self.beta2 * slots["second_moment"] + (1 - self.beta2) * gradient * gradient
        step = rate * first / (mx.sqrt(second) / root + self.epsilon)
        return step, {"first_moment": first, "second_moment": second}


class Optimizer:
    def __init__(
        self,
        name: str,
        *,
        weight_decay: float,
        adam: Adam,
        b_ratio: float = 1.0,
        ema_decay: float = 0.0,
        compiled: bool = False,
    ) -> None:
        """Apply weight decay to matrices only, not to biases and norm weights.

        `b_ratio` scales the learning rate of the adapters' B matrices (LoRA+). With `ema_decay`, `averages` is a moving
        average of the weights; it starts as a copy after the first step.
        """
        self.rule = _rules(adam)[name]
        self.weight_decay = weight_decay
        self.b_ratio = b_ratio
        self.ema_decay = ema_decay
        self.slots: dict[str, Slots] = {}
        self.averages: dict[str, mx.array] = {}
        self.counts: dict[str, int] = {}
        self._move_all = mx.compile(self._move) if compiled else self._move

    def step(
        self, masters: Mapping[str, mx.array], gradients: Mapping[str, mx.array], *, lr: float
    ) -> dict[str, mx.array]:
        """Return the masters after a step; update the optimizer state."""
        numbers: dict[tuple[float, float, int], mx.array] = {}
        coefficients: dict[str, mx.array] = {}
        for name, master in masters.items():
            if name not in self.slots:
                self.slots[name] = self.rule.start(master)
            self.counts[name] = self.counts.get(name, 0) + 1
            rate = lr * (self.b_ratio if name.endswith("lora_B.weight") else 1.0)
            key = (rate, self.weight_decay if master.ndim >= 2 else 0.0, self.counts[name])
            if key not in numbers:
                numbers[key] = mx.array(list(self.rule.numbers(*key)), dtype=mx.float32)
            coefficients[name] = numbers[key]
        moved, self.slots = self._move_all(dict(masters), dict(gradients), self.slots, coefficients)
        if self.ema_decay:
            share = 1.0 - self.ema_decay
            self.averages = {
                name: _towards(self.averages.get(name, array), array, share) for name, array in moved.items()
            }
        return moved

    def export_moments(self) -> Moments:
        """Return the optimizer state as host arrays: slot -> weight -> array."""
        found: dict[str, dict[str, Array]] = {}
        for name, slots in self.slots.items():
            for slot, array in slots.items():
                found.setdefault(slot, {})[name] = np.array(array, copy=True)
            if self.rule.counts:
                found.setdefault(COUNT, {})[name] = np.array(self.counts[name], dtype=np.float32)
        if self.averages:
            found[SLOT] = {name: np.array(array, copy=True) for name, array in self.averages.items()}
        return found

    def import_moments(self, masters: Mapping[str, mx.array], moments: Moments) -> None:
        """Replace the optimizer state; raise if it belongs to a different optimizer."""
        self.slots, self.counts, self.averages = {}, {}, {}
        for name, master in masters.items():
            expected = {slot: array.shape for slot, array in self.rule.start(master).items()}
            stored = {slot: arrays[name] for slot, arrays in moments.items() if name in arrays}
            count, average = stored.pop(COUNT, None), stored.pop(SLOT, None)
            if average is not None:
                self.averages[name] = mx.array(np.asarray(average, np.float32))
            if not stored and count is None:
                continue
            if {slot: array.shape for slot, array in stored.items()} != expected:
                raise UserError(
                    "The optimizer state does not match.",
                    why=f"for {name} it contains {', '.join(sorted(stored)) or 'nothing'}, and this optimizer has "
                    f"{', '.join(sorted(expected)) or 'nothing'}.",
                    do="continue with the --optimizer of the original run",
                )
            self.slots[name] = {
                slot: mx.array(np.asarray(array, np.float32)) for slot, array in stored.items()
            }
            self.counts[name] = int(count) if count is not None else 0

    def _move(
        self,
        masters: dict[str, mx.array],
        gradients: dict[str, mx.array],
        slots: dict[str, Slots],
        numbers: dict[str, mx.array],
    ) -> tuple[dict[str, mx.array], dict[str, Slots]]:
        moved, kept = {}, {}
        for name, master in masters.items():
            moved[name], kept[name] = self.rule.move(master, gradients[name], slots[name], numbers[name])
        return moved, kept


def _zeros(*names: str) -> Callable[[mx.array], Slots]:
    return lambda weight: {name: mx.zeros_like(weight) for name in names}


def _start_adafactor(weight: mx.array) -> Slots:
    if weight.ndim < 2:
        return {"variance": mx.zeros_like(weight)}
    *front, rows, columns = weight.shape
    return {"row_var": mx.zeros((*front, rows, 1)), "col_var": mx.zeros((*front, 1, columns))}


def _sgd(weight: mx.array, gradient: mx.array, slots: Slots, numbers: mx.array) -> tuple[mx.array, Slots]:
    return weight - numbers[1] * (gradient + numbers[0] * weight), {}


def _lion(weight: mx.array, gradient: mx.array, slots: Slots, numbers: mx.array) -> tuple[mx.array, Slots]:
    now, kept = (mx.array(1 - beta) for beta in LION_BETAS)
    sign = mx.sign(_towards(slots["first_moment"], gradient, now))
    moved = weight * numbers[0] - numbers[1] * sign
    return moved, {"first_moment": _towards(slots["first_moment"], gradient, kept)}


def _adadelta(
    weight: mx.array, gradient: mx.array, slots: Slots, numbers: mx.array
) -> tuple[mx.array, Slots]:
    gradient = gradient + numbers[0] * weight
    rho, small = _ADADELTA_RHO, _ADADELTA_EPSILON
    square = rho * slots["square_avg"] + (1 - rho) * gradient * gradient
    delta = mx.sqrt(slots["acc_delta"] + small) / mx.sqrt(square + small) * gradient
    kept = {"square_avg": square, "acc_delta": rho * slots["acc_delta"] + (1 - rho) * delta * delta}
    return weight - numbers[1] * delta, kept


def _adafactor(
    weight: mx.array, gradient: mx.array, slots: Slots, numbers: mx.array
) -> tuple[mx.array, Slots]:
    new, rate = numbers[2], numbers[1]
    size = mx.maximum(mx.sqrt(mx.mean(weight * weight)), _ADAFACTOR_FLOOR)
    square = gradient * gradient
    if weight.ndim < 2:
        kept = {"variance": _towards(slots["variance"], square, new)}
        estimate = kept["variance"]
    else:
        rows = _towards(slots["row_var"], square.mean(axis=-1, keepdims=True), new)
        columns = _towards(slots["col_var"], square.mean(axis=-2, keepdims=True), new)
        kept = {"row_var": rows, "col_var": columns}
        estimate = (rows @ columns) / mx.maximum(rows.mean(axis=-2, keepdims=True), _FP32_EPSILON)
    update = gradient * mx.rsqrt(mx.maximum(estimate, _FP32_EPSILON**2))
    large = mx.maximum(mx.sqrt(mx.mean(update * update)), 1.0)
    return weight * numbers[0] - size * rate / large * update, kept


def _towards(start: mx.array, end: mx.array, share: mx.array | float) -> mx.array:
    return start + share * (end - start)


def _rules(adam: Adam) -> Mapping[str, Rule]:
    return {
        "adamw": Rule(
            start=_zeros("first_moment", "second_moment"),
            numbers=lambda lr, decay, count: (1 - lr * decay, *adam.rates(lr, count)),
            move=adam.decoupled,
        ),
        "adam": Rule(
            start=_zeros("first_moment", "second_moment"),
            numbers=lambda lr, decay, count: (decay, *adam.rates(lr, count)),
            move=adam.coupled,
        ),
        "lion": Rule(
            start=_zeros("first_moment"),
            numbers=lambda lr, decay, count: (1 - lr * decay, lr),
            move=_lion,
            counts=False,
        ),
        "sgd": Rule(start=_zeros(), numbers=lambda lr, decay, count: (decay, lr), move=_sgd, counts=False),
        "adadelta": Rule(
            start=_zeros("square_avg", "acc_delta"),
            numbers=lambda lr, decay, count: (decay, lr),
            move=_adadelta,
        ),
        "adafactor": Rule(
            start=_start_adafactor,
            numbers=lambda lr, decay, count: (
                1 - lr * decay,
                min(lr, 1 / math.sqrt(count)),
                count**_ADAFACTOR_DECAY,
            ),
            move=_adafactor,
        ),
    }


class Masters:
    """The trained weights in fp32, by canonical name; `published` has them in the dtype of the model."""

    def __init__(self, model: Any | None) -> None:
        self.model = model
        found = tree_flatten(model.trainable_parameters()) if model is not None else []
        self.published: dict[str, mx.array] = {canonical_name(name): array for name, array in found}
        self.arrays = {name: array.astype(mx.float32) for name, array in self.published.items()}

    def replace(self, arrays: Mapping[str, mx.array]) -> None:
        """Replace the masters and write them into the model."""
        self.arrays = {name: arrays[name] for name in self.arrays}
        self.published = {
            name: array.astype(self.published[name].dtype) for name, array in self.arrays.items()
        }
        put(self.model, self.published)


def put(model: Any, arrays: Mapping[str, mx.array]) -> None:
    """Write arrays into a model, by canonical name."""
    model.update(tree_unflatten([(model_path(name), array) for name, array in arrays.items()]))
