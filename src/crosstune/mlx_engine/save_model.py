"""Save a model as a folder for transformers and mlx-lm, and copy trained arrays to the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from crosstune.core.model_folders import OnBytes
from crosstune.core.protocols import Array
from crosstune.models.adapter_files import copy_tokenizer, write_json
from crosstune.models.config_spelling import spell_config
from crosstune.models.folder import INDEXES, read_config_json
from crosstune.models.llama_layout import CONFIG

SHARD_BYTES = 4 * 2**30
_DTYPE_NAMES = {mx.float32: "float32", mx.bfloat16: "bfloat16", mx.float16: "float16"}


def host_weights(arrays: Mapping[str, mx.array]) -> dict[str, Array]:
    """Return copies of the arrays on the host, in fp32."""
    return {name: np.array(array.astype(mx.float32)) for name, array in arrays.items()}


def save_model(folder: Path, model: Any, *, base: Path) -> None:
    """Write a complete, sharded model folder for transformers and mlx-lm."""
    save_arrays(folder, dict(tree_flatten(model.parameters())), base=base)


def save_tensors(folder: Path, model: Any) -> None:
    """Write only the weights of a model, in shards."""
    folder.mkdir(parents=True, exist_ok=True)
    _save_shards(folder, dict(tree_flatten(model.parameters())), lambda done, total: None)


def save_arrays(
    folder: Path, tensors: dict[str, mx.array], *, base: Path, on_write: OnBytes | None = None
) -> None:
    """Write a model folder from arrays by name. Removes each from the dictionary once written, so that lazy arrays are
    never all in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    types = Counter(tensor.dtype for tensor in tensors.values())
    dtype = _DTYPE_NAMES[types.most_common(1)[0][0]]
    _save_shards(folder, tensors, on_write or (lambda done, total: None))
    config = {
        key: value for key, value in read_config_json(base).items() if not key.startswith("quantization")
    }
    write_json(folder / CONFIG, spell_config(config) | {"dtype": dtype, "torch_dtype": dtype})
    copy_tokenizer(base, folder)


def _save_shards(folder: Path, tensors: dict[str, mx.array], on_write: OnBytes) -> None:
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
    """Yield the names of each shard."""
    names: list[str] = []
    shard_bytes = 0
    for name, num_bytes in sizes.items():
        names.append(name)
        shard_bytes += num_bytes
        if shard_bytes >= SHARD_BYTES:
            yield names
            names, shard_bytes = [], 0
    if names:
        yield names
