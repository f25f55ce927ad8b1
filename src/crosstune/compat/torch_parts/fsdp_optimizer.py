"""Export the state of an optimizer over sharded parameters as whole tensors, and divide it again when it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from crosstune.core.errors import UserError
from crosstune.torch_engine.sharding.parts import is_sharded, local_part, part_of, whole

Parameters = Mapping[str, torch.Tensor]


def export_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Parameters, *, keep: bool
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the state as tensors by `slot/name`, and the settings of each group as plain values. Collective."""
    names = _names(optimizer, parameters)
    tensors: dict[str, torch.Tensor] = {}
    for parameter, name in names.items():
        for slot, value in optimizer.state.get(parameter, {}).items():
            tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
            if is_sharded(tensor) and tensor.shape != parameter.shape:
                raise UserError(
                    f"The state of {type(optimizer).__name__} cannot be saved.",
                    why=f"'{slot}' of {name} is sharded differently than its parameter.",
                    do="save without optimizer=, or use an optimizer such as AdamW",
                )
            gathered = whole(tensor)
            if keep:
                tensors[f"{slot}/{name}"] = gathered.detach().to("cpu", copy=True).contiguous()
    groups = [
        {"names": [names[p] for p in group["params"]], "settings": _settings(group)}
        for group in optimizer.param_groups
    ]
    return tensors, {"kind": type(optimizer).__name__, "groups": groups}


def import_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Parameters, stored: Any, saved: Mapping[str, Any]
) -> None:
    """Give an optimizer the saved state and settings, divided as its parameters are here."""
    names = _names(optimizer, parameters)
    own = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    if saved["kind"] != type(optimizer).__name__ or own != [group["names"] for group in saved["groups"]]:
        raise UserError(
            "The checkpoint's optimizer state does not fit this optimizer.",
            why=f"it was saved by {saved['kind']} over {sum(len(g['names']) for g in saved['groups'])} parameters, here "
            f"{type(optimizer).__name__} has {len(names)}.",
            do="make the same optimizer over the same parameters, or load without optimizer=",
        )
    slots: dict[str, list[str]] = {}
    for key in stored.names("optimizer/"):
        slot, _, name = key.partition("/")
        slots.setdefault(name, []).append(slot)
    states = {
        parameter: {
            slot: _read(stored, slot, names[parameter], parameter, group)
            for slot in slots.get(names[parameter], ())
        }
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    optimizer.state.clear()
    optimizer.state.update({parameter: state for parameter, state in states.items() if state})
    for group, described in zip(optimizer.param_groups, saved["groups"], strict=True):
        _restore(group, described["settings"])


def _names(optimizer: torch.optim.Optimizer, parameters: Parameters) -> dict[Any, str]:
    named = {id(parameter): name for name, parameter in parameters.items()}
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not all(id(parameter) in named for parameter in own):
        raise UserError(
            "The optimizer has parameters that the model has not.",
            why="sharding replaces the parameters of a model.",
            do="make the optimizer after wrapping: AdamW(fsdp_model.parameters())",
        )
    return {parameter: named[id(parameter)] for parameter in own}


def _read(stored: Any, slot: str, name: str, parameter: Any, group: Mapping[str, Any]) -> torch.Tensor:
    key, part = f"optimizer/{slot}/{name}", part_of(parameter)
    if slot == "step":  # torch counts on the host, unless the whole step runs on the device
        on_device = group.get("capturable") or group.get("fused")
        return stored.read(key).to(parameter.device if on_device else "cpu")
    if part is None or stored.shape(key) != tuple(parameter.shape):
        return stored.read(key).to(parameter.device)
    rows = stored.read(key, part.rows)
    value = torch.zeros_like(parameter, dtype=rows.dtype, requires_grad=False)
    local_part(value).copy_(rows)
    return value


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group that are plain values; a rate in a tensor is saved as a number."""
    values = {name: value for name, value in group.items() if name != "params"}
    values = {name: v.item() if isinstance(v, torch.Tensor) else v for name, v in values.items()}
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, (bool, int, float, str, list, tuple, type(None)))
    }


def _restore(group: dict[str, Any], settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        if isinstance(group.get(name), torch.Tensor):
            group[name].fill_(value)
        else:
            group[name] = tuple(value) if isinstance(value, list) else value
