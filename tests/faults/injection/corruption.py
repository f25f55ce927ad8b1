"""Ways in which a checkpoint stops being what was written. Each must be seen before anything of it is used.

Not among them, because nothing without a secret key can see it: a forger who changes what a file holds or what the
manifest says of the run (its progress, its options) and then makes every hash, size, shape and the seal anew.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstune.checkpoint.folders import checkpoint_folders, name_of
from crosstune.checkpoint.manifest import MANIFEST, MOMENTS, RANDOM, SEAL, WEIGHTS, seal
from crosstune.checkpoint.read import newest_valid, open_checkpoint
from crosstune.core.errors import UserError
from injection.kills import Trial

FILES = (WEIGHTS, MOMENTS, RANDOM, MANIFEST, SEAL)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A checkpoint to be damaged, and an older one of the same run."""

    folder: Path
    older: Path
    rng: random.Random

    def file(self) -> Path:
        return self.folder / self.rng.choice(FILES)


def flip_bit(subject: Subject) -> None:
    path = subject.file()
    raw = bytearray(path.read_bytes())
    raw[subject.rng.randrange(len(raw))] ^= 1 << subject.rng.randrange(8)
    path.write_bytes(raw)


def cut_short(subject: Subject) -> None:
    path = subject.file()
    path.write_bytes(path.read_bytes()[: subject.rng.randrange(path.stat().st_size)])


def zero_block(subject: Subject) -> None:
    """As a disk leaves a block that was never written; somewhere where it was not zero."""
    path = subject.file()
    raw = bytearray(path.read_bytes())
    filled = [place for place, byte in enumerate(raw) if byte]
    start = subject.rng.choice(filled)
    end = min(start + subject.rng.choice([1, 64, 512, 4096]), len(raw))
    raw[start:end] = bytes(end - start)
    path.write_bytes(raw)


def append_bytes(subject: Subject) -> None:
    with subject.file().open("ab") as file:
        file.write(subject.rng.randbytes(subject.rng.choice([1, 8, 4096])))


def swap_files(subject: Subject) -> None:
    one, other = (subject.folder / name for name in subject.rng.sample(FILES, 2))
    spare = subject.folder / "spare"
    one.rename(spare)
    other.rename(one)
    spare.rename(other)


def file_of_older(subject: Subject) -> None:
    """A file of another checkpoint of the same run: right in form, wrong in contents."""
    name = subject.rng.choice([n for n in FILES if _differs(subject.folder / n, subject.older / n)])
    shutil.copyfile(subject.older / name, subject.folder / name)


def folder_of_older(subject: Subject) -> None:
    """A whole and valid checkpoint under the name of a later step."""
    shutil.rmtree(subject.folder)
    shutil.copytree(subject.older, subject.folder)


def delete_file(subject: Subject) -> None:
    subject.file().unlink()


def edit_manifest(subject: Subject) -> None:
    """One value of the manifest changed, with the old seal."""
    manifest = _read(subject)
    key = subject.rng.choice(sorted(set(manifest) - {"format"}))
    others = [value for value in (None, 7, "other", {}, []) if value != manifest[key]]
    manifest[key] = subject.rng.choice(others)
    _write(subject, manifest, sealed=False)


def edit_and_seal(subject: Subject) -> None:
    """One value of the manifest changed so that it no longer fits the files, with a new seal."""
    manifest = _read(subject)
    _misfit(manifest, subject.rng)
    _write(subject, manifest, sealed=True)


def edit_seal(subject: Subject) -> None:
    raw = (subject.folder / SEAL).read_bytes()
    digest, name = raw.split()
    swapped = name + b"  " + digest + b"\n"
    forms = [raw + raw, raw.strip(), raw.upper(), b"", swapped, digest + b"\n", b" " + raw]
    (subject.folder / SEAL).write_bytes(subject.rng.choice(forms))


KINDS: tuple[Callable[[Subject], None], ...] = (
    *(flip_bit, cut_short, zero_block, append_bytes, swap_files, file_of_older, folder_of_older, delete_file),
    *(edit_manifest, edit_and_seal, edit_seal),
)


def corrupt(
    kind: Callable[[Subject], None], root: Path, *, seed: int, place: Path, method: str = "lora"
) -> Trial:
    """Damage a copy of the newest of two checkpoints; it must be refused, and the older one be found."""
    if place.exists():
        shutil.rmtree(place)
    shutil.copytree(root, place, symlinks=True)
    (step, newest), (older_step, older) = checkpoint_folders(place)[:2]
    kind(Subject(folder=newest, older=older, rng=random.Random(seed)))
    problems = []
    try:
        open_checkpoint(newest)
        problems.append("it was accepted")
    except UserError:
        pass
    try:
        found = newest_valid(place)
        if found is None or found.step != older_step:
            problems.append(f"instead of step {older_step}, {found and found.step} was taken")
    except UserError as error:
        if "format version" not in error.message:  # which is refused, and not passed over
            problems.append(f"it was not passed over: {error}")
    assert name_of(step) == newest.name
    return Trial(kind=kind.__name__, method=method, seed=seed, problems=problems, kills=0)


def _misfit(manifest: Any, rng: random.Random) -> None:
    """Change a hash, a size, a shape, a dtype, a name, a file, the step, a field or the version."""
    name, array = rng.choice(sorted(manifest["files"])), rng.choice(sorted(manifest["trainable"]))
    facts, tensor = manifest["files"][name], manifest["trainable"][array]
    kind = rng.choice(
        ["hash", "size", "shape", "dtype", "name", "file", "step", "field", "missing", "version"]
    )
    if kind == "hash":
        facts["sha256"] = rng.randbytes(32).hex()
    elif kind == "size":
        facts["bytes"] += rng.choice([-8, 1, 4096, 2**60])
    elif kind == "shape":
        tensor["shape"] = rng.choice([[*tensor["shape"][::-1], 1], [], [2**40], [-1], "2x2", None])
    elif kind == "dtype":
        tensor["dtype"] = rng.choice(["F16", "BF16", 4, None])
    elif kind == "name":
        del manifest["trainable"][array]
        if rng.random() < 0.5:
            manifest["trainable"][f"{array}.other"] = tensor
    elif kind == "file":
        del manifest["files"][name]
        others = [f"../{name}", f"/{name}", f"./{name}", "", "a/b", ".", "..", MANIFEST, "absent.safetensors"]
        if (other := rng.choice([None, *others])) is not None:
            manifest["files"][other] = facts
    elif kind == "step":
        manifest["step"] += rng.choice([-1, 1, 1000, -manifest["step"] - 1])
    elif kind == "field":
        fields = ["step", "engine", "identity", "trainable", "data", "facts", "progress", "files", "backend"]
        manifest[rng.choice(fields)] = rng.choice([None, True, 1.5, ["x"]])
    elif kind == "missing":
        fields = ["format", "format_version", "step", "files", "trainable", "progress", "schedule"]
        del manifest[rng.choice(fields)]
    else:
        manifest["format_version"] = rng.choice([0, 2, -1, "1", 1.5, None, True, [1]])


def _read(subject: Subject) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((subject.folder / MANIFEST).read_bytes())
    return manifest


def _write(subject: Subject, manifest: dict[str, Any], *, sealed: bool) -> None:
    raw = (json.dumps(manifest, indent=1, ensure_ascii=False) + "\n").encode()
    (subject.folder / MANIFEST).write_bytes(raw)
    if sealed:
        (subject.folder / SEAL).write_bytes(seal(raw))


def _differs(one: Path, other: Path) -> bool:
    return one.read_bytes() != other.read_bytes()
