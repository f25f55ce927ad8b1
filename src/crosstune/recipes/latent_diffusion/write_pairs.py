"""Write a folder of (text, vector) pairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.core.atomic_files import put_in_place, staging_folder
from crosstune.core.disk import file_sha256
from crosstune.core.errors import UserError
from crosstune.core.json_files import write_json
from crosstune.core.run_lock import check_place
from crosstune.recipes.latent_diffusion.choose_rows import Chosen, WriteOptions
from crosstune.recipes.latent_diffusion.pair_folder import (
    FORMAT,
    MANIFEST,
    VERSION,
    is_pair_folder,
)
from crosstune.recipes.latent_diffusion.splits import check_no_overlap, clean
from crosstune.recipes.latent_diffusion.token_rows import TokenRows

Array = NDArray[Any]
DTYPES = {"fp32": np.float32, "fp16": np.float16}
_ROWS_AT_ONCE = 65_536


@dataclass(frozen=True, kw_only=True)
class Written:
    folder: Path
    manifest: Mapping[str, Any]


def normalise_vectors(latents: Array, *, source: str) -> tuple[Array, int]:
    """Return the vectors with norm 1, and how many had another norm; raise for one that has none."""
    norms = vector_norms(latents, source=source)
    return _divide(latents, norms), _count_changed(norms)


def vector_norms(latents: Array, *, source: str) -> Array:
    """Return the norm of each vector, as a column; raise for one that has none."""
    norms = np.zeros((len(latents), 1), np.float32)
    with np.errstate(over="ignore"):
        for part in _parts(len(latents)):
            norms[part] = np.linalg.norm(np.asarray(latents[part], np.float32), axis=1, keepdims=True)
    extreme = ~np.isfinite(norms[:, 0]) | (norms[:, 0] == 0)
    if extreme.any():  # the squares may be too large or too small, and not the vector
        norms = norms.astype(np.float64)
        with np.errstate(over="ignore"):
            vectors = np.asarray(latents[extreme], np.float32)
        norms[extreme] = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    if not np.isfinite(norms).all():
        row = int(np.nonzero(~np.isfinite(norms[:, 0]))[0][0])
        raise UserError(
            f"The vectors of {source} cannot be used.", why=f"vector {row} holds a value that is not finite."
        )
    if (norms == 0).any():
        row = int(np.nonzero(norms[:, 0] == 0)[0][0])
        raise UserError(
            f"The vectors of {source} cannot be used.", why=f"vector {row} is zero, which has no direction."
        )
    return norms


def _divide(latents: Array, norms: Array) -> NDArray[np.float32]:
    return (np.asarray(latents, np.float32) / norms).astype(np.float32)


def _count_changed(norms: Array) -> int:
    return int((np.abs(norms - 1) > 1e-3).sum())


def _parts(count: int) -> Iterator[slice]:
    return (slice(start, start + _ROWS_AT_ONCE) for start in range(0, count, _ROWS_AT_ONCE))


def check_counts(texts: Sequence[str], latents: Array, *, source: str) -> None:
    if latents.ndim != 2 or latents.dtype.kind != "f" or not latents.shape[1]:
        raise UserError(
            f"The vectors of {source} cannot be used.",
            why=f"they are {latents.dtype} {list(latents.shape)}; a row of floating-point numbers for each text is needed.",
        )
    if len(texts) != len(latents):
        raise UserError(
            f"{source} has {len(texts):,} texts and {len(latents):,} vectors.",
            why="each text needs its own vector.",
            do="embed the texts again: crosstune latents build",
        )


def check_out(folder: Path) -> None:
    """Raise if pairs cannot be written to this folder: it holds other things, or cannot be made."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is not a folder.", do="give another --out FOLDER")
    if folder.exists() and not is_pair_folder(folder) and any(folder.iterdir()):
        raise UserError(
            f"{folder} is not empty and holds no pairs.",
            do="give another --out FOLDER, or remove it yourself",
        )
    try:
        check_place(folder)
    except UserError as error:
        raise UserError(
            f"Pairs cannot be written to {folder}.", why=error.why, do="give another --out FOLDER"
        ) from error


def write_pairs(
    folder: Path,
    texts: Sequence[str],
    latents: Array,
    *,
    chosen: Chosen,
    tokenizer_folder: Path,
    encoder: Mapping[str, Any],
    options: WriteOptions,
    source: str,
) -> Written:
    """Write the chosen pairs of each split; an existing folder of pairs is replaced when the new one is complete.

    `source` names the data in errors.
    """
    check_counts(texts, latents, source=source)
    check_out(folder)
    norms = vector_norms(latents, source=source)
    splits, vocabulary = chosen.splits, chosen.vocabulary
    texts_of = {split: [clean(texts[row]) for row in found.tolist()] for split, found in splits.items()}
    check_no_overlap(texts_of)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with staging_folder(folder) as stage:
        new = stage / "pairs"
        new.mkdir()
        vocabulary.save(new, tokenizer_folder=tokenizer_folder)
        for split, found in splits.items():
            (new / split).mkdir()
            _write_tokens(new / split, vocabulary.reduce(chosen.tokens[split]), width=options.max_tokens)
            _write_vectors(new / split, latents, norms, rows=found, dtype=np.dtype(DTYPES[options.dtype]))
            lines = "".join(f"{text}\n" for text in texts_of[split])
            (new / split / "texts.txt").write_text(lines, encoding="utf-8")
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "dim": int(latents.shape[1]),
            "max_tokens": options.max_tokens,
            "splits": {split: len(found) for split, found in splits.items()},
            "vocabulary": vocabulary.size,
            "encoder": dict(encoder),
            "tokenizer_sha256": vocabulary.digest,
            "normalised": True,
            "vectors_normalised_here": _count_changed(norms),
            "left_out": dict(chosen.left_out),
            "files": _files(new),
        }
        write_json(new / MANIFEST, manifest)
        put_in_place(new, folder, aside=stage / "replaced")
    return Written(folder=folder, manifest=manifest)


def _write_tokens(folder: Path, rows: TokenRows, *, width: int) -> None:
    dtype = np.uint16 if int(rows.ids.max(initial=0)) < 2**16 else np.uint32
    np.save(folder / "tokens.npy", rows.stack(width=width, dtype=dtype))
    np.save(folder / "lengths.npy", rows.lengths.astype(np.int32))


def _write_vectors(
    folder: Path, latents: Array, norms: Array, *, rows: NDArray[np.int64], dtype: np.dtype[Any]
) -> None:
    """Write some of the vectors with norm 1, a part at a time: millions of them are not held twice."""
    header = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": (len(rows), latents.shape[1]),
    }
    with (folder / "latents.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for part in _parts(len(rows)):
            file.write(_divide(latents[rows[part]], norms[rows[part]]).astype(dtype).tobytes())


def _files(folder: Path) -> dict[str, dict[str, Any]]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        for path in paths
    }
