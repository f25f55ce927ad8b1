"""Read datasets of the Hugging Face hub with `datasets`; dataset scripts are never run."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from crosstune.core.errors import UserError
from crosstune.data.read.files import INSTALL_DATA, RawRow
from crosstune.files.hub_connection import offline_if_unreachable

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

HELD_OUT_SPLITS = ("validation", "valid", "val", "dev", "test", "eval")


@dataclass(frozen=True, kw_only=True)
class HubPart:
    """One split of a hub dataset, memory-mapped by `datasets`."""

    repo: str
    split: str
    data: Dataset
    form: str = "auto"

    @property
    def name(self) -> str:
        return self.repo

    @property
    def size_bytes(self) -> int:
        return int(self.data.data.nbytes)

    def place(self, number: int) -> str:
        return f"Row {number} of {self.repo} ({self.split})"

    def digest(self) -> str:
        """Return the sha256 of the rows as JSON, independent of library versions."""
        total = hashlib.sha256()
        for found in self.rows():
            total.update(json.dumps(found.row, sort_keys=True, default=str).encode())
        return total.hexdigest()

    def rows(self) -> Iterator[RawRow]:
        size, total = self.size_bytes, len(self.data)
        for number, row in enumerate(self.data, start=1):
            yield RawRow(row, number, size * number // total)


def open_hub(repo: str, *, known: str) -> dict[str, HubPart]:
    """Return split name -> rows. `known` lists the known names, for the error about an unknown id."""
    data = _load(repo, known=known)
    features = {name: type(kind).__name__ for rows in data.values() for name, kind in rows.features.items()}
    if media := [name for name, kind in features.items() if kind in ("Image", "Audio", "Video")]:
        raise UserError(
            f"The dataset '{repo}' has columns that are not text: {', '.join(media)}.",
            why="this recipe reads text only.",
            do="use a text dataset, or save it without these columns",
        )
    return {str(split): HubPart(repo=repo, split=str(split), data=rows) for split, rows in data.items()}


def _load(repo: str, *, known: str) -> DatasetDict:
    try:
        import datasets
        from datasets.exceptions import DatasetNotFoundError, DatasetsError
    except ImportError as error:
        raise UserError(
            f"Cannot read the hub dataset '{repo}'.",
            why="it needs the `datasets` library.",
            do=f"run: {INSTALL_DATA}",
        ) from error
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    datasets.disable_progress_bars()
    unreached: str | None = None
    try:
        with _offline_if_unreachable() as unreached:
            return datasets.load_dataset(repo)
    except DatasetNotFoundError as error:
        gated = "gated" in str(error).lower()
        raise UserError(
            f"The dataset '{repo}' is gated." if gated else f"No dataset '{repo}'.",
            why=_line(error)
            if gated
            else f"it is neither a local file nor on the hub, or it is private: {_line(error)}",
            do=f"accept its terms at https://huggingface.co/datasets/{repo}, then run: hf auth login"
            if gated
            else f"pass the path of a file or folder, a hub id, or a known name: {known}",
        ) from error
    except (OfflineModeIsEnabled, ConnectionError, OSError) as error:
        raise UserError(
            f"The dataset '{repo}' cannot be fetched from the hub, and it is not available locally.",
            why=f"{unreached}." if unreached else _line(error),
            do="check the connection, or download it elsewhere and pass the path of its files",
        ) from error
    except (HfHubHTTPError, DatasetsError, ValueError, RuntimeError) as error:
        raise UserError(
            f"The dataset '{repo}' cannot be read.",
            why=_line(error),
            do="download its files and pass their path; datasets that need their own code are not supported",
        ) from error


@contextlib.contextmanager
def _offline_if_unreachable() -> Iterator[str | None]:
    """Restrict `datasets` to its cache in the `with` block if the hub cannot be reached; yield why."""
    import datasets

    with offline_if_unreachable() as reason:
        before, datasets.config.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE, reason is not None
        try:
            yield reason
        finally:
            datasets.config.HF_HUB_OFFLINE = before


def _line(error: Any) -> str:
    return " ".join(str(error).split())[:300]
