"""The manifest of a checkpoint: its fields, their validation, its encoding, and the seal (its hash)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from crosstune.core.errors import UserError, shown
from crosstune.core.quantization import BaseChoice, read_spec, wrong_spec
from crosstune.files.json_fields import NOTHING, OBJECT, TEXT, Rule, list_of, map_of, real, whole, wrong_field
from crosstune.files.json_files import parse_json, to_json

FORMAT = "crosstune-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
SEAL = "manifest.sha256"
WEIGHTS, MOMENTS, RANDOM = "weights.safetensors", "moments.safetensors", "random.safetensors"
MANIFEST_LIMIT = 64 * 2**20
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_STEP = re.compile(r"[0-9]{1,19}")

Fields = Mapping[str, Any]


class DamagedCheckpoint(UserError):
    """A checkpoint is truncated, changed, or not written by crosstune."""

    def __init__(self, folder: Any, why: str) -> None:
        super().__init__(
            f"The checkpoint {folder} is damaged.",
            why=why,
            do="use an older one (`crosstune checkpoint verify RUN` lists the valid ones); --resume auto finds it",
        )


class UnknownVersion(UserError):
    """A checkpoint has a format version that this version of crosstune cannot read."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of manifest.json: everything in a checkpoint except its arrays."""

    step: int
    created: str | None = None
    engine: str
    backend: str
    precision: str
    quantization: str | None
    """The quantization of the base."""
    base: Fields = field(default_factory=dict)
    """`outside_fp8`, known once the model is open; written at the top level."""
    method: str | None = None
    recipe: str | None = None
    identity: Fields
    """Compared when a run is resumed: see `runs.resume_identity`."""
    schedule: Fields
    data: Fields
    """The position in the data."""
    progress: Fields
    asked: Fields = field(default_factory=dict)
    """The options the user set."""
    options: Fields = field(default_factory=dict)
    """All options as resolved."""
    versions: Fields = field(default_factory=dict)
    resumed_from: Fields | None = None
    trainable: Fields = field(default_factory=dict)
    """Name -> dtype and shape of each trained array."""
    facts: Fields = field(default_factory=dict)
    """`SessionState.facts`."""
    files: Fields = field(default_factory=dict)
    """Name -> size and sha256 of each file."""
    extra: Fields = field(default_factory=dict)
    """Other fields, such as `imported`; kept but not read."""

    @property
    def base_choice(self) -> BaseChoice | None:
        """The recorded choice of quantized layers; None if there is none, as in older checkpoints."""
        spec = read_spec(self.identity.get("quantization"))
        if spec is None or not (self.base or spec.kept):
            return None
        groups = self.base.get("outside_fp8")
        return BaseChoice(
            quantizer=spec.quantizer,
            kept=spec.kept,
            outside_fp8=tuple(groups) if groups is not None else None,
        )

    def to_json(self) -> dict[str, Any]:
        named = {name: getattr(self, name) for name in _NAMES}
        return {"format": FORMAT, "format_version": VERSION, **named, **self.base, **self.extra}

    @classmethod
    def from_json(cls, data: Fields) -> Manifest:
        """Return the manifest with validated fields."""
        base = {name: data[name] for name in _BASE if name in data}
        known = {*_NAMES, *_BASE, "format", "format_version"}
        extra = {name: value for name, value in data.items() if name not in known}
        # Older versions wrote null for objects without entries.
        named = {name: data[name] for name in _NAMES if name in data}
        named = {name: {} if named[name] is None and name in _OBJECTS else named[name] for name in named}
        return cls(**named, base=base, extra=extra)


_BASE = ("outside_fp8",)
_OBJECTS = ("asked", "options", "versions")
_NAMES = tuple(item.name for item in fields(Manifest) if item.name not in ("base", "extra"))


def encode(manifest: Manifest) -> bytes:
    """Return the bytes of manifest.json. NaN becomes null."""
    return (to_json(manifest.to_json(), indent=1) + "\n").encode()


def seal(manifest: bytes) -> bytes:
    """Return the hash of the manifest as a line of sha256sum."""
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n".encode()


def decode(raw: bytes, *, seal_found: bytes, folder: Any) -> Manifest:
    """Return the manifest after checking its seal, version, fields and file names."""
    if seal_found != seal(raw):
        raise DamagedCheckpoint(folder, f"{MANIFEST} does not match {SEAL}")
    try:
        found = parse_json(raw)
    except ValueError as error:
        raise DamagedCheckpoint(folder, f"{MANIFEST} is not JSON: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise DamagedCheckpoint(folder, f"{MANIFEST} is not the manifest of a crosstune checkpoint")
    version = found.get("format_version")
    if type(version) is not int or version != VERSION:
        raise UnknownVersion(
            f"The checkpoint {folder} has format version {shown(version)}.",
            why=f"this version of crosstune reads version {VERSION}, and guessing could lose state.",
            do="use the version of crosstune that wrote it, or a newer one",
        )
    wrong = _wrong_manifest(found)
    if wrong is not None:
        raise DamagedCheckpoint(folder, f"{MANIFEST} is not valid: {wrong}")
    for name, facts in found["files"].items():
        if _FILE_NAME.fullmatch(name) is None or ".." in name or name in (MANIFEST, SEAL):
            raise DamagedCheckpoint(folder, f"{shown(name)} is not a plain file name")
        if wrong_field(facts, _FILE, required=tuple(_FILE)) is not None:
            raise DamagedCheckpoint(folder, f"{MANIFEST} has no valid size and hash for {name}")
    return Manifest.from_json(found)


def _by_step(rule: Rule) -> Rule:
    return Rule(
        f"an object with {rule.needs} for each step number",
        lambda value: map_of(rule).fits(value) and all(_STEP.fullmatch(step) for step in value),
    )


_COUNT = whole(0) | NOTHING
_NUMBER = real() | NOTHING
EVALUATIONS = _by_step(_NUMBER) | NOTHING
"""Step -> evaluation loss; null where it was not finite."""
_REQUIRED = {
    "step": whole(0),
    "engine": TEXT,
    "backend": TEXT,
    "precision": TEXT,
    "quantization": TEXT | NOTHING,
    "identity": OBJECT,
    "trainable": map_of(OBJECT),
    "schedule": OBJECT,
    "data": OBJECT,
    "facts": OBJECT,
    "progress": OBJECT,
    "files": map_of(OBJECT),
}
_OPTIONAL = {
    "created": TEXT | NOTHING,
    "method": TEXT | NOTHING,
    "recipe": TEXT | NOTHING,
    "outside_fp8": list_of(TEXT) | NOTHING,
    "asked": OBJECT | NOTHING,
    "options": OBJECT | NOTHING,
    "metadata": OBJECT | NOTHING,
}
_PARTS: Mapping[str, Mapping[str, Rule]] = {
    "identity": {
        "model": OBJECT,
        "order": OBJECT,
        "eval_data": TEXT | NOTHING,
        "trainable": OBJECT,
        "quantization": OBJECT | NOTHING,
        "optimizer": TEXT,
        "objective": OBJECT | NOTHING,
    },
    "identity.model": {"identity": TEXT | NOTHING, "name": TEXT | NOTHING, "config": TEXT | NOTHING},
    "identity.order": {"rows_per_step": whole(1) | NOTHING},
    "schedule": {"step": _COUNT, "num_steps": _COUNT, "extended": OBJECT | NOTHING},
    "schedule.extended": {"start": whole(0), "lr": _NUMBER},
    "data": {"rows_done": _COUNT},
    "facts": {"loss_scale": OBJECT | NOTHING},
    "facts.loss_scale": {"factor": real(0), "good_steps": whole(0)},
    "progress": {
        "steps": whole(0),
        "tokens": whole(0),
        "supervised_tokens": whole(0),
        "skipped": whole(0),
        "first_loss": _NUMBER,
        "final_loss": _NUMBER,
        "seconds": real(0),
        "wall_s": real(0),
        "peak_memory_bytes": whole(0),
        "eval_before": map_of(_NUMBER) | NOTHING,
        "evaluations": EVALUATIONS,
        "eval_metrics": _by_step(map_of(_NUMBER)) | NOTHING,
    },
    "options": {"batch_size": whole(1) | NOTHING, "world_size": whole(-1) | NOTHING},
}
_REQUIRED_IN_PARTS = {"identity.model": ("identity",), "facts.loss_scale": ("factor", "good_steps")}
_FILE = {
    "bytes": whole(0),
    "sha256": Rule("a hash", lambda value: isinstance(value, str) and bool(_SHA256.fullmatch(value))),
}


def _wrong_manifest(data: Fields) -> str | None:
    """Describe the first missing or wrong field; None if all are valid."""
    wrong = wrong_field(data, _REQUIRED | _OPTIONAL, required=tuple(_REQUIRED))
    for path, rules in _PARTS.items():
        if wrong is not None:
            return wrong
        part: Any = data
        for name in path.split("."):
            part = (part or {}).get(name)
        if part is not None:
            wrong = wrong_field(part, rules, required=_REQUIRED_IN_PARTS.get(path, ()), place=f"{path}.")
    return wrong or wrong_spec(data["identity"].get("quantization"))
