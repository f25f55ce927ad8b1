"""Find the local folder of a model given as a bundled name, a folder, a GGUF file or a hub id; download it from the hub.

The hub's library downloads in threads that ignore Ctrl-C, so it runs in a child process that can be killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from crosstune.core.errors import UserError
from crosstune.core.names import did_you_mean
from crosstune.estimate.model_shape import ModelShape
from crosstune.files.hub_connection import WAIT_S, offline_if_unreachable
from crosstune.files.paths import near_paths
from crosstune.files.plain_files import kind_of
from crosstune.models.bundled import BUNDLED, install_bundled
from crosstune.models.cache import cache_root, check, install
from crosstune.models.file_hashes import check_checksums, sha256_of
from crosstune.models.folder import check_folder, folder_shape, weight_files
from crosstune.models.known_models import known_shape
from crosstune.models.llama_layout import CONFIG
from crosstune.models.staged import Progress, disk_space, silent
from crosstune.process.limited_child import main_of

# The child uses the parent's sys.path to import crosstune.
_MAX_REASON_CHARS = 600
_WANTED = [
    "*.safetensors",
    "*.json",
    "*.jinja",
    "tokenizer*",
    "*.model",
    "*.tiktoken",
    "merges.txt",
    "vocab.txt",
]
# Subfolders hold other formats of the same weights, `consolidated` files a second copy.
_UNWANTED = ["*/*", "consolidated*", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl"]


def fetch_from_hub(repo: str, *, progress: Progress = silent) -> Path:
    """Download a model and return its folder."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        child = subprocess.Popen(
            main_of(__name__, repo),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            encoding="utf-8",
        )
        assert child.stdout is not None
        try:
            for line in child.stdout:
                message = json.loads(line)
                if "path" in message:
                    return Path(message["path"])
                if "error" in message:
                    raise UserError(message["error"], why=message["why"], do=message["do"])
                progress(*message["progress"])
            child.wait()
        finally:
            child.kill()
            child.wait()
        log.seek(0)
        lines = [line.strip() for line in log.read().splitlines() if line.strip()]
        output = " ".join(lines[-2:])[-_MAX_REASON_CHARS:] or "no output"
        raise _unreachable(repo, f"the download ended with code {child.returncode}: {output}")


def cached_config(repo: str) -> Path | None:
    """Return config.json of a hub model from the hub's cache, without a download; None if it is not cached."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(repo, CONFIG)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def fetch_config(repo: str) -> None:
    """Download config.json of a hub model into the hub's cache, if the hub answers within seconds."""
    from huggingface_hub import hf_hub_download

    with offline_if_unreachable() as reason, contextlib.suppress(*_hub_errors()):
        if reason is None:
            hf_hub_download(repo, CONFIG, etag_timeout=WAIT_S)


def main() -> None:
    """Download the model given on the command line; print JSON lines for progress and for the result."""
    # Ctrl-C reaches the whole process group; the parent stops the child.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lines, sys.stdout = sys.stdout, sys.stderr

    def send(**message: Any) -> None:
        print(json.dumps(message), file=lines, flush=True)

    try:
        found = _download(sys.argv[1], progress=lambda *step: send(progress=step))
    except UserError as error:
        send(error=error.message, why=error.why, do=error.do)
    else:
        send(path=str(found))


def _download(repo: str, *, progress: Progress) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    place = Path(constants.HF_HUB_CACHE)
    with offline_if_unreachable() as unreached:
        need_bytes = _bytes_to_fetch(repo) if unreached is None else 0
        try:
            with disk_space(place, need_bytes, larger="set HF_HOME to a folder on a larger disk"):
                found = snapshot_download(
                    repo,
                    allow_patterns=_WANTED,
                    ignore_patterns=_UNWANTED,
                    tqdm_class=_bar_class(progress, total=need_bytes or None),
                )
        except _hub_errors() as error:
            if unreached is not None and not isinstance(error, errors.HFValidationError):
                raise _unreachable(repo, unreached) from error
            raise _explain(repo, error) from error
    return Path(found)


def _bytes_to_fetch(repo: str) -> int:
    """Return the bytes of the model that the hub's cache lacks; 0 when the hub does not answer."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.utils import filter_repo_objects

    try:
        info = HfApi().model_info(repo, files_metadata=True)
    except _hub_errors():
        return 0  # the download reports the error
    wanted = filter_repo_objects(
        info.siblings or [],
        allow_patterns=_WANTED,
        ignore_patterns=_UNWANTED,
        key=lambda file: file.rfilename,
    )
    return sum(
        file.size or 0
        for file in wanted
        if not isinstance(try_to_load_from_cache(repo, file.rfilename, revision=info.sha), str)
    )


def _bar_class(progress: Progress, *, total: int | None) -> type[Any]:
    """Return a tqdm class that draws nothing and reports bytes to `progress`, one call at a time."""
    from tqdm.auto import tqdm

    lock = threading.Lock()
    most = 0

    class Reporter(tqdm):  # type: ignore[misc, type-arg, unused-ignore]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._in_bytes, self._done = kwargs.get("unit") == "B", 0
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            nonlocal most
            if self._in_bytes:
                with lock:
                    self._done += int(n or 0)
                    # Some versions have one bar for received and one for written bytes; report the larger count.
                    most = max(most, self._done)
                    progress("download", most if total is None else min(most, total), total)

    return Reporter


def _hub_errors() -> tuple[type[Exception], ...]:
    from huggingface_hub import errors

    return errors.HFValidationError, errors.HTTPError, OSError


def _explain(repo: str, error: Exception) -> UserError:
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return UserError(
            f"The hub model {repo} is gated.",
            do="accept its terms on the model's page, run `hf auth login`, and try again",
        )
    if isinstance(error, (RepositoryNotFoundError, HFValidationError)):
        return UserError(
            f"There is no hub model {repo}.",
            do="check the spelling (org/name), or run `hf auth login` if the model is private",
        )
    cause = error.__cause__ or error
    return _unreachable(repo, (str(cause).strip() or type(cause).__name__).splitlines()[0])


def _unreachable(repo: str, reason: str) -> UserError:
    return UserError(
        f"Cannot get the hub model {repo}.",
        why=f"the download failed, and the model is not complete in the hub's cache ({reason}).",
        do="connect to the network (and unset HF_HUB_OFFLINE), or specify a local model folder",
    )


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
    """The folder without the tokens of --add_tokens and the positions of --rope_scaling, if one of them is set."""
    kept_tokens: tuple[str, ...] = ()
    """Tokens of --add_tokens that the tokenizer already had."""


def locate(name: str, *, progress: Progress | None = None) -> ModelFolder:
    """Return the folder of the model `name`, after downloading or converting it if needed.

    A bundled name takes precedence over a folder of the same name; `./name` always means the folder.
    """
    report = progress or silent
    source = _source(name)
    if source == "bundled":
        path = install_bundled(name, progress=report)
    elif source == "folder":
        path = _path(name)
        check_folder(path)
        check_checksums(path)
    elif source == "gguf":
        path = _convert(_path(name), progress=report)
    else:
        path = fetch_from_hub(name, progress=report)
        if not weight_files(path):
            raise UserError(
                f"The hub model {name} has no safetensors weights.",
                do="choose a version with safetensors, or download a GGUF file and specify its path",
            )
        check_folder(path)
    return ModelFolder(name=name, path=path, source=source)


def find_local(name: str) -> ModelFolder | None:
    """Return the model if it is available locally; None if `locate` would download or convert it first."""
    source = _source(name)
    if source == "folder":
        path = _path(name)
        check_folder(path)
    elif source == "bundled":
        path = cache_root() / name
        if check(path):
            return None
    elif source == "gguf":
        return None  # finding its folder requires hashing the whole file
    else:
        config = cached_config(name)
        if config is None:
            return None
        path = config.parent
        try:
            check_folder(path)
        except UserError:  # an interrupted download; the next one completes it
            return None
    return ModelFolder(name=name, path=path, source=source)


def shape(name: str) -> ModelShape | None:
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
        config = cached_config(name)
        found = None if config is None else folder_shape(config.parent)
    return found or known_shape(name)


def fetch_sizes(name: str) -> None:
    """Fetch config.json of a hub model of unknown shape, if the hub answers."""
    if shape(name) is None and _HUB_ID.fullmatch(name) and not _path(name).exists():
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
    if os.path.lexists(path):
        raise UserError(
            f"{path} is {kind_of(path)}, not a model.",
            why="a model is a folder with config.json, *.safetensors and a tokenizer, or a .gguf file.",
            do=f"specify the folder instead: {path.parent}",
        )
    if _PATH_START.match(name):
        close = near_paths(path)
        do = f"did you mean {' or '.join(close)}?" if close else "check the path of the model folder"
        raise UserError(f"There is no folder {path}.", do=do)
    if _HUB_ID.fullmatch(name):
        return "hub"
    raise UserError(
        f"Unknown model '{name}'.",
        why="it is neither a bundled name nor a local folder or .gguf file, nor a hub id.",
        do=f"{did_you_mean(name, BUNDLED)}Specify a bundled name ({', '.join(sorted(BUNDLED))}), the path of a model "
        "folder or .gguf file, or a hub id (org/name)",
    )


def _convert(path: Path, *, progress: Progress) -> Path:
    """Return the folder converted from a GGUF file; its name contains a hash of the file."""
    size = path.stat().st_size
    digest = sha256_of(path, on_bytes=lambda count: progress("hash", count, size))
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip(".-") or "gguf"
    key = f"{stem}-{digest[:_KEY_HASH_CHARS]}"
    cached = cache_root() / key
    if not check(cached):
        return cached
    from crosstune.models.gguf import convert, converted_bytes

    return install(
        key,
        lambda folder, scratch: convert(path, folder, progress=progress),
        need_bytes=converted_bytes(path),
        source={"kind": "gguf", "file": str(path), "sha256": digest},
        progress=progress,
    )


def _path(name: str) -> Path:
    return Path(name).expanduser().absolute()
