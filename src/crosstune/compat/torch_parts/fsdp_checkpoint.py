"""Save a model with its optimizer as one safetensors file, and load it with any number of processes.

The tensors are `model/<name>`, `optimizer/<slot>/<name>` and `random/<rank>/<name>`. The metadata contains the saved
values, the optimizer's settings and a hash over everything.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from crosstune.compat.torch_parts.replace_layers import QuantizedLinear
from crosstune.core.errors import UserError
from crosstune.files.atomic_files import staged_file
from crosstune.files.json_files import parse_json
from crosstune.files.plain_files import UnreadableFile, open_plain
from crosstune.files.safetensors_header import read_header
from crosstune.torch_engine.session.state import export_random, import_random
from crosstune.torch_engine.sharding.local_shard import is_sharded, local_part, part_of, whole

FORMAT = "crosstune-model-1"
_FACTS = {"metadata", "optimizer", "world_size", "backend", "precision", "quantization"}
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
_EXTRA = "_extra_state"


def save_model(
    model: nn.Module, path: Path, *, optimizer: torch.optim.Optimizer | None, metadata: Mapping[str, Any]
) -> Path:
    """Write a checkpoint atomically. A collective call; rank 0 writes."""
    for name, value in metadata.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"'{name}' cannot be saved in a checkpoint.",
                why=f"{error}.",
                do="pass a number, a string, a list or a dict",
            ) from error
    device = _device(model)
    tensors = _gather({f"model/{name}": tensor for name, tensor in model.state_dict().items()})
    settings = None
    if optimizer is not None:
        names = _parameter_names(optimizer, model)
        tensors |= _gather(_slots(optimizer, names))
        settings = {
            "kind": type(optimizer).__name__,
            "groups": [
                {"names": [names[p] for p in group["params"]], "settings": _plain_settings(group)}
                for group in optimizer.param_groups
            ],
        }
    random: list[Any] = [export_random(device)] * _world_size()
    if _world_size() > 1:
        dist.all_gather_object(random, random[0])
    for rank, states in enumerate(random):
        tensors |= {f"random/{rank}/{name}": torch.from_numpy(array) for name, array in states.items()}
    specs = [module.recipe.spec for module in model.modules() if isinstance(module, QuantizedLinear)]
    facts = {
        "metadata": dict(metadata),
        "optimizer": settings,
        "world_size": _world_size(),
        "backend": device.type,
        "precision": _most_common(_DTYPES.get(p.dtype) for p in model.parameters()) or "fp32",
        "quantization": _most_common(spec.name() for spec in specs if spec is not None),
    }
    _write_on_rank_0(path, tensors, facts)
    return path


def load_model(
    model: nn.Module, path: Path, *, optimizer: torch.optim.Optimizer | None, strict: bool
) -> dict[str, Any]:
    """Load a checkpoint into a model and an optimizer; return the saved values and how the model was trained.

    Each process reads its own rows. Nothing changes unless everything matches. Without `strict`, weights that only one
    side has are skipped and listed in missing_keys and unexpected_keys.
    """
    with _open(path) as (stored, facts):
        own, saved = model.state_dict(), _shapes(stored, "model/")
        missing, unexpected = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
        _check_match(path, own, saved, missing + unexpected if strict else [])
        extra = {name: stored.get_tensor(f"model/{name}") for name in saved if name.endswith(_EXTRA)}
        model.load_state_dict(extra, strict=False)  # quantized layers compare it with their quantization
        if optimizer is not None and facts["optimizer"] is not None:
            _import_optimizer(optimizer, _parameter_names(optimizer, model), stored, facts["optimizer"])
        elif optimizer is not None:
            if strict:
                raise UserError(
                    f"{path} has no optimizer state.",
                    why="it was saved without optimizer=.",
                    do="load it without optimizer=, or with strict=False to start with a new one",
                )
            missing.append("optimizer")
        with torch.no_grad():
            for name in own.keys() & saved.keys() - extra.keys():
                local_part(own[name]).copy_(_read_rows(stored, f"model/{name}", own[name]))
        if facts["world_size"] == _world_size():
            prefix = f"random/{_rank()}/"
            states = {name: stored.get_tensor(prefix + name).numpy() for name in _shapes(stored, prefix)}
            import_random(_device(model), states)
    described = {name: facts[name] for name in ("backend", "precision", "quantization")}
    return described | {"missing_keys": missing, "unexpected_keys": unexpected} | dict(facts["metadata"])


def _gather(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Gather tensors one at a time; return them on the host of rank 0. Collective: every rank must call it."""
    found: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise UserError(f"'{name}' cannot be saved in a checkpoint.", why="it is not a tensor.")
        tensor = whole(value)
        if _rank() == 0:
            found[name] = tensor.to("cpu", copy=True).contiguous()
    return found


def _parameter_names(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[Any, str]:
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not all(id(parameter) in named for parameter in own):
        raise UserError(
            "The optimizer has parameters that the model lacks.",
            why="sharding replaces the parameters of a model.",
            do="make the optimizer after wrapping: AdamW(fsdp_model.parameters())",
        )
    return {parameter: named[id(parameter)] for parameter in own}


def _slots(optimizer: torch.optim.Optimizer, names: Mapping[Any, str]) -> dict[str, torch.Tensor]:
    """Return the optimizer state by its names in the file."""
    found: dict[str, torch.Tensor] = {}
    for parameter, name in names.items():
        for slot, value in optimizer.state.get(parameter, {}).items():
            tensor = torch.as_tensor(value)
            if is_sharded(tensor) and tensor.shape != parameter.shape:
                raise UserError(
                    f"The state of {type(optimizer).__name__} cannot be saved.",
                    why=f"'{slot}' of {name} is sharded differently from its parameter.",
                    do="save without optimizer=, or use an optimizer such as AdamW",
                )
            found[f"optimizer/{slot}/{name}"] = tensor
    return found


def _plain_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group that JSON can store; a learning rate in a tensor becomes a number."""
    values = {name: v.item() if isinstance(v, torch.Tensor) else v for name, v in group.items()}
    plain = (bool, int, float, str, list, tuple, type(None))
    return {name: v for name, v in values.items() if name != "params" and isinstance(v, plain)}


def _import_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[Any, str], stored: Any, saved: Mapping[str, Any]
) -> None:
    """Restore the state and settings of an optimizer, sharded like its parameters."""
    own = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    if saved["kind"] != type(optimizer).__name__ or own != [group["names"] for group in saved["groups"]]:
        raise UserError(
            "The checkpoint's optimizer state does not match this optimizer.",
            why=f"it was saved by {saved['kind']} for {sum(len(g['names']) for g in saved['groups'])} parameters; this "
            f"{type(optimizer).__name__} has {len(names)}.",
            do="make the same optimizer over the same parameters, or load without optimizer=",
        )
    slots: dict[str, list[str]] = {}
    for key in _shapes(stored, "optimizer/"):
        slot, _, name = key.partition("/")
        slots.setdefault(name, []).append(slot)
    states: dict[Any, dict[str, torch.Tensor]] = {}
    for group in optimizer.param_groups:
        on_device = group.get("capturable") or group.get("fused")  # otherwise torch counts steps on the host
        for parameter in group["params"]:
            for slot in slots.get(names[parameter], ()):
                value = _read_slot(stored, f"optimizer/{slot}/{names[parameter]}", parameter)
                on_host = slot == "step" and not on_device
                states.setdefault(parameter, {})[slot] = value.to("cpu") if on_host else value
    optimizer.state.clear()
    optimizer.state.update(states)
    for group, described in zip(optimizer.param_groups, saved["groups"], strict=True):
        for name, value in described["settings"].items():
            if isinstance(group.get(name), torch.Tensor):
                group[name].fill_(value)
            else:
                group[name] = tuple(value) if isinstance(value, list) else value


def _read_slot(stored: Any, key: str, parameter: Any) -> torch.Tensor:
    if not is_sharded(parameter) or tuple(stored.get_slice(key).get_shape()) != tuple(parameter.shape):
        return stored.get_tensor(key).to(parameter.device)
    rows = _read_rows(stored, key, parameter)
    value = torch.zeros_like(parameter, dtype=rows.dtype, requires_grad=False)
    local_part(value).copy_(rows)
    return value


def _read_rows(stored: Any, key: str, like: torch.Tensor) -> torch.Tensor:
    """Read a tensor, or only the rows that `like` has on this rank."""
    part = part_of(like)
    return stored.get_tensor(key) if part is None else stored.get_slice(key)[part.rows]


def _shapes(stored: Any, prefix: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors with a prefix, by name without it."""
    names = [name.removeprefix(prefix) for name in stored.keys() if name.startswith(prefix)]  # noqa: SIM118
    return {name: tuple(stored.get_slice(prefix + name).get_shape()) for name in names}


def _check_match(
    path: Path, own: Mapping[str, Any], saved: Mapping[str, tuple[int, ...]], one_sided: list[str]
) -> None:
    shared = sorted(own.keys() & saved.keys())
    problems = [
        f"{name} has shape {saved[name]}, in the model {tuple(own[name].shape)}"
        for name in shared
        if not name.endswith(_EXTRA) and tuple(own[name].shape) != saved[name]
    ]
    problems += [f"{name} is only in the {'model' if name in own else 'checkpoint'}" for name in one_sided]
    if problems or not shared:
        raise UserError(
            f"{path} is not a checkpoint of this model.",
            why=f"{len(problems)} differences, such as: {problems[0]}." if problems else "no weight matches.",
            do="load it into the model that it was saved from; strict=False skips weights that one side lacks",
        )


def _write_on_rank_0(path: Path, tensors: dict[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
    """Write the file; if that fails, raise on every rank instead of leaving the others waiting."""
    problem: list[str | None] = [None]
    if _rank() == 0:
        text = json.dumps(facts)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with staged_file(path) as staged:
                digest = _digest(tensors, tensors.__getitem__, text)
                save_file(tensors, staged, metadata={"format": FORMAT, "facts": text, "sha256": digest})
        except (OSError, UserError) as error:
            problem = [str(error)]
    if _world_size() > 1:
        dist.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise UserError(f"The checkpoint {path} could not be written.", why=problem[0])


@contextmanager
def _open(path: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Open a checkpoint; raise UserError unless it is complete, unchanged and written by save_checkpoint."""
    _reject_pickle(path)
    read_header(path)
    with safe_open(path, framework="pt") as stored:
        described = stored.metadata() or {}
        if described.get("format") != FORMAT:
            raise UnreadableFile(
                path,
                "it is a safetensors file that save_checkpoint did not write",
                do="load its weights with safetensors.torch.load_file and model.load_state_dict",
            )
        text = described.get("facts", "")
        intact = _digest(stored.keys(), stored.get_tensor, text) == described.get("sha256")
        facts = parse_json(text.encode(), foreign=True) if intact else None  # a loss may be infinite
        if not isinstance(facts, dict) or not facts.keys() >= _FACTS:
            raise UnreadableFile(
                path, "its content does not match its hash: it is damaged", do="use a different checkpoint"
            )
        yield stored, facts


def _digest(names: Iterable[str], read: Callable[[str], torch.Tensor], text: str) -> str:
    sha = hashlib.sha256(text.encode())
    for name in sorted(names):
        tensor = read(name).contiguous()
        sha.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        sha.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def _reject_pickle(path: Path) -> None:
    """Reject files of torch.save: a pickle can run code."""
    with open_plain(path) as file:
        start = file.read(9)
    if start[8:] != b"{":  # the header of safetensors, after its length
        raise UserError(
            f"{path} was written by torch.save, or is damaged.",
            why="a file of torch.save is a pickle and could run code; checkpoints of this class are safetensors.",
            do="read it once yourself with torch.load and weights_only=True, pass its state dict to model.load_state_dict, "
            "and use save_checkpoint; for a model of transformers: crosstune checkpoint import PATH --out runs/old",
        )


def _device(model: nn.Module) -> torch.device:
    parameter = next(model.parameters(), torch.empty(0))
    part = part_of(parameter)
    return parameter.device if part is None else part.device


def _most_common(names: Iterable[str | None]) -> str | None:
    found = Counter(name for name in names if name)
    return found.most_common(1)[0][0] if found else None


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
