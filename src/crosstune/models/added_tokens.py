"""Add tokens to a model: a cached folder with a longer tokenizer and more embedding rows, and links to its other weights."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.core.errors import UserError, shown
from crosstune.files.json_fields import OBJECT, TEXT, check_fields, list_of, object_with, whole
from crosstune.files.json_files import read_json, read_object, write_json
from crosstune.models.adapter_choice import token_parameters
from crosstune.models.cache import MARKER, install
from crosstune.models.folder import read_config_json, weight_files
from crosstune.models.identity import identity
from crosstune.models.llama_layout import CONFIG
from crosstune.models.locate import ModelFolder
from crosstune.models.quantized_folder import read_quantization
from crosstune.models.staged import Progress, silent
from crosstune.models.weights import (
    StoredArray,
    Tensor,
    bfloat16_bits,
    stored_arrays,
    to_float32,
    write_safetensors,
)

_TOKENIZER = "tokenizer.json"
_TOKENIZER_LIMIT = 256 << 20
_FIELDS = {"model": OBJECT, "added_tokens": list_of(object_with({"content": TEXT, "id": whole(0, 2**31)}))}
_COPIED = (".json", ".jinja", ".txt", ".model")
_ROWS_AT_ONCE = 4096
_PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}


def add_tokens(model: ModelFolder, listed: str, *, progress: Progress = silent) -> ModelFolder:
    """Return the model with the tokens of --add_tokens; tokens that its tokenizer knows are kept as they are.

    A new row has the mean of the rows before it.
    """
    folder, tokens = model.path, listed.split(",")
    config, tokenizer = read_config_json(folder), _read_tokenizer(folder)
    if "quantization_config" in config or "quantization" in config or read_quantization(folder) is not None:
        raise UserError(
            f"--add_tokens does not work with {model.name}.",
            why="its weights are quantized, and quantized embeddings cannot be extended.",
            do="use the original model; --train_type qlora quantizes it on load and keeps its embeddings dense",
        )
    ids = _ids(tokenizer)
    kept = [token for token in tokens if token in ids]
    found = replace(model, base=str(folder), kept_tokens=tuple(kept))
    new = [token for token in tokens if token not in ids]
    if not new:
        return found
    first = _first_id(tokenizer, ids, source=folder)
    old_rows = _num_rows(config)
    arrays = {path: stored_arrays(path) for path in weight_files(folder)}
    shapes = {name: array.shape for stored in arrays.values() for name, array in stored.items()}
    longer = token_parameters(shapes, old_rows)
    if not longer or first > old_rows:
        raise UserError(
            f"--add_tokens does not work with {model.name}.",
            why=f"its files have no embedding of {old_rows} rows, vocab_size in {CONFIG}, for its {first} tokens.",
            do="add the tokens with transformers (resize_token_embeddings), and train the saved model",
        )
    num_rows = max(old_rows, first + len(new))
    rewritten = [path for path, stored in arrays.items() if any(name in stored for name in longer)]

    def build(target: Path, _: Path) -> None:
        copy_settings(folder, target)
        for path, stored in arrays.items():
            if path not in rewritten:
                (target / path.name).symlink_to(path.resolve())
                continue
            tensors = [
                _longer(name, array, num_rows=num_rows, first=first, num_new=len(new))
                if name in longer
                else _tensor(name, array)
                for name, array in stored.items()
            ]
            write_safetensors(target / path.name, tensors, progress=progress)
        inner = config.get("text_config")
        for numbers in (config, inner if isinstance(inner, dict) else {}):
            if numbers.get("vocab_size") == old_rows:
                numbers["vocab_size"] = num_rows
        write_json(target / CONFIG, config)
        _write_tokenizer(target, tokenizer, new, first)

    source = {"kind": "added_tokens", "identity": identity(folder)["sha256"], "tokens": tokens}
    source["tokenizer"] = hashlib.sha256((folder / _TOKENIZER).read_bytes()).hexdigest()
    digest = hashlib.sha256(json.dumps(source, sort_keys=True).encode()).hexdigest()
    need = sum(path.stat().st_size for path in rewritten) + len(longer) * len(new) * (1 << 16)
    key = f"{Path(model.name).name}-tokens-{digest[:12]}"
    return replace(found, path=install(key, build, need_bytes=need, source=source, progress=progress))


def setting_files(folder: Path) -> list[Path]:
    """Return the config, tokenizer and template files of a model."""
    found = (path for path in folder.iterdir() if path.suffix in _COPIED and path.is_file())
    return sorted(path for path in found if path.name != MARKER)


def copy_settings(folder: Path, target: Path) -> None:
    for path in setting_files(folder):
        shutil.copy2(path, target / path.name)


def _read_tokenizer(folder: Path) -> dict[str, Any]:
    path = folder / _TOKENIZER
    tokenizer = read_object(path, foreign=True, limit=_TOKENIZER_LIMIT)
    check_fields(tokenizer, _FIELDS, required=("model",), source=path)
    return tokenizer


def _vocabulary(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    vocabulary = tokenizer["model"].get("vocab") or {}
    if isinstance(vocabulary, list):  # Unigram: pairs of token and score
        return {str(entry[0]): number for number, entry in enumerate(vocabulary)}
    return dict(vocabulary)


def _ids(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
    return _vocabulary(tokenizer) | added


def _first_id(tokenizer: Mapping[str, Any], ids: Mapping[str, int], *, source: Path) -> int:
    """Return the id that the tokenizers library gives to the next added token."""
    size = len(_vocabulary(tokenizer))
    highest = max((token["id"] for token in tokenizer.get("added_tokens") or ()), default=-1)
    first = highest + 1 if highest >= size else size
    if first <= max(ids.values(), default=-1):
        raise UserError(
            f"--add_tokens cannot extend the tokenizer in {source}.",
            why=f"its ids are not consecutive: {first} is followed by ids in use.",
            do="add the tokens with transformers (add_tokens, resize_token_embeddings), and train the saved model",
        )
    return first


def _num_rows(config: Mapping[str, Any]) -> int:
    inner = config.get("text_config")
    return int((inner if isinstance(inner, dict) else config).get("vocab_size") or 0)


def _write_tokenizer(folder: Path, tokenizer: dict[str, Any], new: Sequence[str], first: int) -> None:
    entries = {first + number: {"content": token, **_PLAIN} for number, token in enumerate(new)}
    added = tokenizer.get("added_tokens") or []
    tokenizer["added_tokens"] = [*added, *({"id": number, **entry} for number, entry in entries.items())]
    write_json(folder / _TOKENIZER, tokenizer)
    settings = read_json(folder / "tokenizer_config.json", foreign=True)
    if isinstance(known := settings.get("added_tokens_decoder"), dict):
        known |= {str(number): entry for number, entry in entries.items()}
        write_json(folder / "tokenizer_config.json", settings)


def _tensor(name: str, array: StoredArray) -> Tensor:
    if array.dtype not in ("BF16", "F16", "F32"):
        raise UserError(
            f"--add_tokens cannot copy {shown(name)} in {array.path}.",
            why=f"its dtype is {array.dtype}.",
            do="save the model in bf16, fp16 or fp32",
        )
    rows = _pieces(array, array.shape[0]) if array.shape else [array.map()]
    return Tensor(name=name, dtype=array.dtype, shape=array.shape, rows=rows)


def _longer(name: str, array: StoredArray, *, num_rows: int, first: int, num_new: int) -> Tensor:
    """Return an embedding or head with the mean of the rows before `first` in the rows of the new tokens."""
    plain = _tensor(name, array)

    def rows() -> Iterator[NDArray[Any]]:
        total = np.zeros(array.shape[1:])
        for piece in _pieces(array, first):
            total += to_float32(array.dtype, piece).sum(axis=0, dtype=np.float64)
            yield piece
        mean = (total / first).astype(np.float32)
        stored = bfloat16_bits(mean) if array.dtype == "BF16" else mean.astype(array.map().dtype)
        yield np.repeat(stored[None], num_new, axis=0)
        if first + num_new < num_rows:  # rows that no token uses
            yield array.map()[first + num_new :]

    return replace(plain, shape=(num_rows, *array.shape[1:]), rows=rows())


def _pieces(array: StoredArray, num_rows: int) -> Iterator[NDArray[Any]]:
    values = array.map()
    for row in range(0, num_rows, _ROWS_AT_ONCE):
        yield values[row : min(row + _ROWS_AT_ONCE, num_rows)]
