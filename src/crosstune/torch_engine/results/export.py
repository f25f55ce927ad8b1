"""Read and write adapters and models in the formats of PEFT and transformers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from crosstune.models.adapter_choice import AdapterSettings
from crosstune.models.adapter_files import copy_tokenizer
from crosstune.models.adapter_files import load_adapter as read_adapter_files
from crosstune.models.folder import PLAIN_STEM, add_folder_aliases
from crosstune.models.weights import write_shards
from crosstune.torch_engine.loading.adapters import Adapted, AdaptedLinear, tied_parameters
from crosstune.torch_engine.session.state import copy_rows
from crosstune.torch_engine.sharding.local_shard import local_part


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
