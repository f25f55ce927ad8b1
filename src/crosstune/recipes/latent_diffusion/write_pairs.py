"""Write a folder of (text, vector) pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.core.atomic_files import put_in_place, staging_folder
from crosstune.core.disk import file_sha256
from crosstune.core.errors import UserError
from crosstune.core.json_files import write_json
from crosstune.data.tokenizer import Tokenizer
from crosstune.recipes.latent_diffusion.pair_folder import (
    FORMAT,
    MANIFEST,
    VERSION,
    is_pair_folder,
    stack_rows,
)
from crosstune.recipes.latent_diffusion.splits import Divided, check_no_overlap, clean
from crosstune.recipes.latent_diffusion.vocabulary import Ids, Vocabulary, count_tokens, tokenize

Array = NDArray[Any]
DTYPES = {"fp32": np.float32, "fp16": np.float16}


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    max_tokens: int
    """The longest text that the model will have room for."""
    too_long: str = "error"
    """`error` or `drop`: refuse longer ones, or leave them out."""
    min_count: int = 1
    """Leave tokens that are rarer in the training split out of the vocabulary."""
    dtype: str = "fp32"


@dataclass(frozen=True, kw_only=True)
class Written:
    folder: Path
    manifest: Mapping[str, Any]


def normalise_vectors(latents: Array, *, source: str) -> tuple[Array, int]:
    """Return the vectors with norm 1, and how many had another norm; raise for one that has none."""
    with np.errstate(over="ignore"):
        latents = np.asarray(latents, np.float32)
        norms = np.linalg.norm(latents, axis=1, keepdims=True)
    extreme = ~np.isfinite(norms[:, 0]) | (norms[:, 0] == 0)
    if extreme.any():  # the squares may be too large or too small, and not the vector
        norms = norms.astype(np.float64)
        norms[extreme] = np.linalg.norm(latents[extreme].astype(np.float64), axis=1, keepdims=True)
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
    changed = int((np.abs(norms - 1) > 1e-3).sum())
    return (latents / norms).astype(np.float32), changed


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


def write_pairs(
    folder: Path,
    texts: Sequence[str],
    latents: Array,
    *,
    divided: Divided,
    tokenizer_folder: Path,
    encoder: Mapping[str, Any],
    options: WriteOptions,
    source: str,
    token_ids: Sequence[Ids] | None = None,
) -> Written:
    """Write the pairs of each split; an existing folder of pairs is replaced when the new one is complete.

    `source` names the data in errors. `token_ids` are the tokenizer's ids of the texts, where they are given and not to be made from the texts.
    """
    check_counts(texts, latents, source=source)
    if folder.exists() and not is_pair_folder(folder) and any(folder.iterdir()):
        raise UserError(
            f"{folder} is not empty and holds no pairs.",
            do="give another --out FOLDER, or remove it yourself",
        )
    latents, num_normalised = normalise_vectors(latents, source=source)
    tokenizer = Tokenizer.from_folder(tokenizer_folder)
    rows = tokenize(tokenizer, texts) if token_ids is None else token_ids
    splits, left_out = _within(rows, divided, options)
    vocabulary = Vocabulary(
        tokenizer=tokenizer,
        kept=count_tokens([rows[row] for row in splits["train"]], min_count=options.min_count),
    )
    check_no_overlap({split: [texts[row] for row in found] for split, found in splits.items()})
    folder.parent.mkdir(parents=True, exist_ok=True)
    with staging_folder(folder) as stage:
        new = stage / "pairs"
        new.mkdir()
        vocabulary.save(new, tokenizer_folder=tokenizer_folder)
        for split, found in splits.items():
            _write_split(
                new / split,
                [texts[r] for r in found],
                vocabulary.reduce_all([rows[r] for r in found]),
                latents[found],
                options,
            )
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "dim": int(latents.shape[1]),
            "max_tokens": options.max_tokens,
            "splits": {split: len(found) for split, found in splits.items()},
            "vocabulary": vocabulary.size,
            "encoder": dict(encoder),
            "tokenizer_sha256": tokenizer.digest,
            "normalised": True,
            "vectors_normalised_here": num_normalised,
            "left_out": divided.left_out | left_out,
            "files": _files(new),
        }
        write_json(new / MANIFEST, manifest)
        put_in_place(new, folder, aside=stage / "replaced")
    return Written(folder=folder, manifest=manifest)


def _within(
    rows: Sequence[Ids], divided: Divided, options: WriteOptions
) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Return the splits without texts of no token, and without those longer than the context if they are to be dropped."""
    limit = options.max_tokens
    long = [row for found in divided.splits.values() for row in found if len(rows[row]) > limit]
    if long and options.too_long == "error":
        raise UserError(
            f"{len(long):,} texts are longer than {limit} tokens.",
            why=f"the first is row {min(long)}, with {len(rows[min(long)])} tokens; a text cut short would not be that of its vector.",
            do=f"use --max_tokens {max(len(rows[row]) for row in long)}, or leave them out with --too_long drop",
        )
    splits = {
        split: [row for row in found if 0 < len(rows[row]) <= limit]
        for split, found in divided.splits.items()
    }
    if not splits.get("train"):
        raise UserError(f"No text has at most {limit} tokens.", do="use a larger --max_tokens")
    return splits, {"too_long": len(long)}


def _write_split(
    folder: Path, texts: Sequence[str], rows: Sequence[Ids], latents: Array, options: WriteOptions
) -> None:
    folder.mkdir()
    stacked = stack_rows(rows, width=options.max_tokens)
    highest = int(stacked.max(initial=0))
    np.save(folder / "tokens.npy", stacked.astype(np.uint16 if highest < 2**16 else np.uint32))
    np.save(folder / "lengths.npy", np.array([len(row) for row in rows], np.int32))
    np.save(folder / "latents.npy", latents.astype(DTYPES[options.dtype]))
    (folder / "texts.txt").write_text("".join(f"{clean(text)}\n" for text in texts), encoding="utf-8")


def _files(folder: Path) -> dict[str, dict[str, Any]]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        for path in paths
    }
