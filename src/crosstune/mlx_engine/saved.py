"""What a session has trained, as files: an adapter for PEFT and for mlx-lm, or a whole model for both worlds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from crosstune.core.protocols import Array
from crosstune.models.adapter_files import copy_tokenizer, write_json
from crosstune.models.canonical import CONFIG
from crosstune.models.config_spelling import spell_positions
from crosstune.models.folder import INDEXES, read_config

SHARD_BYTES = 4 * 2**30
_WORDS = {mx.float32: "float32", mx.bfloat16: "bfloat16", mx.float16: "float16"}


def quantization_record(*, bits: int, group_size: int) -> dict[str, Any]:
    """In the words that every engine uses for a quantized base."""
    return {"quantizer": "mlx", "bits": bits, "group_size": group_size, "kind": "auto", "double": False}


def to_host(arrays: Mapping[str, mx.array]) -> dict[str, Array]:
    return {name: np.array(array.astype(mx.float32)) for name, array in arrays.items()}


def save_model(folder: Path, model: Any, *, base: Path) -> None:
    """A whole model folder, in shards, that transformers and mlx-lm load."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = dict(tree_flatten(model.parameters()))
    save_tensors(folder, tensors)
    config = {key: value for key, value in read_config(base).items() if not key.startswith("quantization")}
    word = _WORDS[max((t.dtype for t in tensors.values()), key=[t.dtype for t in tensors.values()].count)]
    write_json(folder / CONFIG, spell_positions(config) | {"dtype": word, "torch_dtype": word})
    copy_tokenizer(base, folder)


def save_tensors(folder: Path, tensors: Mapping[str, mx.array]) -> None:
    shards = list(_shards(tensors))
    if len(shards) == 1:
        mx.save_safetensors(str(folder / "model.safetensors"), shards[0], metadata={"format": "pt"})
        return
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        mx.save_safetensors(str(folder / name), shard, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, name)
    total = sum(array.nbytes for array in tensors.values())
    write_json(folder / INDEXES[0], {"metadata": {"total_size": total}, "weight_map": index})


def _shards(tensors: Mapping[str, mx.array]) -> Iterator[dict[str, mx.array]]:
    held: dict[str, mx.array] = {}
    for name, array in tensors.items():
        held[name] = array
        if sum(other.nbytes for other in held.values()) >= SHARD_BYTES:
            yield held
            held = {}
    if held:
        yield held
