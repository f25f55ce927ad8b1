"""Read a folder of (text, vector) pairs: memory-mapped arrays behind a manifest with hashes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.core.errors import UserError
from crosstune.core.json_fields import FLAG, OBJECT, TEXT, check_fields, map_of, object_with, whole
from crosstune.core.json_files import read_object
from crosstune.core.plain_files import MissingFile, UnreadableFile, read_plain
from crosstune.models.file_hashes import sha256_of_all
from crosstune.recipes.latent_diffusion.vocabulary import Vocabulary, load_vocabulary

MANIFEST = "manifest.json"
FORMAT = "crosstune-latents"
VERSION = 1
SPLITS = ("train", "validation")
TEXTS_LIMIT = 8 << 30
_FIELDS = {
    "format": TEXT,
    "version": whole(1),
    "dim": whole(1, 2**20),
    "max_tokens": whole(1, 2**20),
    "splits": map_of(whole(0)),
    "encoder": OBJECT,
    "tokenizer_sha256": TEXT,
    "normalised": FLAG,
    "files": map_of(object_with({"bytes": whole(0), "sha256": TEXT})),
}


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """One split: token ids, their numbers, and vectors, all of one length."""

    tokens: NDArray[Any]
    """(rows, max_tokens), padded with 0."""
    lengths: NDArray[Any]
    latents: NDArray[Any]
    """(rows, dim), each of norm 1."""
    text_file: Path
    first: int = 0
    """The place of the first row in the split, where these are only some of its rows."""
    is_part: bool = False

    def __len__(self) -> int:
        return len(self.lengths)

    def part(self, start: int, stop: int) -> Pairs:
        """Return some of the rows."""
        return Pairs(
            tokens=self.tokens[start:stop],
            lengths=self.lengths[start:stop],
            latents=self.latents[start:stop],
            text_file=self.text_file,
            first=self.first + start,
            is_part=True,
        )

    @cached_property
    def texts(self) -> list[str]:
        """The original texts, one for each row."""
        lines = read_plain(self.text_file, limit=TEXTS_LIMIT).decode("utf-8").splitlines()
        if self.is_part:
            lines = lines[self.first : self.first + len(self)]
        if len(lines) != len(self):
            raise UnreadableFile(self.text_file, f"it has {len(lines):,} texts for {len(self):,} vectors")
        return lines


@dataclass(frozen=True, kw_only=True)
class PairFolder:
    folder: Path
    manifest: Mapping[str, Any]
    splits: Mapping[str, Pairs]
    vocabulary: Vocabulary

    @property
    def dim(self) -> int:
        return int(self.manifest["dim"])

    @property
    def max_tokens(self) -> int:
        return int(self.manifest["max_tokens"])

    def identity(self, split: str) -> str:
        """Return a hash of the arrays of a split, which does not depend on where the folder is."""
        names = sorted(name for name in self.manifest["files"] if name.startswith(f"{split}/"))
        return ":".join(self.manifest["files"][name]["sha256"] for name in names)


def is_pair_folder(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def open_pairs(folder: Path) -> PairFolder:
    """Open a folder that `crosstune latents build` wrote; raise if a file is missing, changed or of another shape."""
    manifest = _read_manifest(folder)
    _check_files(folder, manifest["files"])
    vocabulary = load_vocabulary(folder)
    if vocabulary.digest != manifest["tokenizer_sha256"]:
        raise _damaged(folder, "tokenizer.json is not the one that the tokens were made with")
    splits = {name: _open_split(folder, name, manifest) for name in manifest["splits"]}
    for name, pairs in splits.items():
        check_vectors(pairs.latents, source=f"{folder / name / 'latents.npy'}")
        if len(pairs) and int(pairs.tokens.max()) >= vocabulary.size:
            raise _damaged(folder, f"{name}/tokens.npy has token ids beyond the vocabulary")
    return PairFolder(folder=folder, manifest=manifest, splits=splits, vocabulary=vocabulary)


def load_array(path: Path, *, mapped: bool = True) -> NDArray[Any]:
    """Read an .npy file without pickle; memory-mapped unless asked otherwise."""
    try:
        found = np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
    except FileNotFoundError as error:
        raise MissingFile(path, "it is missing", do="check the path") from error
    except (ValueError, EOFError, OSError) as error:  # what numpy raises for a damaged or pickled file
        raise UnreadableFile(path, f"it is not a plain .npy array ({str(error)[:200]})") from error
    if not isinstance(found, np.ndarray):
        raise UnreadableFile(path, "it is not a plain .npy array")
    return found


def check_vectors(latents: NDArray[Any], *, source: str, chunk: int = 65_536) -> None:
    """Raise unless every vector is finite and of norm 1, up to the rounding of 16 bits."""
    for start in range(0, len(latents), chunk):
        block = np.asarray(latents[start : start + chunk], np.float32)
        norms = np.linalg.norm(block, axis=1)
        if not np.isfinite(norms).all():
            row = start + int(np.nonzero(~np.isfinite(norms))[0][0])
            raise UserError(
                f"{source} cannot be trained on.",
                why=f"vector {row} holds a value that is not finite.",
                do="embed the texts again: crosstune latents build",
            )
        if np.abs(norms - 1).max(initial=0) > 0.01:
            row = start + int(np.abs(norms - 1).argmax())
            raise UserError(
                f"{source} cannot be trained on.",
                why=f"vector {row} has the norm {norms[row - start]:.4g}, and a folder of pairs holds vectors of norm 1.",
                do="import the vectors with `crosstune latents build`, which normalises them and says so",
            )


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not folder.is_dir():
        raise UserError(
            f"There is no folder of pairs {folder}.",
            do="make one: crosstune latents build TEXTS --out FOLDER",
        )
    try:
        manifest = read_object(path)
    except MissingFile as error:
        raise UserError(
            f"{folder} is not a folder of (text, vector) pairs.",
            why=f"it has no {MANIFEST}.",
            do="make one: crosstune latents build TEXTS --out FOLDER; it also imports the original layouts",
        ) from error
    check_fields(manifest, _FIELDS, source=path, required=tuple(_FIELDS))
    if manifest["format"] != FORMAT or manifest["version"] != VERSION:
        raise UserError(
            f"{path} has the format {manifest['format']} {manifest['version']}.",
            why=f"this crosstune reads {FORMAT} {VERSION}.",
            do="build the folder again",
        )
    if unknown := sorted(set(manifest["splits"]) - set(SPLITS)):
        raise _damaged(folder, f"it has the split {unknown[0]}; there are {' and '.join(SPLITS)}")
    return manifest


def _check_files(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    paths = {name: folder / name for name in files}
    for name, path in paths.items():
        if Path(name).is_absolute() or ".." in Path(name).parts or path.is_symlink() or not path.is_file():
            raise _damaged(folder, f"{name} is missing")
        if path.stat().st_size != files[name]["bytes"]:
            raise _damaged(
                folder, f"{name} has {path.stat().st_size:,} bytes instead of {files[name]['bytes']:,}"
            )
    hashes = sha256_of_all(list(paths.values()))
    for name, path in paths.items():
        if hashes[path] != files[name]["sha256"]:
            raise _damaged(folder, f"the contents of {name} have changed")


def _open_split(folder: Path, name: str, manifest: Mapping[str, Any]) -> Pairs:
    rows, dim, width = manifest["splits"][name], manifest["dim"], manifest["max_tokens"]
    tokens, lengths, latents = (
        load_array(folder / name / f"{kind}.npy") for kind in ("tokens", "lengths", "latents")
    )
    for kind, array, shape, kinds in (
        ("tokens", tokens, (rows, width), "u"),
        ("lengths", lengths, (rows,), "iu"),
        ("latents", latents, (rows, dim), "f"),
    ):
        if array.shape != shape or array.dtype.kind not in kinds:
            raise _damaged(
                folder,
                f"{name}/{kind}.npy is {array.dtype} {list(array.shape)}, the manifest says {list(shape)}",
            )
    if rows and not (int(lengths.min()) >= 1 and int(lengths.max()) <= width):
        raise _damaged(folder, f"{name}/lengths.npy has lengths outside 1 to {width}")
    return Pairs(tokens=tokens, lengths=lengths, latents=latents, text_file=folder / name / "texts.txt")


def _damaged(folder: Path, why: str) -> UserError:
    return UserError(
        f"The folder of pairs {folder} is damaged.",
        why=f"{why}.",
        do="build it again: crosstune latents build",
    )
