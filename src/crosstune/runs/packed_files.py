"""Find the files that a run's options name, to pack them with the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstune.checkpoint.archive import LISTED_OPTIONS
from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.data.dataset_list import parse_dataset
from crosstune.models.adapter_files import TOKENIZER_FILES
from crosstune.runs.resume import KEPT_FILES

DATA_LIMIT = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class PackedFiles:
    files: Mapping[str, Path]
    """Name in the folder `data` of the archive -> file."""
    options: Mapping[str, Any]
    """Option -> the place of its file or folder in the archive, or one entry for each of several data sources."""


def pack_files(config: Config, *, with_data: bool) -> PackedFiles:
    """Return the local files of the options that name some; hub and bundled data are not included."""
    files: dict[str, Path] = {}
    options: dict[str, Any] = {}
    for option in (*(LISTED_OPTIONS if with_data else ()), *KEPT_FILES, "tokenizer"):
        value = getattr(config, option)
        if not value:
            continue
        names = parse_dataset(value) if option in LISTED_OPTIONS else []
        if len(names) > 1:
            options[option] = []
            for number, entry in enumerate(names, start=1):
                found = _files(entry.name, prefix=f"{option}-{number}")
                files |= found
                place = {"file": _place(found)} if found else {"name": entry.name}
                options[option].append(place | {"weight": entry.weight})
            continue
        found = _files(names[0].name if names else value, prefix=option)
        files |= found
        options |= {option: _place(found)} if found else {}
    return PackedFiles(files=files, options=options)


def _files(name: str, *, prefix: str) -> dict[str, Path]:
    path = Path(name).expanduser()
    if not path.exists():
        return {}
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    if prefix == "tokenizer":  # the folder may be that of a whole model
        files = [file for file in files if file.name in TOKENIZER_FILES and file.parent == path]
    total = sum(file.stat().st_size for file in files)
    if total > DATA_LIMIT:
        raise UserError(
            f"The data in {path} is too large for the archive ({total / 1e9:.1f} GB).",
            do="pass --without_data, and give its path there with --dataset",
        )
    return {f"{prefix}-{file.relative_to(path.parent).as_posix()}": file for file in files}


def _place(files: Mapping[str, Path]) -> str:
    return f"data/{Path(next(iter(files))).parts[0]}"
