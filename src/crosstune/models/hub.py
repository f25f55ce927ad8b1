"""Download models from the Hugging Face hub in a child process, into the hub's own cache."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

from crosstune.core.errors import UserError
from crosstune.core.hub_reach import WAIT_S, offline_if_unreachable
from crosstune.models.disk import DiskFullError
from crosstune.models.llama_layout import CONFIG
from crosstune.models.progress import Progress, silent

# The child uses the parent's sys.path to import crosstune.
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from crosstune.models.hub_download import main; main()"
)
_MOST_REASON_CHARS = 600


def fetch_from_hub(repo: str, *, progress: Progress = silent) -> Path:
    """Download a model into the hub's own cache and return its folder.

    The hub's library downloads in threads that ignore Ctrl-C, so it runs in a child process that can be killed.
    """
    command = [sys.executable, "-c", _CHILD, json.dumps(sys.path), repo]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            encoding="utf-8",
        )
        try:
            found = _read_messages(child, progress=progress)
        finally:
            if child.poll() is None:
                child.kill()
            child.wait()
        if found is None:
            raise unreachable(repo, f"the download ended with code {child.returncode}: {_last_lines(log)}")
    return found


def cached_config(repo: str) -> Path | None:
    """Return config.json of a hub model if the hub's cache has it; nothing is downloaded."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(repo, CONFIG)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def fetch_config(repo: str) -> Path | None:
    """Fetch config.json of a hub model into the hub's cache; None if the hub does not answer within seconds, or has no
    such model that is open to this user."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    with offline_if_unreachable() as reason:
        if reason is not None:
            return None
        try:
            return Path(hf_hub_download(repo, CONFIG, etag_timeout=WAIT_S))
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError):
            return None


def unreachable(repo: str, reason: str) -> UserError:
    return UserError(
        f"Cannot get the hub model {repo}.",
        why=f"the download failed and the model is not complete in the hub's cache ({reason}).",
        do="connect to the network (and unset HF_HUB_OFFLINE), or give the path of a model folder on this machine",
    )


def _read_messages(child: subprocess.Popen[str], *, progress: Progress) -> Path | None:
    """Read the child's messages until it reports the folder or an error; return None if it does neither."""
    assert child.stdout is not None
    for line in child.stdout:
        message = json.loads(line)
        if "progress" in message:
            progress(*message["progress"])
        elif "error" in message:
            kind = DiskFullError if message["full"] else UserError
            raise kind(message["error"], why=message["why"], do=message["do"])
        else:
            child.wait()
            return Path(message["path"])
    child.wait()
    return None


def _last_lines(log: IO[str]) -> str:
    log.seek(0)
    lines = [line.strip() for line in log.read().splitlines() if line.strip()]
    return " ".join(lines[-2:])[-_MOST_REASON_CHARS:] or "no output"
