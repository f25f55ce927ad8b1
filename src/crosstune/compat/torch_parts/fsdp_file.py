"""Write and read the checkpoint file of the guides' MPSFSDPWrapper: safetensors with JSON and a hash in its header."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from crosstune.core.errors import UserError
from crosstune.files.atomic_files import staged_file
from crosstune.files.json_files import parse_json
from crosstune.files.plain_files import UnreadableFile, open_plain
from crosstune.files.safetensors_header import read_header

FORMAT = "crosstune-model-1"
_ZIP, _PICKLE, _TAR = b"PK\x03\x04", b"\x80", b"ustar"
_FACTS = {"metadata", "optimizer", "world_size", "backend", "precision", "quantization"}


class StoredFile:
    """An open checkpoint file whose hash was checked."""

    def __init__(self, path: Path, tensors: Any, facts: Mapping[str, Any]) -> None:
        self._tensors, self.facts = tensors, facts
        header = read_header(path)
        self._shapes = {name: tuple(entry["shape"]) for name, entry in header.tensors.items()}

    def names(self, prefix: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors with a prefix, by name without it."""
        return {
            name.removeprefix(prefix): shape
            for name, shape in self._shapes.items()
            if name.startswith(prefix)
        }

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor; None if the file has none of this name."""
        return self._shapes.get(name)

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """Return a tensor, or read only some of its rows from disk."""
        if rows is None:
            return self._tensors.get_tensor(name)
        return self._tensors.get_slice(name)[rows]


def write(path: Path, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
    """Write a file, replacing an existing one once the new one is complete."""
    if path.is_dir():
        raise UserError(
            f"{path} is a folder.", why="a checkpoint of this class is one file.", do="name a file"
        )
    text = json.dumps(facts)
    path.parent.mkdir(parents=True, exist_ok=True)
    with staged_file(path) as staged:
        save_file(
            dict(tensors),
            staged,
            metadata={"format": FORMAT, "facts": text, "sha256": _digest(sorted(tensors), tensors.get, text)},
        )


@contextmanager
def open_file(path: Path) -> Iterator[StoredFile]:
    """Open a checkpoint; raise UserError unless it is complete, unchanged and written by save_checkpoint."""
    _refuse_foreign(path)
    read_header(path)
    with safe_open(path, framework="pt") as tensors:
        described = tensors.metadata() or {}
        if described.get("format") != FORMAT:
            raise UnreadableFile(
                path,
                "it is a safetensors file that save_checkpoint did not write",
                do="load its weights with safetensors.torch.load_file and model.load_state_dict",
            )
        text = described.get("facts", "")
        if _digest(sorted(tensors.keys()), tensors.get_tensor, text) != described.get("sha256"):
            raise UnreadableFile(
                path, "its content does not match its hash: it is damaged", do="use another checkpoint"
            )
        facts = parse_json(text.encode(), foreign=True)  # a loss may be infinite
        if not isinstance(facts, dict) or not facts.keys() >= _FACTS:
            raise UnreadableFile(path, "its header lacks values", do="use another checkpoint")
        yield StoredFile(path, tensors, facts)


def _digest(names: list[str], read: Any, text: str) -> str:
    sha = hashlib.sha256(text.encode())
    for name in names:
        tensor = read(name).contiguous()
        sha.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        sha.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def _refuse_foreign(path: Path) -> None:
    """Refuse files of torch.save: a pickle can run code."""
    with open_plain(path) as file:
        start = file.read(512)
    is_safetensors = start[8:9] == b"{"  # after the length of its header, whose first byte may be a pickle's
    if not is_safetensors and (start.startswith((_ZIP, _PICKLE)) or _TAR in start):
        raise UserError(
            f"{path} was written by torch.save.",
            why="it is a pickle and could run code; checkpoints of this class are safetensors.",
            do="read it once yourself with torch.load and weights_only=True, pass its state dict to model.load_state_dict, "
            "and use save_checkpoint; for a model of transformers: crosstune checkpoint import PATH --out runs/old",
        )
