"""Find the local folder of a model given as a bundled name, a folder, a GGUF file or a hub id."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from crosstune.core.errors import UserError
from crosstune.core.names import did_you_mean
from crosstune.estimate.model_shape import ModelShape
from crosstune.files.paths import near_path_hint
from crosstune.models.bundled import BUNDLED, install_bundled
from crosstune.models.cache import cache_root, check, install
from crosstune.models.file_hashes import check_checksums, sha256_of
from crosstune.models.folder import check_folder, folder_shape, weight_files
from crosstune.models.known_models import known_shape
from crosstune.models.llama_layout import CONFIG
from crosstune.models.staged import Progress, silent

Source = Literal["bundled", "folder", "gguf", "hub"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PATH_START = re.compile(r"[./~\\]|[A-Za-z]:[\\/]")
_KEY_HASH_CHARS = 12


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """A model in the canonical layout: config.json, *.safetensors, tokenizer files."""

    name: str
    path: Path
    source: Source
    base: str | None = None
    """The folder without the tokens of --add_tokens, if some were given."""
    kept_tokens: tuple[str, ...] = ()
    """Tokens of --add_tokens that the tokenizer already had."""


def locate(name: str, *, cache: Path | None = None, progress: Progress | None = None) -> ModelFolder:
    """Return the folder of the model `name`, after downloading or converting it if needed.

    A bundled name takes precedence over a folder of the same name; `./name` always means the folder.
    """
    report = progress or silent
    source = _source(name)
    if source == "bundled":
        path = install_bundled(name, cache=cache, progress=report)
    elif source == "folder":
        path = _path(name)
        check_folder(path)
        check_checksums(path)
    elif source == "gguf":
        path = _convert(_path(name), cache=cache, progress=report)
    else:
        from crosstune.models.hub import fetch_from_hub

        path = fetch_from_hub(name, progress=report)
        if not weight_files(path):
            raise UserError(
                f"The hub model {name} has no safetensors weights.",
                do="choose a version with safetensors, or download a GGUF file and specify its path",
            )
        check_folder(path)
    return ModelFolder(name=name, path=path, source=source)


def find_local(name: str, *, cache: Path | None = None) -> ModelFolder | None:
    """Return the model if it is available locally; None if `locate` would download or convert it first."""
    source = _source(name)
    if source == "folder":
        path = _path(name)
        check_folder(path)
    elif source == "bundled":
        path = cache_root(cache) / name
        if check(path):
            return None
    elif source == "gguf":
        return None  # finding its folder requires hashing the whole file
    else:
        from crosstune.models.hub import cached_config

        config = cached_config(name)
        if config is None:
            return None
        path = config.parent
        try:
            check_folder(path)
        except UserError:  # an interrupted download; the next one completes it
            return None
    return ModelFolder(name=name, path=path, source=source)


def shape(name: str, *, cache: Path | None = None) -> ModelShape | None:
    """Return a model's shape without a download, from a local config.json or the table of known models."""
    if name in BUNDLED:
        return BUNDLED[name].shape
    path = _path(name)
    found: ModelShape | None = None
    if path.suffix.lower() == ".gguf" and path.is_file():
        from crosstune.models.gguf import read_shape

        found = read_shape(path)
    elif (path / CONFIG).is_file():
        found = folder_shape(path)
    elif _HUB_ID.fullmatch(name):
        from crosstune.models.hub import cached_config

        config = cached_config(name)
        found = None if config is None else folder_shape(config.parent)
    return found or known_shape(name)


def fetch_sizes(name: str, *, cache: Path | None = None) -> None:
    """Fetch config.json of a hub model of unknown shape, if the hub answers."""
    if shape(name, cache=cache) is None and _HUB_ID.fullmatch(name) and not _path(name).exists():
        from crosstune.models.hub import fetch_config

        fetch_config(name)


def _source(name: str) -> Source:
    """Return the kind of source that a model name refers to; raise a UserError if it is unknown."""
    if name in BUNDLED:
        return "bundled"
    path = _path(name)
    if name and path.is_dir():
        return "folder"
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise UserError(f"There is no file {path}.", do="check the path of the GGUF file")
        return "gguf"
    if path.is_file():
        raise UserError(
            f"{path} is a file, not a model.",
            why="a model is a folder with config.json, *.safetensors and a tokenizer, or a .gguf file.",
            do=f"specify the folder instead: {path.parent}",
        )
    if _PATH_START.match(name):
        raise UserError(
            f"There is no folder {path}.", do=near_path_hint(path) or "check the path of the model folder"
        )
    if _HUB_ID.fullmatch(name):
        return "hub"
    raise UserError(
        f"Unknown model '{name}'.",
        why="it is neither a bundled name nor a local folder or .gguf file, nor a hub id.",
        do=f"{did_you_mean(name, BUNDLED)}Specify a bundled name ({', '.join(sorted(BUNDLED))}), the path of a model "
        "folder or .gguf file, or a hub id (org/name)",
    )


def _convert(path: Path, *, cache: Path | None, progress: Progress) -> Path:
    """Return the folder converted from a GGUF file; its name contains a hash of the file."""
    size = path.stat().st_size
    digest = sha256_of(path, on_bytes=lambda count: progress("hash", count, size))
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip(".-") or "gguf"
    key = f"{stem}-{digest[:_KEY_HASH_CHARS]}"
    cached = cache_root(cache) / key
    if not check(cached):
        return cached
    from crosstune.models.gguf import convert, converted_bytes

    return install(
        key,
        lambda folder, scratch: convert(path, folder, progress=progress),
        need_bytes=converted_bytes(path),
        source={"kind": "gguf", "file": str(path), "sha256": digest},
        cache=cache,
        progress=progress,
    )


def _path(name: str) -> Path:
    return Path(name).expanduser().absolute()
