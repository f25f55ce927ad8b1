"""Download a hub model in a child process: safetensors, config and tokenizer files, never pickles."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from crosstune.core.errors import UserError
from crosstune.core.hub_reach import offline_if_unreachable
from crosstune.models.disk import HUB_VARIABLE, DiskFullError, disk_errors, ensure_space
from crosstune.models.hub import unreachable
from crosstune.models.progress import Progress

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


def main() -> None:
    """Download the model given on the command line; print JSON lines for progress and for the result."""
    # Ctrl-C reaches the whole process group; the parent stops the child.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lines, sys.stdout = sys.stdout, sys.stderr

    def send(message: Mapping[str, Any]) -> None:
        print(json.dumps(message), file=lines, flush=True)

    def progress(stage: str, done: int, total: int | None, /) -> None:
        send({"progress": [stage, done, total]})

    (repo,) = sys.argv[1:]
    try:
        found = download(repo, progress=progress)
    except UserError as error:
        send(
            {"error": error.asked, "why": error.why, "do": error.do, "full": isinstance(error, DiskFullError)}
        )
    else:
        send({"path": str(found)})


def download(repo: str, *, progress: Progress) -> Path:
    """Download a model into the hub's own cache."""
    from huggingface_hub import constants, errors, snapshot_download

    place = Path(constants.HF_HUB_CACHE)
    with offline_if_unreachable() as unreached:
        need_bytes = _bytes_to_fetch(repo) if unreached is None else 0
        ensure_space(place, need_bytes, variable=HUB_VARIABLE)
        try:
            with disk_errors(place, need_bytes, variable=HUB_VARIABLE):
                found = snapshot_download(
                    repo,
                    allow_patterns=_WANTED,
                    ignore_patterns=_UNWANTED,
                    tqdm_class=_bar_class(progress, total=need_bytes or None),
                )
        except _hub_errors() as error:
            if unreached is not None and not isinstance(error, errors.HFValidationError):
                raise unreachable(repo, unreached) from error
            raise _explain(repo, error) from error
    return Path(found)


def _bytes_to_fetch(repo: str) -> int:
    """Return the bytes of the model that the hub's cache lacks; 0 when the hub does not answer, in which case the
    download reports the error."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        info = HfApi().model_info(repo, files_metadata=True)
    except _hub_errors():
        return 0
    wanted = {file.rfilename: file.size or 0 for file in info.siblings or [] if _is_wanted(file.rfilename)}
    return sum(
        size
        for name, size in wanted.items()
        if not isinstance(try_to_load_from_cache(repo, name, revision=info.sha), str)
    )


def _is_wanted(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in _WANTED) and not any(
        fnmatch(name, pattern) for pattern in _UNWANTED
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
            if not self._in_bytes:
                return
            with lock:
                self._done += int(n or 0)
                # Some versions have one bar for received and one for written bytes; report the larger count.
                if self._done > most:
                    most = self._done
                    progress("download", most if total is None else min(most, total), total)

    return Reporter


def _hub_errors() -> tuple[type[Exception], ...]:
    """Return the errors that the hub's library raises: for invalid names, from the system, and from the HTTP library
    that it uses."""
    from huggingface_hub import errors

    return errors.HFValidationError, errors.HTTPError, OSError


def _explain(repo: str, error: Exception) -> UserError:
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return UserError(
            f"The hub model {repo} is gated.",
            why="it is available only to users who have accepted its terms and are logged in.",
            do="ask for access on the model's page, run `hf auth login`, and try again",
        )
    if isinstance(error, (RepositoryNotFoundError, HFValidationError)):
        return UserError(
            f"There is no hub model {repo}.",
            why="the hub does not know that name, or it is private and you are not logged in.",
            do="check the spelling (org/name), or run `hf auth login` if the model is private",
        )
    cause = error.__cause__ or error
    text = str(cause).strip() or type(cause).__name__
    return unreachable(repo, text.splitlines()[0])
