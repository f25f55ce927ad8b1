"""Save a model as a folder for transformers and mlx-lm."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from crosstune.core.model_folders import OnBytes
from crosstune.files.json_files import write_json
from crosstune.models.adapter_files import copy_tokenizer
from crosstune.models.folder import add_config_aliases, read_config_json
from crosstune.models.llama_layout import CONFIG
from crosstune.models.weights import write_shards

_DTYPE_NAMES = {mx.float32: "float32", mx.bfloat16: "bfloat16", mx.float16: "float16"}


def save_model(folder: Path, model: Any, *, base: Path) -> None:
    """Write a complete, sharded model folder for transformers and mlx-lm."""
    save_arrays(folder, dict(tree_flatten(model.parameters())), base=base)


def save_tensors(folder: Path, model: Any) -> None:
    """Write the weights of a model in shards, without configuration and tokenizer."""
    _save_shards(folder, dict(tree_flatten(model.parameters())))


def save_arrays(
    folder: Path, tensors: dict[str, mx.array], *, base: Path, on_write: OnBytes | None = None
) -> None:
    """Write a model folder. Each entry is popped from `tensors` as it is written, so that lazy arrays are never all in memory."""
    types = Counter(tensor.dtype for tensor in tensors.values())
    dtype = _DTYPE_NAMES[types.most_common(1)[0][0]]
    _save_shards(folder, tensors, on_write)
    read = read_config_json(base).items()
    config = {key: value for key, value in read if not key.startswith("quantization")}
    write_json(folder / CONFIG, add_config_aliases(config) | {"dtype": dtype, "torch_dtype": dtype})
    copy_tokenizer(base, folder)


def _save_shards(folder: Path, tensors: dict[str, mx.array], on_write: OnBytes | None = None) -> None:
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_shards(
        folder,
        ((name, tensors.pop(name)) for name in list(tensors)),
        save=lambda shard, path: mx.save_safetensors(str(path), shard, metadata={"format": "pt"}),
        on_bytes=lambda done: on_write(done, total) if on_write is not None else None,
    )
