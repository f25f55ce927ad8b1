"""Export and import optimizer moments, random state and weights as host arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from crosstune.core.check_shapes import check_fit
from crosstune.core.protocols import Array

# torch's name of a slot -> the engine-independent name.
_CANONICAL = {"exp_avg": "first_moment", "exp_avg_sq": "second_moment"}
_TORCH_NAMES = {canonical: name for name, canonical in _CANONICAL.items()}

Moments = Mapping[str, Mapping[str, Array]]


def to_host(tensor: torch.Tensor, *, copy: bool = True) -> Array:
    """Return a tensor as a numpy array. Without `copy`, a host tensor shares memory with the session.

    bfloat16 has no numpy dtype and is converted to fp32, which is exact.
    """
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    array: Array = tensor.detach().to("cpu", copy=copy).contiguous().numpy()
    return array


def export_moments(
    optimizer: torch.optim.Optimizer, masters: Mapping[str, torch.Tensor], *, copy: bool = True
) -> Moments:
    slots: dict[str, dict[str, Array]] = {}
    for name, master in masters.items():
        for slot, value in optimizer.state.get(master, {}).items():
            array = to_host(value, copy=copy) if isinstance(value, torch.Tensor) else np.asarray(value)
            slots.setdefault(_CANONICAL.get(slot, slot), {})[name] = array
    return slots


def import_moments(
    optimizer: torch.optim.Optimizer, masters: Mapping[str, torch.Tensor], moments: Moments
) -> None:
    """Load moments into the optimizer through its own state dict, which moves them to the right device."""
    names = {id(master): name for name, master in masters.items()}
    plain = optimizer.state_dict()
    state: dict[int, dict[str, Any]] = {}
    for group, described in zip(optimizer.param_groups, plain["param_groups"], strict=True):
        for tensor, number in zip(group["params"], described["params"], strict=True):
            name = names[id(tensor)]
            found = {
                _TORCH_NAMES.get(slot, slot): _value(_TORCH_NAMES.get(slot, slot), arrays[name], optimizer)
                for slot, arrays in moments.items()
                if name in arrays
            }
            if found:
                state[number] = found
    optimizer.load_state_dict({"state": state, "param_groups": plain["param_groups"]})


def _value(slot: str, array: Array, optimizer: torch.optim.Optimizer) -> Any:
    counts_in_python = not type(optimizer).__module__.startswith("torch.")
    if slot == "step" and counts_in_python:
        return int(array)
    return torch.from_numpy(np.array(array))


def export_random(device: torch.device) -> dict[str, Array]:
    states = {"torch.cpu": to_host(torch.get_rng_state())}
    if device.type != "cpu":
        states[f"torch.{device.type}"] = to_host(torch.get_device_module(device).get_rng_state())
    return states


def import_random(device: torch.device, random: Mapping[str, Array]) -> None:
    if "torch.cpu" in random:
        torch.set_rng_state(torch.from_numpy(np.array(random["torch.cpu"])))
    key = f"torch.{device.type}"
    if device.type != "cpu" and key in random:
        torch.get_device_module(device).set_rng_state(torch.from_numpy(np.array(random[key])))


@contextlib.contextmanager
def separate_random(device: torch.device) -> Iterator[None]:
    """Put the random state back afterwards, so that what is drawn inside leaves the training's numbers alone."""
    before = export_random(device)
    try:
        yield
    finally:
        import_random(device, before)


def import_weights(masters: Mapping[str, torch.Tensor], weights: Mapping[str, Array]) -> None:
    """Copy trained weights into the masters; raise unless names and shapes match."""
    check_fit({name: tuple(master.shape) for name, master in masters.items()}, weights)
    with torch.no_grad():
        for name, master in masters.items():
            master.copy_(torch.from_numpy(np.array(weights[name])))
