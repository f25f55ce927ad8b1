"""Export a run or a model into the cache, keyed by the identity of its sources: made once, reused until they change."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from crosstune.config.load import cache_override
from crosstune.core.events import ModelProgress, Observer
from crosstune.models.cache import install
from crosstune.models.file_hashes import sha256_of_all, write_checksums
from crosstune.models.identity import identity
from crosstune.models.locate import ModelFolder
from crosstune.models.quantized_folder import dense_bytes
from crosstune.results.export import Form, export
from crosstune.results.opened import Request
from crosstune.runs.trained_folder import Trained

_KEY_CHARS = 12
_HASHED = ("*.safetensors", "*.json", "*.jinja", "*.model")


def cached_export(target: str, trained: Trained, model: ModelFolder, to: str, *, observer: Observer) -> Path:
    """Return the exported model folder, or the GGUF file, from the cache if its sources have not changed."""

    def show(stage: str, done: int, total: int | None) -> None:
        observer.on_event(ModelProgress(stage=stage, done=done, total=total, model=target))

    key = weights_key(trained, model, to)
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", name_of(target, trained)).strip(".-") or "model"
    result = "model.gguf" if to == "gguf" else "model"

    def build(folder: Path, scratch: Path) -> None:
        export(Request(target=target, out=folder / result), Form(to=to), observer=observer)
        write_checksums(folder)

    folder = install(
        f"{stem}-{to}-{key[:_KEY_CHARS]}",
        build,
        need_bytes=3 * dense_bytes(model.path, "auto"),
        source={"kind": "export", "form": to, "sha256": key},
        cache=cache_override(),
        progress=show,
    )
    return folder / result


def weights_key(trained: Trained, model: ModelFolder, *words: str) -> str:
    """Return a hash of everything that determines the answers of a target: weights, settings, tokenizer and template."""
    key = hashlib.sha256("\0".join([*words, identity(model.path)["sha256"]]).encode())
    for folder in (model.path, trained.adapter):
        files = sorted(path for pattern in _HASHED for path in folder.glob(pattern)) if folder else []
        for path, digest in sha256_of_all(files).items():
            key.update(f"{path.name}\0{digest}\0".encode(errors="surrogateescape"))
    return key.hexdigest()


def name_of(target: str, trained: Trained) -> str:
    """Return a short name for a target: the run's, the folder's, or the model's name as it was given."""
    if trained.home is None:
        return target
    home = trained.home
    return home.parent.name if home.name in ("adapter", "model") and not trained.is_run else home.name
