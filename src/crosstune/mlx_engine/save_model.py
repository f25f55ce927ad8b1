"""What a session has trained, as files: an adapter for PEFT and for mlx-lm, or a whole model for both worlds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from crosstune.core.protocols import Array
from crosstune.models.adapter_files import copy_tokenizer, write_json
from crosstune.models.config_spelling import spell_positions
from crosstune.models.folder import INDEXES, read_config
from crosstune.models.llama_layout import CONFIG

SHARD_BYTES = 4 * 2**30
OnWrite = Callable[[int, int], None]
"""Hears how many of how many bytes are written."""
_WORDS = {mx.float32: "float32", mx.bfloat16: "bfloat16", mx.float16: "float16"}


def to_host(arrays: Mapping[str, mx.array]) -> dict[str, Array]:
    return {name: np.array(array.astype(mx.float32)) for name, array in arrays.items()}


def save_model(folder: Path, model: Any, *, base: Path) -> None:
    """A whole model folder, in shards, that transformers and mlx-lm load."""
    save_arrays(folder, dict(tree_flatten(model.parameters())), base=base)


def save_arrays(
    folder: Path, tensors: dict[str, mx.array], *, base: Path, on_write: OnWrite | None = None
) -> None:
    """The same from arrays by name, which are taken out of the dictionary as they are written: those that are yet to be
    computed never lie in memory together."""
    folder.mkdir(parents=True, exist_ok=True)
    types = [tensor.dtype for tensor in tensors.values()]
    word = _WORDS[max(types, key=types.count)]
    _save_shards(folder, tensors, on_write or (lambda done, total: None))
    config = {key: value for key, value in read_config(base).items() if not key.startswith("quantization")}
    write_json(folder / CONFIG, spell_positions(config) | {"dtype": word, "torch_dtype": word})
    copy_tokenizer(base, folder)


def _save_shards(folder: Path, tensors: dict[str, mx.array], on_write: OnWrite) -> None:
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    total, done = sum(sizes.values()), 0
    shards = list(_divide(sizes))
    on_write(0, total)
    if len(shards) == 1:
        mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "pt"})
        tensors.clear()
        on_write(total, total)
        return
    index: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        shard = {name: tensors.pop(name) for name in names}
        mx.save_safetensors(str(folder / file), shard, metadata={"format": "pt"})
        index |= dict.fromkeys(names, file)
        done += sum(sizes[name] for name in names)
        on_write(done, total)
    write_json(folder / INDEXES[0], {"metadata": {"total_size": total}, "weight_map": index})


def _divide(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    held: list[str] = []
    for name in sizes:
        held.append(name)
        if sum(sizes[other] for other in held) >= SHARD_BYTES:
            yield held
            held = []
    if held:
        yield held
