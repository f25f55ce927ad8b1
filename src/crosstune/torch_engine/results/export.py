"""Read and write adapters and models in the formats of PEFT and transformers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from crosstune.core.protocols import Array, RecordsBase
from crosstune.models.adapter_choice import AdapterSettings
from crosstune.models.adapter_files import changes_to_base, copy_tokenizer, save_adapter
from crosstune.models.adapter_files import load_adapter as read_adapter_files
from crosstune.models.folder import PLAIN_STEM, add_folder_aliases
from crosstune.models.weights import write_shards
from crosstune.process.ranks import Group
from crosstune.torch_engine.loading.adapters import Adapted, AdaptedLinear, name_targets, tied_parameters
from crosstune.torch_engine.session.optimizer import Masters
from crosstune.torch_engine.session.state import copy_rows
from crosstune.torch_engine.sharding.local_shard import local_part, sharded_modules
from crosstune.torch_engine.task import BuildContext, Tensors, TorchTask, WritesModel


def adapter_weights(adapters: Mapping[str, Adapted]) -> dict[str, nn.Parameter]:
    """Return the adapter parameters by canonical name, such as `LAYER.lora_A.weight`."""
    return {
        f"{name}.{part}": p for name, adapter in adapters.items() for part, p in adapter.trained().items()
    }


def saved_weights(model: nn.Module, adapters: Mapping[str, Adapted]) -> dict[str, nn.Parameter]:
    """Return the parameters of an adapted model that are trained in full."""
    own = {id(parameter) for parameter in adapter_weights(adapters).values()}
    return {name: p for name, p in model.named_parameters() if p.requires_grad and id(p) not in own}


def load_adapter(
    folder: Path, model: nn.Module, adapters: Mapping[str, Adapted], *, settings: AdapterSettings
) -> None:
    """Copy the weights of a PEFT adapter folder into the model."""
    parameters = adapter_weights(adapters) | saved_weights(model, adapters)
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    tensors = read_adapter_files(folder, shapes, settings=settings, tied=tied_parameters(model))
    for name, parameter in parameters.items():
        copy_rows(tensors[name], local_part(parameter), of=parameter)


def merged_tensors(model: nn.Module, adapters: Mapping[str, Adapted]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a model one by one, with the adapters of linear layers merged."""
    state = model.state_dict()
    for key in state:
        layer, _, rest = key.rpartition(".base.")
        if layer in adapters:
            adapter = adapters[layer]
            assert isinstance(adapter, AdaptedLinear), "this function does not merge experts"
            merged = adapter.merged().to(adapter.base.weight.dtype) if rest == "weight" else state[key]
            yield f"{layer}.{rest}", merged
        elif key.rpartition(".")[0] not in adapters:  # not A, B or the magnitudes
            yield key, state[key]


def save_model(
    folder: Path,
    config: Any,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    base: Path,
    stem: str = PLAIN_STEM,
) -> None:
    """Write a complete model folder that transformers can load."""
    save_tensors(folder, tensors, stem=stem)
    config.save_pretrained(folder)
    add_folder_aliases(folder)
    copy_tokenizer(base, folder)


def save_tensors(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], *, stem: str = PLAIN_STEM
) -> None:
    """Write tensors in shards. transformers reads files named `PLAIN_STEM`; use a different stem for quantized tensors."""
    on_host = ((name, tensor.detach().cpu().contiguous()) for name, tensor in tensors)
    write_shards(folder, on_host, save=partial(save_file, metadata={"format": "pt"}), stem=stem)


def write_adapter(
    folder: Path,
    weights: Mapping[str, Array],
    *,
    model: nn.Module,
    adapters: Mapping[str, Adapted],
    context: BuildContext,
    task: TorchTask,
) -> Path:
    config = context.plan.config
    save_adapter(
        folder,
        weights,
        settings=AdapterSettings.from_config(config, method=context.plan.method),
        targets=name_targets(model, adapters, saved=list(saved_weights(model, adapters))),
        base=context.folder,
        base_name=context.base_name,
        record={
            **changes_to_base(config),
            **(task.base_record() if isinstance(task, RecordsBase) else {}),
        },
        starts={
            name: adapter.start
            for name, adapter in adapters.items()
            if isinstance(adapter, AdaptedLinear) and adapter.start is not None
        },
    )
    return folder


def write_model(
    folder: Path | None,
    model: nn.Module,
    masters: Masters,
    *,
    merged: Mapping[str, Adapted],
    task: TorchTask,
    group: Group,
) -> Path | None:
    """Write the whole model on the rank that has a folder; the others send it their shards. `merged` are adapters that the task
    merges."""
    if not sharded_modules(model):  # gathered parameters of a sharded model would look whole
        if folder is not None:
            _write_tensors(folder, model, task, trained=masters.masters)
        return folder
    from crosstune.torch_engine.sharding.read_whole import read_whole

    divided = {name: (master, masters.parameters[name]) for name, master in masters.masters.items()}
    with read_whole(group, model, divided, merged=merged) as trained:
        if folder is not None and trained is not None:
            _write_tensors(folder, model, task, trained=trained)
    return folder


def _write_tensors(folder: Path, model: nn.Module, task: TorchTask, *, trained: Tensors) -> None:
    if isinstance(task, WritesModel):
        task.write_model(model, folder, trained=trained)
    else:
        save_tensors(folder, model.state_dict().items())
