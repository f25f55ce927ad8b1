"""Save a model with its optimizer in one safetensors file, whole, and load it at any number of processes.

The tensors of the file are `model/<name>`, `optimizer/<slot>/<name>` and `random/<rank>/<name>`. Its metadata has the
values that the program saved, the settings of the optimizer, and a hash over everything.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from crosstune.compat.torch_parts import fsdp_file as files
from crosstune.compat.torch_parts.replace_layers import QuantizedLinear
from crosstune.core.errors import UserError
from crosstune.torch_engine.quantized import StoredWeight
from crosstune.torch_engine.session.state import export_random, import_random
from crosstune.torch_engine.sharding.local_shard import is_sharded, local_part, part_of, whole

Parameters = Mapping[str, torch.Tensor]


_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
_EXTRA = "_extra_state"


def save_file(
    model: nn.Module,
    path: Path,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint atomically. Collective: every process calls it, and rank 0 writes."""
    values = dict(metadata or {})
    _check_plain(values)
    is_writer = _rank() == 0
    tensors = _export_model(model, keep=is_writer)
    settings: dict[str, Any] | None = None
    if optimizer is not None:
        moments, settings = _export_optimizer(optimizer, dict(model.named_parameters()), keep=is_writer)
        tensors |= {f"optimizer/{name}": tensor for name, tensor in moments.items()}
    for rank, states in enumerate(_gather_random(_device(model))):
        tensors |= {f"random/{rank}/{name}": torch.from_numpy(array) for name, array in states.items()}
    facts = {
        "metadata": values,
        "optimizer": settings,
        "world_size": _world_size(),
        "backend": _device(model).type,
        "precision": _precision(model),
        "quantization": _quantization(model),
    }
    _write_on_first(lambda: files.write(path, tensors, facts), path)
    return path


def load_file(
    model: nn.Module,
    path: Path,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    strict: bool = True,
) -> dict[str, Any]:
    """Load a checkpoint into a model and an optimizer; return the saved values and how the model was trained.

    Each process reads the rows that it holds. Nothing is changed unless everything fits. Without `strict`, weights that
    only one side has are skipped and listed in missing_keys and unexpected_keys.
    """
    with files.open_file(path) as stored:
        facts = stored.facts
        own, saved = dict(model.state_dict()), stored.names("model/")
        missing, unexpected = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
        _check_fit(path, own, saved, missing + unexpected if strict else [])
        _check_quantization(model, stored)
        if optimizer is not None and facts["optimizer"] is None:
            if strict:
                raise UserError(
                    f"{path} has no optimizer state.",
                    why="it was saved without optimizer=.",
                    do="load it without optimizer=, or with strict=False to start with a new one",
                )
            missing.append("optimizer")
        elif optimizer is not None:
            _import_optimizer(optimizer, dict(model.named_parameters()), stored, facts["optimizer"])
        _import_model(model, own, saved, stored)
        _import_random(model, stored, facts)
    described = {name: facts[name] for name in ("backend", "precision", "quantization")}
    return described | {"missing_keys": missing, "unexpected_keys": unexpected} | dict(facts["metadata"])


def _export_optimizer(
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


def _import_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Parameters, stored: Any, saved: Mapping[str, Any]
) -> None:
    """Restore the state and settings of an optimizer, sharded like its parameters."""
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
            "The optimizer has parameters that the model lacks.",
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


def _export_model(model: nn.Module, *, keep: bool) -> dict[str, torch.Tensor]:
    """Return the whole tensors of the model's state on the host, gathering one at a time on the device."""
    found: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            raise UserError(
                f"'{name}' cannot be saved in a checkpoint.",
                why=f"it is a {type(value).__name__}; a checkpoint holds tensors.",
            )
        tensor = whole(value)
        if keep:
            found[f"model/{name}"] = tensor.to("cpu", copy=True).contiguous()
    return found


def _import_model(
    model: nn.Module, own: Mapping[str, torch.Tensor], saved: Mapping[str, tuple[int, ...]], stored: Any
) -> None:
    with torch.no_grad():
        for name, tensor in own.items():
            if name not in saved or name.endswith(_EXTRA):
                continue
            part = part_of(tensor)
            rows = stored.read(f"model/{name}", None if part is None else part.rows)
            local_part(tensor).copy_(rows)
    for name, module in model.named_modules():
        key = f"{name}.{_EXTRA}" if name else _EXTRA
        if key in saved and not isinstance(module, StoredWeight):
            module.set_extra_state(stored.read(f"model/{key}"))


def _check_fit(
    path: Path,
    own: Mapping[str, torch.Tensor],
    saved: Mapping[str, tuple[int, ...]],
    only_one_side: list[str],
) -> None:
    shared = own.keys() & saved.keys()
    others = [n for n in sorted(shared) if not n.endswith(_EXTRA) and tuple(own[n].shape) != saved[n]]
    problems = [f"{n} has shape {saved[n]}, in the model {tuple(own[n].shape)}" for n in others]
    problems += [f"{n} is only in the {'model' if n in own else 'checkpoint'}" for n in only_one_side]
    if not shared:
        problems = ["they share no weight"]
    if problems:
        raise UserError(
            f"{path} is not a checkpoint of this model.",
            why=f"{problems[0]}; {len(problems)} such differences."
            if len(problems) > 1
            else f"{problems[0]}.",
            do="load it into the model that it was saved from; strict=False skips weights that one side lacks"
            if only_one_side
            else "",
        )


def _check_quantization(model: nn.Module, stored: Any) -> None:
    for name, module in model.named_modules():
        key = f"{name}.{_EXTRA}"
        if isinstance(module, StoredWeight) and stored.shape(f"model/{key}") is not None:
            module.check_state({key: stored.read(f"model/{key}")}, f"{name}.")


def _gather_random(device: torch.device) -> list[dict[str, Any]]:
    own = export_random(device)
    if _world_size() == 1:
        return [own]
    parts: list[Any] = [None] * _world_size()
    dist.all_gather_object(parts, own)
    return parts


def _import_random(model: nn.Module, stored: Any, facts: Mapping[str, Any]) -> None:
    """Restore the random state of this rank; with another number of processes there is none to restore."""
    prefix = f"random/{_rank()}/"
    if facts["world_size"] == _world_size():
        states = {name: stored.read(prefix + name).numpy() for name in stored.names(prefix)}
        import_random(_device(model), states)


def _write_on_first(write: Callable[[], None], path: Path) -> None:
    """Write on rank 0; when it fails, raise on every rank instead of leaving the others waiting."""
    problem: list[str | None] = [None]
    error: Exception | None = None
    if _rank() == 0:
        try:
            write()
        except (OSError, UserError) as caught:
            error, problem = caught, [str(caught)]
    if _world_size() > 1:
        dist.broadcast_object_list(problem, src=0)
    if isinstance(error, UserError):
        raise error
    if problem[0] is not None:
        raise UserError(f"The checkpoint {path} could not be written.", why=problem[0]) from error


def _device(model: nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    if parameter is None:
        return torch.device("cpu")
    part = part_of(parameter)
    return parameter.device if part is None else part.device


def _precision(model: nn.Module) -> str:
    dtypes = Counter(_NAMES.get(p.dtype, str(p.dtype)) for p in model.parameters() if p.is_floating_point())
    return dtypes.most_common(1)[0][0] if dtypes else "fp32"


def _quantization(model: nn.Module) -> str | None:
    """Return the most common quantization of the layers, such as `hqq-4bit`."""
    layers = (module for module in model.modules() if isinstance(module, QuantizedLinear))
    names = Counter(layer.recipe.spec.name() for layer in layers if layer.recipe.spec is not None)
    return names.most_common(1)[0][0] if names else None


def _check_plain(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        try:
            json.dumps(value, allow_nan=True)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"'{name}' cannot be saved in a checkpoint.",
                why=f"JSON has no {type(value).__name__}.",
                do="pass a number, a string, a list or a dict",
            ) from error


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
