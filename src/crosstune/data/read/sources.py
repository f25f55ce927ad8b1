"""Open a source of rows: a known name, a file, a folder of files, or a hub dataset.

Datasets of the hub are read with `datasets`; dataset scripts are never run.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosstune.core.errors import UserError, naming
from crosstune.core.names import nearest
from crosstune.data.named_datasets import BUNDLED, DUMMY, HUB_NAMES, HubName, RowsPart, known_names
from crosstune.data.read.files import INSTALL_DATA, SUFFIXES, FilePart, RawRow, file_part
from crosstune.files.hub_connection import offline_if_unreachable
from crosstune.files.paths import near_paths
from crosstune.files.plain_files import kind_of

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


# The shard number of a file in a split, as in `test-00000-of-00002` or `val_1`.
_SHARD = re.compile(r"([-_. ]\d+([-_. ]of[-_. ]\d+)?)+$")
_NAME_ENDS = re.compile(r"[-_. ]+")
_TRAINING_WORDS = ("train", "training")
_ABOUT_DATA = ("readme", "license", "licence", "notice", "copying", "citation", "changelog", "requirements")
_SYSTEM_FOLDER = "lost+found"
"""In the root of a disk, readable only by the administrator."""
MAX_FILES = 50_000
"""Maximum number of files and folders below a data folder."""


Part = FilePart | HubPart | RowsPart
"""One file or split of a source, read sequentially."""


def folder_of(part: Part) -> Path | None:
    """Return the folder of a data file, in which its pictures are; None for other data."""
    return part.path.parent if isinstance(part, FilePart) else None


def row_error(error: UserError, part: Part, number: int) -> UserError:
    """Return an error about a row that begins with the file and the row's number."""
    return UserError(f"{part.place(number)}: {error.message}", why=error.why, do=error.do)


def skipped_row(error: UserError, part: Part, number: int) -> str:
    """Return a row that cannot be read as a line of skipped_rows.jsonl."""
    reason = f"{error.message.rstrip('.')}: {error.why}" if error.why else error.message
    return json.dumps({"file": part.name, "line": number, "reason": reason})


@dataclass(frozen=True, kw_only=True)
class Source:
    """The rows to train on, and the source's own held-out rows."""

    name: str
    parts: tuple[Part, ...]
    held_out: tuple[Part, ...] = ()
    form: str = "auto"
    """The format of a known name, or of all parts after `split_by_format`."""
    columns: tuple[tuple[str, str], ...] = ()
    """Columns of the rows that were renamed, and their new names."""
    splits: bool = False
    """True for text files: examples longer than the context are split."""
    unused: tuple[str, ...] = ()
    """Files of other held-out splits; not read."""
    skips_bad: bool = False
    """Pass on rows that cannot be read, with their errors, to be counted and skipped."""
    samples: int = -1
    """The default number of rows of a known name; -1 for all."""

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    def own_held_out(self) -> Source:
        return replace(self, parts=self.held_out, held_out=())

    def digest(self) -> str:
        """Return the sha256 of the contents, independent of their location."""
        renamed = f" {self.columns}" if self.columns else ""
        return hashlib.sha256(
            "".join(f"{part.digest()}{renamed}" for part in self.parts).encode()
        ).hexdigest()

    def rows_of(self, part: Part) -> Iterator[RawRow]:
        if self.skips_bad and isinstance(part, FilePart):
            return part.rows(keep_bad=True)
        return part.rows()

    def rows(self) -> Iterator[tuple[Part, RawRow, int]]:
        """Yield every row, its columns renamed, with its part and the number of bytes of the source read so far."""
        before, columns = 0, dict(self.columns)
        for part in self.parts:
            for found in self.rows_of(part):
                if columns:
                    found = found._replace(row=rename(found.row, columns))
                yield part, found, before + found.end_byte
            before += part.size_bytes

    def place(self, number: int) -> str:
        """Return the file and line of a row by its number from 1, as the middle of a sentence."""
        part, found, _ = next(itertools.islice(self.rows(), number - 1, None))
        place = part.place(found.number)
        return place[0].lower() + place[1:] if place.startswith("Row ") else place


def open_source(name: str, *, needs_training: bool = True) -> Source:
    """Open one source of --dataset. A folder needs files to train on, unless it is opened only for evaluation."""
    with naming("dataset" if needs_training else "eval_dataset"):
        try:
            return _open(name, needs_training=needs_training)
        except OSError as error:
            raise UserError(
                f"'{name}' cannot be read.",
                why=f"{error.filename}: {error.strerror}.",
                do="pass a readable file, or a folder that contains only data files",
            ) from error


def _open(name: str, *, needs_training: bool) -> Source:
    if name in BUNDLED:
        parts = [RowsPart(name=name, loaded=BUNDLED[name](split)) for split in ("train", "test")]
        return Source(name=name, parts=(parts[0],), held_out=(parts[1],), form="messages")
    if name == DUMMY:
        return Source(name=name, parts=(), form=DUMMY)
    path = Path(name).expanduser()
    _check_kind(path)
    if path.is_file():
        return Source(name=name, parts=(file_part(path),))
    if path.is_dir():
        return _open_folder(name, path, needs_training=needs_training)
    if name not in HUB_NAMES and not _may_be_hub_id(name):
        raise _unknown(name)
    known = HUB_NAMES.get(name, HubName(repo=name, form="auto"))
    splits = open_hub(known.repo, known=", ".join(known_names()))
    return replace(_of_splits(name, splits), form=known.form, samples=known.samples)


def check_name(name: str) -> None:
    """Raise a UserError when a name cannot be a dataset, without opening it."""
    if not is_known(name):
        _check_kind(Path(name).expanduser())
    if not (is_known(name) or Path(name).expanduser().exists() or _may_be_hub_id(name)):
        raise _unknown(name)


def _check_kind(path: Path) -> None:
    """Raise a UserError for a pipe, a device or a broken link."""
    if os.path.lexists(path) and not (path.is_file() or path.is_dir()):
        do = "write the data to a file, and pass its path"
        raise UserError(f"{path} cannot be read as data.", why=f"it is {kind_of(path)}.", do=do)


def is_known(name: str) -> bool:
    return name in known_names()


def _may_be_hub_id(name: str) -> bool:
    """Return True if a name has the form `org/name` and is not a file path."""
    parts = name.split("/")
    return len(parts) == 2 and all(parts) and parts[0][0].isalnum() and Path(name).suffix not in SUFFIXES


def _of_splits(name: str, splits: dict[str, HubPart]) -> Source:
    train = splits.get("train") or (next(iter(splits.values())) if len(splits) == 1 else None)
    if train is None:
        raise UserError(f"The dataset '{name}' has no split named train.", why=f"it has {', '.join(splits)}.")
    held_out = [splits[split] for split in HELD_OUT_SPLITS if split in splits and splits[split] is not train]
    return Source(name=name, parts=(train,), held_out=tuple(held_out[:1]))


def _data_files(folder: Path) -> list[Path]:
    """Return the data files below a folder, sorted. Raise a UserError if there are too many files, as in a home folder, and
    an OSError for a folder that cannot be read, since its data would be missed."""

    def fail(error: OSError) -> None:
        raise error

    found: list[Path] = []
    num_seen = 0
    for place, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith((".", "_")) and name != _SYSTEM_FOLDER]
        num_seen += len(folders) + len(names)
        if num_seen > MAX_FILES:
            raise UserError(
                f"The folder {folder} contains more than {MAX_FILES:,} files and folders.",
                do="pass a folder that contains only data files, or one file",
            )
        found += [Path(place, name) for name in names if _is_data(Path(name))]
    for path in sorted(found):
        _check_kind(path)
    return sorted(found)


def _open_folder(name: str, folder: Path, *, needs_training: bool) -> Source:
    """Open all data files of a folder, sorted by name; files named after a held-out split are never trained on."""
    files = _data_files(folder)
    if not files:
        raise UserError(
            f"The folder {folder} contains no data.",
            do=f"put files into it that end in {', '.join(SUFFIXES)}",
        )
    by_split: dict[str, list[FilePart]] = {}
    for path in files:
        by_split.setdefault(split_of(path.relative_to(folder)), []).append(file_part(path))
    if "train" not in by_split and needs_training:
        raise UserError(
            f"The folder {folder} contains no training data.",
            why=f"all of its files are named after a held-out split: {', '.join(sorted(by_split))}.",
        )
    used = next((split for split in HELD_OUT_SPLITS if split in by_split), "")
    others = [part for split, parts in by_split.items() if split not in ("train", used) for part in parts]
    return Source(
        name=name,
        parts=tuple(by_split.get("train", ())),
        held_out=tuple(by_split.get(used, ())),
        unused=tuple(str(part.path.relative_to(folder)) for part in others),
    )


def split_of(path: Path) -> str:
    """Return the split that a folder or file name begins or ends with, as in `validation/0.json` or
    `judge_test-00000-of-00002.parquet`; train by default."""
    for name in (*path.parts[:-1], path.stem):
        words = [word for word in _NAME_ENDS.split(_SHARD.sub("", name.lower())) if word]
        named = [word for word in (words[:1] + words[-1:]) if word in (*HELD_OUT_SPLITS, *_TRAINING_WORDS)]
        if named and named[0] in HELD_OUT_SPLITS:
            return named[0]
    return "train"


def _is_data(name: Path) -> bool:
    """Return True for the name of a data file: neither hidden nor documentation."""
    about = name.suffix.lower() == ".txt" and _NAME_ENDS.split(name.stem.lower())[0] in _ABOUT_DATA
    return name.suffix.lower() in SUFFIXES and not name.name.startswith((".", "_")) and not about


def _unknown(name: str) -> UserError:
    names = known_names()
    close = [*near_paths(name), *nearest(name, names)]
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return UserError(
        f"No dataset '{name}'.",
        why="it is neither a known name nor a local file or folder.",
        do=f"{hint}Pass the path of a {', '.join(SUFFIXES)} file or of a folder, a hub id (org/name), "
        f"or a known name: {', '.join(names)}.",
    )


def rename(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return a row with its columns renamed. A column that already had the new name is kept as `NAME (replaced)`, so
    that the report lists it as unused."""
    used = {source: target for source, target in columns.items() if source in row}
    taken = set(used.values()) - used.keys()
    kept = {
        (f"{name} (replaced)" if name in taken else name): value
        for name, value in row.items()
        if name not in used
    }
    return kept | {target: row[source] for source, target in used.items()}
