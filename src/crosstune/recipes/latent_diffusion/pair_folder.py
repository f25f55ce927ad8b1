"""Read and write a folder of (text, vector) pairs: memory-mapped arrays behind a manifest with hashes."""

from __future__ import annotations

import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from crosstune.core.errors import LIBRARY_FAULTS, UserError
from crosstune.files.atomic_files import put_in_place, remove_abandoned, staging_folder
from crosstune.files.json_fields import FLAG, OBJECT, TEXT, check_fields, map_of, object_with, whole
from crosstune.files.json_files import read_object, write_json
from crosstune.files.outputs import check_output_name
from crosstune.files.plain_files import MissingFile, UnreadableFile, file_sha256, open_plain, read_plain
from crosstune.files.run_lock import check_place
from crosstune.models.file_hashes import sha256_of_all
from crosstune.recipes.latent_diffusion.texts import ChosenTexts, WriteOptions, clean
from crosstune.recipes.latent_diffusion.vocabulary import Vocabulary, load_vocabulary

MANIFEST = "manifest.json"
FORMAT = "crosstune-latents"
VERSION = 1
SPLITS = ("train", "validation")
TEXTS_LIMIT = 8 << 30
DTYPES = {"fp32": np.float32, "fp16": np.float16}
_ROWS_AT_ONCE = 65_536
NUMPY_FAULTS = (*LIBRARY_FAULTS, SyntaxError, EOFError, tokenize.TokenError, zipfile.BadZipFile, zlib.error)
"""Errors that numpy raises for a damaged or pickled file."""
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
    """The rows of one split."""

    tokens: NDArray[Any]
    """(rows, max_tokens), padded with 0."""
    lengths: NDArray[Any]
    latents: NDArray[Any]
    """(rows, dim), each of norm 1."""
    text_file: Path
    first: int = 0
    """Index of the first row in the split."""

    def __len__(self) -> int:
        return len(self.lengths)

    def part(self, start: int, stop: int) -> Pairs:
        rows = slice(start, stop)
        return Pairs(
            tokens=self.tokens[rows],
            lengths=self.lengths[rows],
            latents=self.latents[rows],
            text_file=self.text_file,
            first=self.first + start,
        )

    @cached_property
    def texts(self) -> list[str]:
        """The original texts, one for each row."""
        lines = read_plain(self.text_file, limit=TEXTS_LIMIT).decode("utf-8").splitlines()
        lines = lines[self.first : self.first + len(self)]
        if len(lines) < len(self):
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

    def rows_of(self, split: str, count: int) -> Pairs:
        """Return the first `count` rows of a split, or all if it is negative; none if the split is missing."""
        pairs = self.splits.get(split, self.splits["train"].part(0, 0))
        return pairs.part(0, count if count >= 0 else len(pairs))

    def identity(self, split: str) -> str:
        """Return the hashes of the files of a split."""
        names = sorted(name for name in self.manifest["files"] if name.startswith(f"{split}/"))
        return ":".join(self.manifest["files"][name]["sha256"] for name in names)


def is_pair_folder(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def open_pairs(folder: Path) -> PairFolder:
    """Open a folder of pairs; raise if a file is missing, changed or has an unexpected shape."""
    manifest = _read_manifest(folder)
    _check_files(folder, manifest["files"])
    vocabulary = load_vocabulary(folder)
    if vocabulary.digest != manifest["tokenizer_sha256"]:
        raise _damaged(folder, "tokenizer.json is not the tokenizer of the tokens")
    splits = {name: _open_split(folder, name, manifest) for name in manifest["splits"]}
    for name, pairs in splits.items():
        check_vectors(pairs.latents, source=f"{folder / name / 'latents.npy'}")
        if len(pairs) and int(pairs.tokens.max()) >= vocabulary.size:
            raise _damaged(folder, f"{name}/tokens.npy has token ids beyond the vocabulary")
    return PairFolder(folder=folder, manifest=manifest, splits=splits, vocabulary=vocabulary)


def load_array(path: Path) -> NDArray[Any]:
    """Map an .npy file into memory, without pickle."""
    with open_plain(path):  # numpy would wait for the writer of a pipe
        pass
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except NUMPY_FAULTS as error:
        raise UnreadableFile(path, f"it is not a plain .npy array ({str(error)[:200]})") from error
    if not isinstance(found, np.ndarray):
        raise UnreadableFile(path, "it is not a plain .npy array")
    return found


def check_vectors(latents: NDArray[Any], *, source: str) -> None:
    """Raise unless every vector is finite and has norm 1 within the rounding of fp16."""
    error = np.abs(vector_norms(latents, source=source)[:, 0] - 1)
    if error.max(initial=0) > 0.01:
        raise UserError(
            f"The vectors of {source} cannot be used.",
            why=f"the norm of vector {error.argmax()} differs from 1 by {error.max():.4g}.",
            do="normalize the vectors by importing them with `crosstune latents build`",
        )


def vector_norms(latents: NDArray[Any], *, source: str) -> NDArray[np.float32]:
    """Return the norms as a column; raise for a vector that is zero or not finite."""
    norms = np.zeros((len(latents), 1), np.float32)
    with np.errstate(over="ignore"):
        for part in _parts(len(latents)):
            norms[part] = np.linalg.norm(np.asarray(latents[part], np.float32), axis=1, keepdims=True)
    bad = ~np.isfinite(norms[:, 0]) | (norms[:, 0] == 0)
    if bad.any():
        raise UserError(
            f"The vectors of {source} cannot be used.",
            why=f"the norm of vector {bad.argmax()} is {norms[bad.argmax(), 0]:g}.",
            do="embed the texts again: crosstune latents build",
        )
    return norms


def count_changed(norms: NDArray[np.float32]) -> int:
    """Return the number of norms that are not 1."""
    return int((np.abs(norms - 1) > 1e-3).sum())


def _parts(count: int) -> Iterator[slice]:
    return (slice(start, start + _ROWS_AT_ONCE) for start in range(0, count, _ROWS_AT_ONCE))


def check_counts(texts: Sequence[str], latents: NDArray[Any], *, source: str) -> None:
    """Raise unless there is a vector for each text."""
    if latents.ndim != 2 or latents.dtype.kind != "f" or not latents.shape[1]:
        raise UserError(
            f"The vectors of {source} cannot be used.",
            why=f"they are {latents.dtype} {list(latents.shape)}; each text needs a row of floating-point numbers.",
        )
    if len(texts) != len(latents):
        raise UserError(
            f"{source} has {len(texts):,} texts and {len(latents):,} vectors.",
            why="each text needs its own vector.",
            do="embed the texts again: crosstune latents build",
        )


def check_out(folder: Path) -> None:
    """Raise if pairs cannot be written to a folder: it has other files, or cannot be created."""
    check_output_name(folder, option="out")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is not a folder.", do="pass a different --out FOLDER")
    if folder.exists() and not is_pair_folder(folder) and any(folder.iterdir()):
        raise UserError(
            f"{folder} is not empty and contains no pairs.",
            do="pass a different --out FOLDER, or remove it yourself",
        )
    try:
        check_place(folder)
    except UserError as error:
        raise UserError(
            f"Pairs cannot be written to {folder}.", why=error.why, do="pass a different --out FOLDER"
        ) from error


class EmbeddedTexts(NamedTuple):
    """Texts with their vectors, before they are written."""

    texts: Sequence[str]
    latents: NDArray[Any]
    chosen: ChosenTexts
    tokenizer_folder: Path
    encoder: Mapping[str, Any]
    source: str
    """The data's name in errors."""


def write_pairs(folder: Path, made: EmbeddedTexts, *, options: WriteOptions) -> dict[str, Any]:
    """Write the chosen pairs of each split; return the manifest.

    An existing folder of pairs is replaced only by a complete new one.
    """
    texts, latents, chosen = made.texts, made.latents, made.chosen
    check_counts(texts, latents, source=made.source)
    check_out(folder)
    norms, vocabulary = vector_norms(latents, source=made.source), chosen.vocabulary
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(folder.parent)
    with staging_folder(folder) as stage:
        new = stage / "pairs"
        new.mkdir()
        vocabulary.save(new, tokenizer_folder=made.tokenizer_folder)
        for split, rows in chosen.splits.items():
            target = new / split
            target.mkdir()
            tokens = vocabulary.reduce(chosen.tokens[split])
            dtype = np.uint16 if int(tokens.ids.max(initial=0)) < 2**16 else np.uint32
            np.save(target / "tokens.npy", tokens.stack(width=options.max_tokens, dtype=dtype))
            np.save(target / "lengths.npy", tokens.lengths.astype(np.int32))
            stored, shape = np.dtype(DTYPES[options.dtype]), (len(rows), latents.shape[1])
            header = {"descr": np.lib.format.dtype_to_descr(stored), "fortran_order": False, "shape": shape}
            # Not mapped into memory: on a full disk the system would end the process.
            with (target / "latents.npy").open("wb") as file:
                np.lib.format.write_array_header_1_0(file, header)
                for part in _parts(len(rows)):
                    vectors = np.asarray(latents[rows[part]], np.float32) / norms[rows[part]]
                    file.write(vectors.astype(stored).tobytes())
            lines = "".join(f"{clean(texts[row])}\n" for row in rows.tolist())
            (target / "texts.txt").write_text(lines, encoding="utf-8")
        files = sorted(path for path in new.rglob("*") if path.is_file())
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "dim": int(latents.shape[1]),
            "max_tokens": options.max_tokens,
            "splits": {split: len(rows) for split, rows in chosen.splits.items()},
            "vocabulary": vocabulary.size,
            "encoder": dict(made.encoder),
            "tokenizer_sha256": vocabulary.digest,
            "normalised": True,
            "vectors_normalised_here": count_changed(norms),
            "left_out": dict(chosen.left_out),
            "files": {
                path.relative_to(new).as_posix(): {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
                for path in files
            },
        }
        write_json(new / MANIFEST, manifest)
        put_in_place(new, folder, aside=stage / "replaced")
    return manifest


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = read_object(path)
    except MissingFile as error:
        raise UserError(
            f"{folder} is not a folder of (text, vector) pairs.",
            why=f"{MANIFEST} is missing.",
            do="make one: crosstune latents build TEXTS --out FOLDER; it also imports the original layouts",
        ) from error
    check_fields(manifest, _FIELDS, source=path, required=tuple(_FIELDS))
    if manifest["format"] != FORMAT or manifest["version"] != VERSION:
        raise UserError(
            f"{path} has the format {manifest['format']} {manifest['version']}.",
            why=f"this version of crosstune reads {FORMAT} {VERSION}.",
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
        f"The pairs folder {folder} is damaged.",
        why=f"{why}.",
        do="build it again: crosstune latents build",
    )
