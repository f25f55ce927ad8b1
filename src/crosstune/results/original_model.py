"""Find and check the original weights of a quantized folder, from its record or from --original."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crosstune.core.errors import UserError
from crosstune.models.folder import check_folder
from crosstune.models.identity import identity, source_identity
from crosstune.models.locate import ModelFolder
from crosstune.models.quantized_folder import FolderQuantization, dense_shapes

NO_ORIGINAL = "none"
NOT_THE_ORIGINAL = 1.0
"""Relative error from which two sets of weights are unrelated."""


def find_original(recorded: Mapping[str, Any] | None) -> Path | None:
    """Return the recorded folder of the original weights, if it still exists unchanged."""
    if recorded is None:
        return None
    path = Path(recorded["path"])
    if not (path / "config.json").is_file() or identity(path)["sha256"] != recorded["identity"]:
        return None
    return path


def choose_original(
    asked: str | None, model: ModelFolder, held: FolderQuantization | None, *, force: bool
) -> Path | None:
    """Return the folder of the weights before quantization, from --original or the record; None for a dense folder and for a
    conversion from the dequantized weights."""
    if held is None or asked == NO_ORIGINAL:
        return None
    if asked is None:
        return find_original(held.original)
    folder = Path(asked).expanduser().absolute()
    check_folder(folder)
    reason = _other_shapes(model.path, folder, held) or ("" if force else _other_weights(model, folder, held))
    if reason:
        raise not_the_original(folder, str(model.path), why=reason)
    return folder


def not_the_original(folder: str | Path, model: str, *, why: str) -> UserError:
    """Return the error for a folder that does not hold the original weights."""
    return UserError(
        f"{folder} does not hold the original weights of {model}.",
        why=why,
        do="name the right folder with --original, or leave it out",
    )


def original_record(
    model: ModelFolder, held: FolderQuantization | None, original: Path | None
) -> Mapping[str, Any] | None:
    """Return name, path and identity of a result's original weights; if they are not here, the folder's own record."""
    folder = model.path if held is None else original
    if folder is None:
        return held.original if held is not None else None
    name = model.name if held is None else str(folder)
    return {"name": name, "path": str(folder), "identity": identity(folder)["sha256"]}


def _other_shapes(ours: Path, folder: Path, held: FolderQuantization) -> str:
    """Describe the first weight whose shape differs; empty when all match. Weights renamed by mlx-lm are skipped."""
    here, there = dense_shapes(ours) or {}, dense_shapes(folder)
    if there is None:
        return "its weights are packed in an unsupported way."
    names = [name for name in sorted(here) if held.spec.quantizer != "mlx" or name in there]
    wrong = [name for name in names if there.get(name) != here[name]]
    return f"{wrong[0]} is {there.get(wrong[0])} there and {here[wrong[0]]} here." if wrong else ""


def _other_weights(model: ModelFolder, folder: Path, held: FolderQuantization) -> str:
    """Describe how the recorded identity differs from the folder's; empty when it matches."""
    known, found = (held.original or {}).get("identity"), identity(folder)["sha256"]
    source = source_identity(model.path)["weights"]
    if known is None and source != identity(model.path)["weights_sha256"]:
        known, found = source, source_identity(folder)["weights"]
    if known in (None, found):
        return ""
    return f"the record names weights with the identity {known[:12]}, these have {found[:12]}."
