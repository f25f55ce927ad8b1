"""The measured steps that the prediction of time and memory is checked with; the plan prints its own error on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crosstune.core.devices import find_speed
from crosstune.core.memory import GIB, step_bytes
from crosstune.core.step_time import Cluster, step_time
from crosstune.core.training_step import Step
from crosstune.models.known_models import known_shape


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A training that was run on one device."""

    device: str
    model: str
    step: dict[str, Any]
    tokens_per_s: float
    row: float
    """Mean tokens of a row."""
    peak_gib: float | None = None
    calibrates: bool = False
    """True if a constant of the model was chosen so that this one is met."""


_LLAMA: dict[str, Any] = {"model": "llama-2-7b", "device": "NVIDIA H200", "row": 2048.0}
_SMOL: dict[str, Any] = {"model": "smollm2-135m", "device": "NVIDIA H200", "row": 66.0}
_FULL_ROWS: dict[str, Any] = {"batch": 4, "context": 2048}
_SHORT: dict[str, Any] = {"batch": 8, "context": 80}
_NF4: dict[str, Any] = {"quantizer": "bnb", "n_bits": 4}
_FP8: dict[str, Any] = {"quantizer": "fp8", "n_bits": 16, "fp8_products": True}
_FAST: dict[str, Any] = {**_FULL_ROWS, "fast": True}
MEASUREMENTS = (
    Measurement(step=_FULL_ROWS, tokens_per_s=13289, calibrates=True, **_LLAMA),
    Measurement(step={**_FULL_ROWS, **_NF4}, tokens_per_s=13014, **_LLAMA),
    Measurement(step={**_FULL_ROWS, "checkpointing": True}, tokens_per_s=9327, **_LLAMA),
    Measurement(
        step={**_FULL_ROWS, **_NF4, "checkpointing": True}, tokens_per_s=9164, peak_gib=7.8, **_LLAMA
    ),
    Measurement(step=_FAST, tokens_per_s=19837, peak_gib=41.2, calibrates=True, **_LLAMA),
    Measurement(step={**_FAST, **_NF4}, tokens_per_s=18871, **_LLAMA),
    Measurement(step={**_FAST, **_FP8}, tokens_per_s=26627, peak_gib=41.4, **_LLAMA),
    Measurement(step={**_FAST, "checkpointing": True}, tokens_per_s=13510, peak_gib=19.0, **_LLAMA),
    Measurement(
        step={**_SHORT, "method": "full"}, tokens_per_s=4787, peak_gib=2.89, calibrates=True, **_SMOL
    ),
    Measurement(step=_SHORT, tokens_per_s=3345, calibrates=True, **_SMOL),
    Measurement(step={**_SHORT, **_NF4}, tokens_per_s=2296, calibrates=True, **_SMOL),
)


def predicted_tokens_per_s(measurement: Measurement) -> float:
    shape, speed = known_shape(measurement.model), find_speed(measurement.device)
    assert shape is not None and speed is not None
    step = Step(**measurement.step)
    return step_time(shape, step, speed, cluster=Cluster(), tokens_per_row=measurement.row).tokens_per_s


def predicted_gib(measurement: Measurement) -> float:
    shape = known_shape(measurement.model)
    assert shape is not None
    return step_bytes(shape, Step(**measurement.step)) / GIB


def largest_error() -> tuple[float, int]:
    """Return the largest relative error of the speed over the measurements that calibrate nothing, and their number."""
    errors = [
        abs(predicted_tokens_per_s(found) / found.tokens_per_s - 1)
        for found in MEASUREMENTS
        if not found.calibrates
    ]
    return max(errors), len(errors)
