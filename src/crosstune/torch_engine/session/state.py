"""Export and import weights, optimizer moments and random state as host arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from crosstune.core.protocols import Array, SessionState, StatePart
from crosstune.core.weights import check_fit
from crosstune.torch_engine.session.optimizer import Masters
from crosstune.torch_engine.sharding.local_shard import Part, part_of, whole

# torch's name of a slot -> the engine-independent name.
_CANONICAL = {"exp_avg": "first_moment", "exp_avg_sq": "second_moment"}
_TORCH_NAMES = {canonical: name for name, canonical in _CANONICAL.items()}

Moments = Mapping[str, Mapping[str, Array]]


def to_host(tensor: torch.Tensor, *, copy: bool = True) -> Array:
    """Return a tensor as a numpy array, bfloat16 as fp32. Without `copy`, a host tensor shares memory with the session."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    array: Array = tensor.detach().to("cpu", copy=copy).contiguous().numpy()
    return array


def export_weights(masters: Masters, *, copy: bool = True) -> dict[str, Array]:
    """Return the whole masters. A collective call if they are sharded."""
    return {
        name: to_host(whole(master, of=masters.parameters[name]), copy=copy)
        for name, master in masters.masters.items()
    }


def export_moments(
    optimizer: torch.optim.Optimizer,
    masters: Mapping[str, torch.Tensor],
    *,
    parameters: Mapping[str, torch.Tensor] | None = None,
    copy: bool = True,
) -> Moments:
    """Return the moments of the masters; given sharded `parameters`, gather them in a collective call."""
    slots: dict[str, dict[str, Array]] = {}
    for name, master in masters.items():
        for slot, value in optimizer.state.get(master, {}).items():
            if isinstance(value, torch.Tensor):
                if parameters is not None and value.shape == master.shape:
                    value = whole(value, of=parameters[name])
                value = to_host(value, copy=copy)
            slots.setdefault(_CANONICAL.get(slot, slot), {})[name] = np.asarray(value)
    return slots


def export_part(
    optimizer: torch.optim.Optimizer, masters: Masters, part: StatePart, *, device: torch.device
) -> SessionState:
    """Return this rank's rows of the state, without copies. Replicated arrays are in the first part only."""
    held = {
        name: master
        for name, master in masters.masters.items()
        if part.number == 0 or part_of(masters.parameters[name]) is not None
    }
    moments = export_moments(optimizer, held, copy=False)
    if part.number:  # scalars, such as the step count, are in the first part
        moments = {slot: {n: a for n, a in arrays.items() if a.ndim} for slot, arrays in moments.items()}
    return SessionState(
        weights={name: to_host(master, copy=False) for name, master in held.items()},
        moments=moments,
        random=export_random(device),
        part=part,
    )


def import_moments(
    optimizer: torch.optim.Optimizer,
    masters: Mapping[str, torch.Tensor],
    moments: Moments,
    *,
    parameters: Mapping[str, torch.Tensor],
) -> None:
    """Load moments through the optimizer's state dict, so that they move to the right device. For sharded `parameters`,
    load only the rows of this rank."""
    names = {id(master): name for name, master in masters.items()}
    parts = {name: part_of(parameter) for name, parameter in parameters.items()}
    plain = optimizer.state_dict()
    state: dict[int, dict[str, Any]] = {}
    for group, described in zip(optimizer.param_groups, plain["param_groups"], strict=True):
        for tensor, number in zip(group["params"], described["params"], strict=True):
            name = names[id(tensor)]
            found = {
                _TORCH_NAMES.get(slot, slot): _rows(arrays[name], parts[name])
                for slot, arrays in moments.items()
                if name in arrays
            }
            if found:
                state[number] = {slot: torch.from_numpy(np.array(array)) for slot, array in found.items()}
                if "step" in found and not type(optimizer).__module__.startswith("torch."):
                    state[number]["step"] = int(found["step"])  # bitsandbytes counts in Python
    optimizer.load_state_dict({"state": state, "param_groups": plain["param_groups"]})


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
    """Restore the random state on exit, so that draws in the `with` block do not change the run."""
    before = export_random(device)
    try:
        yield
    finally:
        import_random(device, before)


def import_weights(masters: Masters, weights: Mapping[str, Array]) -> None:
    """Copy whole trained weights into the masters; raise unless names and shapes match."""
    check_fit(masters.shapes(), weights)
    for name, parameter in masters.parameters.items():
        copy_rows(weights[name], masters.masters[name], of=parameter)


@torch.no_grad()
def copy_rows(array: Array, local: torch.Tensor, *, of: torch.Tensor) -> None:
    """Copy the rows of a whole array that belong to this rank."""
    local.copy_(torch.from_numpy(np.array(_rows(array, part_of(of)))))


def _rows(array: Array, part: Part | None) -> Array:
    return array if part is None or array.shape != part.shape else array[part.rows]
