"""Convert a GGUF file to a model folder with config, weights and tokenizer, using numpy only.

Weights become bfloat16; a file whose matrices are float32 keeps them exactly.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from crosstune.core.errors import UserError, shown
from crosstune.estimate.model_shape import ModelShape
from crosstune.files.json_fields import NOTHING, TEXT, real, whole
from crosstune.models.gguf_metadata import BadGguf, Metadata, build_tokenizer, check_header
from crosstune.models.llama_layout import WEIGHTS, Llama, write_configs, write_tokenizer
from crosstune.models.staged import Progress, silent
from crosstune.models.weights import Tensor, bfloat16_bits, write_safetensors

if TYPE_CHECKING:
    from gguf import ReaderTensor

ARCHITECTURES = ("llama",)
_CHUNK_VALUES = 1 << 22


def convert(path: Path, folder: Path, *, progress: Progress = silent) -> None:
    """Write the model of a GGUF file into an existing folder."""
    metadata = _open(path)
    llama = _read_llama(metadata)
    tensors = _plan_tensors(metadata, llama)
    tokenizer, special = build_tokenizer(metadata, num_rows=llama.vocab)
    template = metadata.get("tokenizer.chat_template", TEXT | NOTHING)
    write_tokenizer(folder, tokenizer, special=special, chat_template=template, max_context=llama.max_context)
    write_configs(folder, llama)
    write_safetensors(folder / WEIGHTS, tensors, progress=progress)


def read_shape(path: Path) -> ModelShape | None:
    """Return the shape of a GGUF model from its metadata; None if the gguf package is not installed."""
    return None if importlib.util.find_spec("gguf") is None else _read_llama(_open(path)).shape()


def converted_bytes(path: Path) -> int:
    """Estimate the disk space of a conversion."""
    llama = _read_llama(_open(path))
    return (4 if llama.dtype == "float32" else 2) * llama.shape().num_parameters + 20_000_000


def require_gguf(name: str) -> None:
    """Raise a UserError unless the optional gguf package is installed."""
    if importlib.util.find_spec("gguf") is None:
        raise UserError(
            f"Cannot read the GGUF file {name}.",
            why="the Python package gguf is not installed.",
            do="pip install 'crosstune[gguf]'",
        )


def _open(path: Path) -> Metadata:
    require_gguf(str(path))
    from gguf import GGUFReader

    check_header(path)
    try:
        return Metadata(path, GGUFReader(path))
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise BadGguf(path, shown(str(error))) from error


def _read_llama(metadata: Metadata) -> Llama:
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise metadata.unsupported(
            f"its architecture is {shown(architecture)}; supported for GGUF: {', '.join(ARCHITECTURES)}",
            do="use the model's Hugging Face folder or hub id instead",
        )
    scaling = metadata.get("llama.rope.scaling.type")
    if scaling not in (None, "none"):
        raise metadata.unsupported(f"its RoPE is scaled ({shown(scaling)})")
    shapes = {tensor.name: tensor.shape for tensor in metadata.tensors}
    embeddings = shapes.get("token_embd.weight", ())
    if len(embeddings) != 2:
        raise metadata.unsupported("it has no token embeddings")
    hidden = metadata.count("llama.embedding_length")
    heads = metadata.count("llama.attention.head_count")
    groups = metadata.count("llama.attention.head_count_kv", heads)
    head_dim = metadata.count("llama.attention.key_length", hidden // heads)
    if metadata.count("llama.rope.dimension_count", head_dim) != head_dim or head_dim % 2:
        raise metadata.unsupported("its rotary embedding covers only a part of each head")
    if heads % groups:
        raise metadata.unsupported(f"its {heads} attention heads do not divide into {groups} groups")
    return Llama(
        vocab=int(embeddings[1]),
        hidden=hidden,
        intermediate=metadata.count("llama.feed_forward_length"),
        num_layers=int(metadata.get("llama.block_count", whole(1, 10_000))),
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=head_dim,
        max_context=metadata.count("llama.context_length"),
        rope_theta=_shortest(metadata.get("llama.rope.freq_base", real(0), 10000.0)),
        norm_eps=_shortest(metadata.get("llama.attention.layer_norm_rms_epsilon", real(0))),
        tied="output.weight" not in shapes,
        dtype="float32" if _has_float32_matrices(metadata) else "bfloat16",
        bos=metadata.token("bos"),
        eos=metadata.token("eos"),
        pad=metadata.token("padding"),
    )


def _has_float32_matrices(metadata: Metadata) -> bool:
    """Return True if all matrices are float32; norms always are."""
    return all(tensor.tensor_type.name == "F32" for tensor in metadata.tensors if len(tensor.shape) > 1)


def _plan_tensors(metadata: Metadata, llama: Llama) -> list[Tensor]:
    """Return all parameters of the model with their data; raise a UserError for a missing or unexpected tensor."""
    from gguf import MODEL_ARCH, get_tensor_name_map
    from gguf.quants import dequantize

    names = get_tensor_name_map(MODEL_ARCH.LLAMA, llama.num_layers)
    stored = {tensor.name: tensor for tensor in metadata.tensors}
    planned = []
    for name, shape in llama.tensor_shapes().items():
        gguf_name = str(names.get_name(name, try_suffixes=(".weight",)))
        tensor = stored.pop(gguf_name, None)
        if tensor is None:
            raise metadata.unsupported(f"it lacks {gguf_name}", do="merge the parts of a split file first")
        if tuple(reversed(tensor.shape.tolist())) != shape:
            raise metadata.unsupported(f"{tensor.name} has the shape {tensor.shape.tolist()}")
        try:
            dequantize(np.asarray(tensor.data[:1]), tensor.tensor_type)
        except NotImplementedError as error:
            raise metadata.unsupported(f"{tensor.tensor_type.name} weights cannot be decoded") from error
        rows = _row_order(llama, name, shape)
        exact = llama.dtype == "float32"
        values = _read_rows(tensor, rows, exact=exact)
        planned.append(Tensor(name=name, dtype="F32" if exact else "BF16", shape=shape, rows=values))
    if stored:
        raise metadata.unsupported(f"Llama models do not have {', '.join(sorted(stored)[:5])}")
    return planned


def _row_order(llama: Llama, name: str, shape: tuple[int, ...]) -> NDArray[np.int64] | None:
    """Return the stored row of each row of a parameter. llama.cpp applies RoPE to neighboring rows of a head, Hugging
    Face to its two halves, so the rows of queries and keys are interleaved in GGUF files."""
    if name.endswith("q_proj.weight"):
        heads = llama.num_heads
    elif name.endswith("k_proj.weight"):
        heads = llama.num_kv_heads
    else:
        return None
    stored = np.arange(shape[0], dtype=np.int64).reshape(heads, llama.head_dim // 2, 2)
    return stored.transpose(0, 2, 1).reshape(-1)


def _read_rows(
    tensor: ReaderTensor, order: NDArray[np.int64] | None, *, exact: bool
) -> Iterator[NDArray[Any]]:
    """Yield the rows as float32, or rounded to the bits of bfloat16."""
    from gguf.quants import dequantize

    data = tensor.data.reshape(1, -1) if tensor.data.ndim == 1 else tensor.data
    step = max(1, _CHUNK_VALUES // int(tensor.shape[0]))
    for start in range(0, len(data), step):
        window = slice(start, start + step)
        rows = data[window] if order is None else data[order[window]]
        values = dequantize(np.asarray(rows), tensor.tensor_type)
        yield values.astype("<f4", copy=False) if exact else bfloat16_bits(values).astype("<u2", copy=False)


def _shortest(value: float) -> float:
    """Return the shortest decimal with the same float32 value: 1e-05 instead of 9.999999747378752e-06."""
    return float(str(np.float32(value)))
