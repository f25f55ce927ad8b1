"""Download models from the Hugging Face hub into the hub's own cache: safetensors, config and tokenizer files.

The hub's library downloads in threads that ignore Ctrl-C, so it runs in a child process that can be killed.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from crosstune.core.errors import UserError
from crosstune.files.hub_connection import WAIT_S, offline_if_unreachable
from crosstune.models.llama_layout import CONFIG
from crosstune.models.staged import Progress, disk_space, silent

# The child uses the parent's sys.path to import crosstune.
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from crosstune.models.hub import main; main()"
)
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
            [sys.executable, "-c", _CHILD, json.dumps(sys.path), repo],
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
