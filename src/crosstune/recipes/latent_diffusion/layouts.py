"""Read and write the original trainer's layouts of pairs: .npz and .npy files, or .jsonl files with latent shards."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.core.errors import UserError
from crosstune.files.atomic_files import put_new, remove_abandoned, staging_folder
from crosstune.files.json_fields import TEXT, check_fields, whole
from crosstune.files.json_files import object_of, to_json, write_json
from crosstune.files.outputs import check_output_folder
from crosstune.files.plain_files import UnreadableFile, open_plain
from crosstune.recipes.latent_diffusion.pair_folder import NUMPY_FAULTS, PairFolder, load_array

SHARD_ROWS = 100_000
_SPLIT_FILES = {"train": "train_data.jsonl", "validation": "validation_data.jsonl"}
_ROW = {"text": TEXT, "shard": TEXT | whole(0), "idx": whole(0)}
_LONGEST_LINE = 1 << 22
_LARGEST_ROW = 1 << 26
"""Most bytes of an unpacked .npz file."""


@dataclass(kw_only=True)
class Imported:
    """Pairs of an original layout: texts, or ids of the original tokenizer; vectors and splits."""

    latents: NDArray[Any]
    texts: list[str] = field(default_factory=list)
    token_ids: list[NDArray[np.int32]] = field(default_factory=list)
    splits: dict[str, list[int]] = field(default_factory=dict)


def find_layout(folder: Path) -> str | None:
    """Return the original layout of a folder: files, shards, or None."""
    if (folder / _SPLIT_FILES["train"]).is_file():
        return "shards"
    if (folder / "tokens").is_dir() and (folder / "latents").is_dir():
        return "files"
    return None


def read_layout(folder: Path) -> Imported:
    """Read a folder in one of the original layouts."""
    found = _read_shards(folder) if find_layout(folder) == "shards" else _read_files(folder)
    if not found.splits.get("train"):
        raise UserError(
            f"{folder} contains no training pairs.",
            why="tokens/train has no *_tokens.npz, or train_data.jsonl no row.",
        )
    return found


def _read_files(folder: Path) -> Imported:
    """Read tokens/SPLIT/NAME_tokens.npz {input_ids, attention_mask} and latents/SPLIT/NAME.npy."""
    rows: list[NDArray[np.int32]] = []
    vectors: list[NDArray[Any]] = []
    splits: dict[str, list[int]] = {}
    for place, split in (("train", "train"), ("val", "validation"), ("validation", "validation")):
        token_folder, latent_folder = folder / "tokens" / place, folder / "latents" / place
        if not token_folder.is_dir():
            continue
        names = sorted(path.name.removesuffix("_tokens.npz") for path in token_folder.glob("*_tokens.npz"))
        others = {path.stem for path in latent_folder.glob("*.npy")}
        if unpaired := sorted(set(names) ^ others):
            raise UserError(
                f"{len(names):,} texts and {len(others):,} vectors in {folder} do not pair.",
                why=f"{unpaired[0]} and {len(unpaired) - 1:,} others have only one of the two files.",
                do="add the missing files, or remove the unpaired files",
            )
        for name in names:
            splits.setdefault(split, []).append(len(rows))
            rows.append(read_tokens(token_folder / f"{name}_tokens.npz"))
            vectors.append(read_vector(latent_folder / f"{name}.npy"))
    return Imported(latents=_stack(vectors, folder), token_ids=rows, splits=splits)


def read_tokens(path: Path) -> NDArray[np.int32]:
    """Return the ids that the attention mask keeps."""
    try:
        with open_plain(path) as file, zipfile.ZipFile(file) as archive:
            if sum(member.file_size for member in archive.infolist()) > _LARGEST_ROW:
                raise ValueError(f"it unpacks to more than {_LARGEST_ROW:,} bytes")
            file.seek(0)
            with np.load(file, allow_pickle=False) as arrays:
                ids, mask = (np.asarray(arrays[name]).reshape(-1) for name in ("input_ids", "attention_mask"))
    except NUMPY_FAULTS as error:
        why = f"it is not an .npz file with input_ids and attention_mask ({str(error)[:200]})"
        raise UnreadableFile(path, why) from error
    kinds = ids.dtype.kind in "iu" and mask.dtype.kind in "iubf"
    if not kinds or ids.shape != mask.shape or not 0 <= ids.min(initial=0) <= ids.max(initial=0) < 2**31:
        raise UnreadableFile(path, "input_ids and attention_mask do not match")
    return ids[mask.astype(bool)].astype(np.int32)


def read_vector(path: Path) -> NDArray[Any]:
    vector = load_array(path)
    if vector.dtype.kind != "f" or not vector.ndim or not vector.size == vector.shape[-1] > 0:
        raise UnreadableFile(path, f"it contains {vector.dtype} {list(vector.shape)}, not one vector")
    return vector.reshape(-1).astype(np.float32)


def _stack(vectors: Sequence[NDArray[Any]], folder: Path) -> NDArray[Any]:
    dims = sorted({len(vector) for vector in vectors})
    if len(dims) > 1:
        raise UserError(
            f"The vectors in {folder} have several dimensions: {', '.join(map(str, dims))}.",
            why="a model needs vectors of one dimension.",
        )
    return np.stack(vectors) if vectors else np.zeros((0, 1), np.float32)


def _read_shards(folder: Path) -> Imported:
    """Read train_data.jsonl, validation_data.jsonl {text, shard, idx} and latent_shards/*.npy."""
    found = Imported(latents=np.zeros((0, 1), np.float32))
    shards: dict[str, NDArray[Any]] = {}
    vectors = []
    for split, file in _SPLIT_FILES.items():
        for place, row in _read_rows(folder / file):
            found.splits.setdefault(split, []).append(len(found.texts))
            found.texts.append(row["text"])
            name = row["shard"] if isinstance(row["shard"], str) else f"shard_{row['shard']:04d}.npy"
            if Path(name).name != name:
                raise UnreadableFile(place, f"{name} is not a file in latent_shards/")
            if name not in shards:
                shards[name] = load_array(folder / "latent_shards" / name)
            if shards[name].ndim != 2 or row["idx"] >= len(shards[name]):
                shape = list(shards[name].shape)
                raise UnreadableFile(place, f"it refers to vector {row['idx']} of {name}, of shape {shape}")
            vectors.append(np.asarray(shards[name][row["idx"]], np.float32))
    found.latents = _stack(vectors, folder)
    return found


def _read_rows(path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the rows of a file, if it exists, each with its place for errors."""
    if not path.is_file():
        return
    with open_plain(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), start=1):
            place = Path(f"{path}, line {number}")
            row = object_of(line, place)
            check_fields(row, _ROW, source=place, required=tuple(_ROW))
            yield place, row


def write_layout(pairs: PairFolder, folder: Path, *, layout: str) -> int:
    """Write the pairs in an original layout into a new folder; return their number."""
    check_output_folder(folder, option="out")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty.", do="pass a different --out FOLDER")
    write = _write_files if layout == "files" else _write_shards
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(folder.parent)
    with staging_folder(folder) as stage:
        write(pairs, stage / "layout")
        put_new(stage / "layout", folder)
    return sum(map(len, pairs.splits.values()))


def _write_files(pairs: PairFolder, folder: Path) -> None:
    """Write token .npz and latent .npy files, with the tokenizer's own ids."""
    for split, found in pairs.splits.items():
        place = "val" if split == "validation" else split
        tokens, latents = folder / "tokens" / place, folder / "latents" / place
        tokens.mkdir(parents=True)
        latents.mkdir(parents=True)
        for row, text in enumerate(found.texts):
            ids = np.zeros(pairs.max_tokens, np.int64)
            kept = pairs.vocabulary.tokenizer.rust.encode(text, add_special_tokens=False).ids
            ids[: len(kept)] = kept
            mask = (np.arange(pairs.max_tokens) < len(kept)).astype(np.int64)
            np.savez(tokens / f"{row:08d}_tokens.npz", input_ids=ids, attention_mask=mask)
            np.save(latents / f"{row:08d}.npy", np.asarray(found.latents[row], np.float32))


def _write_shards(pairs: PairFolder, folder: Path) -> None:
    """Write .jsonl files with latent shards."""
    shards = folder / "latent_shards"
    shards.mkdir(parents=True)
    number = 0
    for split, found in pairs.splits.items():
        with (folder / _SPLIT_FILES[split]).open("w", encoding="utf-8") as file:
            for start in range(0, len(found), SHARD_ROWS):
                part, name = slice(start, start + SHARD_ROWS), f"shard_{number:04d}.npy"
                np.save(shards / name, np.asarray(found.latents[part], np.float32))
                for row, text in enumerate(found.texts[part]):
                    file.write(to_json({"text": text, "shard": name, "idx": row}) + "\n")
                number += 1
    metadata = {
        "latent_dim": pairs.dim,
        "num_samples": sum(pairs.manifest["splits"].values()),
        "encoder": pairs.manifest["encoder"].get("name"),
        "shard_size": SHARD_ROWS,
    }
    write_json(folder / "metadata.json", metadata)
