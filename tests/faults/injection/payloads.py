"""Files that a stranger made to run code, to reach outside their folder or to exhaust memory, in every place we read.

Each payload is put into a copy of a good run; the command that reads it must answer with an error, without a
traceback, and neither run the code nor write outside.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from crosstune.checkpoint.folders import checkpoint_folders
from crosstune.checkpoint.manifest import MANIFEST, MOMENTS, RANDOM, SEAL, WEIGHTS, seal
from injection.bench import Bench
from injection.children import Child
from injection.kills import Trial

CANARY = "canary"


@dataclass(frozen=True, kw_only=True)
class Target:
    """A run that was stopped at step 2, a model and a data set to be spoilt, and a place that nobody may touch."""

    home: Path
    run: Path
    model: Path
    data: Path
    outside: Path

    @property
    def checkpoint(self) -> Path:
        return checkpoint_folders(self.run / "checkpoints")[0][1]

    def pickle(self) -> bytes:
        return pickle.dumps(_Payload(str(self.outside / CANARY)))


class _Payload:
    """Unpickled, it creates a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


Act = Callable[[Target], list[str] | None]
"""Spoils a target. Returns the command that meets it; None for a resume of the run."""


def _pickle_as(name: str, target: Target) -> None:
    (target.checkpoint / name).write_bytes(target.pickle())


def _sealed_pickle_as(name: str, target: Target) -> None:
    """With a size, hash and seal that fit, so that only the reader of the contents can refuse it."""
    _reseal(target, name, target.pickle())


def _named(name: str, target: Target) -> None:
    """A manifest that names a file elsewhere, which is there."""
    (target.outside / "weights.safetensors").write_bytes((target.checkpoint / WEIGHTS).read_bytes())
    place = name.format(outside=target.outside)
    _edit(target, lambda m: m["files"].update({place: m["files"].pop(WEIGHTS)}))


def _linked(name: str, target: Target) -> None:
    path = target.checkpoint / name
    moved = target.outside / name
    path.rename(moved)
    path.symlink_to(moved)


def _linked_folder(target: Target) -> None:
    moved = target.outside / "step"
    folder = target.checkpoint
    folder.rename(moved)
    folder.symlink_to(moved, target_is_directory=True)


def _fifo(name: str, target: Target) -> None:
    (target.checkpoint / name).unlink()
    os.mkfifo(target.checkpoint / name)


def _device(target: Target) -> None:
    (target.checkpoint / WEIGHTS).unlink()
    (target.checkpoint / WEIGHTS).symlink_to("/dev/zero")


def _huge_header(target: Target) -> None:
    raw = struct.pack("<Q", 2**62) + b"{" * 64
    _reseal(target, WEIGHTS, raw)


def _deep_header(target: Target) -> None:
    text = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    _reseal(target, WEIGHTS, struct.pack("<Q", len(text)) + text)


def _huge_shape(target: Target) -> None:
    text = json.dumps({"a": {"dtype": "F32", "shape": [2**40, 2**20], "data_offsets": [0, 2**62]}}).encode()
    _reseal(target, WEIGHTS, struct.pack("<Q", len(text)) + text)


def _overlap(target: Target) -> None:
    entry = {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}
    text = json.dumps({"a": entry, "b": entry}).encode()
    _reseal(target, WEIGHTS, struct.pack("<Q", len(text)) + text + bytes(8))


def _huge_manifest(target: Target) -> None:
    """A file of a terabyte that takes no room."""
    with (target.checkpoint / MANIFEST).open("r+b") as file:
        file.truncate(2**40)


def _deep_manifest(target: Target) -> None:
    _write_manifest(target, b'{"a":' * 200_000 + b"1" + b"}" * 200_000)


def _twice(target: Target) -> None:
    raw = (target.checkpoint / MANIFEST).read_bytes()
    _write_manifest(target, raw.replace(b'{\n "format"', b'{\n "step": 0,\n "format"', 1))


def _pickled_manifest(target: Target) -> None:
    _write_manifest(target, target.pickle())


def _yaml_tags(target: Target) -> list[str]:
    file = target.run / "config.yaml"
    file.write_text(f"name: !!python/object/apply:os.mkdir ['{target.outside / CANARY}']\n")
    return ["train", "--config", str(file)]


def _pickled_adapter(target: Target) -> list[str]:
    adapter = target.run / "adapter"
    (adapter / "adapter_model.safetensors").unlink()
    (adapter / "adapter_model.bin").write_bytes(target.pickle())
    return ["generate", str(adapter), "--prompt", "Hi", "--base", str(target.model)]


def _disguised_adapter(target: Target) -> list[str]:
    (target.run / "adapter" / "adapter_model.safetensors").write_bytes(target.pickle())
    return ["generate", str(target.run), "--prompt", "Hi"]


def _pickled_base_adapter(target: Target) -> list[str]:
    (target.run / "adapter" / "adapter_model.safetensors").write_bytes(target.pickle())
    adapter = ["--lora_rank=2", "--lora_target_modules=default"]
    return [*_train(target), "--base_adapter", str(target.run / "adapter"), *adapter]


def _pickled_settings(target: Target) -> list[str]:
    (target.run / "adapter" / "adapter_config.json").write_bytes(target.pickle())
    return ["generate", str(target.run), "--prompt", "Hi"]


def _disguised_data(suffix: str, target: Target) -> list[str]:
    path = target.home / f"data.{suffix}"
    path.write_bytes(target.pickle())
    return [*_train(target), f"--dataset={path}"]


def _pickled_model(target: Target) -> list[str]:
    (target.model / "model.safetensors").unlink()
    (target.model / "pytorch_model.bin").write_bytes(target.pickle())
    return _train(target)


def _disguised_model(target: Target) -> list[str]:
    (target.model / "model.safetensors").write_bytes(target.pickle())
    return _train(target)


def _pickled_plan(name: str, command: str, target: Target) -> list[str]:
    (target.run / name).write_bytes(target.pickle())
    return [command, str(target.run), *(["--prompt", "Hi"] if command == "generate" else [])]


PAYLOADS: dict[str, Act] = {
    **{f"pickle as {name}": partial(_pickle_as, name) for name in (WEIGHTS, MOMENTS, RANDOM, MANIFEST, SEAL)},
    **{f"sealed pickle as {n}": partial(_sealed_pickle_as, n) for n in (WEIGHTS, MOMENTS, RANDOM)},
    "sealed pickle as the manifest": _pickled_manifest,
    **{
        f"{n} beside": partial(_pickle_as, n)
        for n in ("weights.pt", "state.bin", "weights.npy", "__init__.py")
    },
    "name with ..": partial(_named, "../../../outside/weights.safetensors"),
    "absolute name": partial(_named, "{outside}/weights.safetensors"),
    "name of a sub folder": partial(_named, "sub/weights.safetensors"),
    **{f"link as {name}": partial(_linked, name) for name in (WEIGHTS, MANIFEST, SEAL)},
    "link as the checkpoint": _linked_folder,
    "pipe as the weights": partial(_fifo, WEIGHTS),
    "pipe as the manifest": partial(_fifo, MANIFEST),
    "device as the weights": _device,
    "huge header": _huge_header,
    "deep header": _deep_header,
    "huge shape": _huge_shape,
    "overlapping arrays": _overlap,
    "huge manifest": _huge_manifest,
    "deep manifest": _deep_manifest,
    "key said twice": _twice,
    "tags in a configuration": _yaml_tags,
    "adapter as a pickle": _pickled_adapter,
    "adapter, a pickle in disguise": _disguised_adapter,
    "base adapter, a pickle in disguise": _pickled_base_adapter,
    "adapter settings": _pickled_settings,
    "data as a pickle": partial(_disguised_data, "pkl"),
    "data, a pickle in disguise": partial(_disguised_data, "jsonl"),
    "parquet, a pickle in disguise": partial(_disguised_data, "parquet"),
    "model as a pickle": _pickled_model,
    "model, a pickle in disguise": _disguised_model,
    "plan.json for generate": partial(_pickled_plan, "plan.json", "generate"),
    "summary.json for a report": partial(_pickled_plan, "summary.json", "report"),
    "metrics.jsonl for a report": partial(_pickled_plan, "metrics.jsonl", "report"),
    "metrics.jsonl for a resume": lambda target: (
        (target.run / "metrics.jsonl").write_bytes(target.pickle() + b"\n") and None  # type: ignore[func-returns-value]
    ),
}


def try_payload(bench: Bench, name: str, *, whole: bool = True) -> Trial:
    """`whole=False`: where the payload is in a checkpoint, it is only looked for and read, not resumed from."""
    home = bench.home / "payload"
    if home.exists():
        shutil.rmtree(home)
    target = Target(
        home=home, run=home / "run", model=home / "model", data=bench.data, outside=home / "outside"
    )
    target.outside.mkdir(parents=True)
    shutil.copytree(bench.model, target.model)
    shutil.copytree(bench.halfway("lora"), target.run, symlinks=True)
    shutil.copytree(bench.home / "straight-lora" / "adapter", target.run / "adapter")
    own_words = PAYLOADS[name](target)
    words = own_words or bench.words("lora", target.run, resume="auto")
    before = _listing(target.outside)
    whole = whole or own_words is not None or "resume" in name
    call = partial(_limited, partial(_command, words) if whole else partial(_find, target.run))
    ended = Child(call, said=home).wait()
    problems = []
    expected: tuple[int, ...] = (2,)
    if words[0] == "report":  # a report shows what can be read, and names what cannot
        expected = (0, 2)
    elif name.endswith(" beside") or name == "metrics.jsonl for a resume":
        # A file that the manifest does not name is not read, and a damaged log is set aside.
        expected = (0,)
    if ended.code not in expected or "Traceback" in ended.said:
        problems.append(f"it was answered by {ended}")
    if _listing(target.outside) != before:
        problems.append(f"outside there is now {_listing(target.outside)}")
    return Trial(kind=f"payload: {name}", method="lora", seed=0, problems=problems, kills=0)


def _command(words: list[str]) -> int:
    from crosstune.cli.main import main

    return main(words)


def _find(run: Path) -> int:
    """Read a checkpoint as a resume does first."""
    from crosstune.config.load import make_config
    from crosstune.core.errors import UserError
    from crosstune.core.events import Observers
    from crosstune.runs.resume import read_request

    config = make_config(resume="auto", name=run.name, output_dir=str(run.parent))
    try:
        return 0 if read_request(config, observer=Observers())[1] else 2
    except UserError as error:
        print(error)
        return error.exit_code


def _limited(call: Callable[[], int]) -> int:
    """With half a gigabyte more memory than the process has: an allocation that a stranger asks for fails."""
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    if pages:
        limit = pages * resource.getpagesize() + 2**29
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    return call()


def _train(target: Target) -> list[str]:
    flags = ["--name=new", "--max_steps=1", "--backend=cpu", "--skip_eval", f"--dataset={target.data}"]
    return ["train", f"--model_name={target.model}", f"--output_dir={target.home}", *flags]


def _listing(folder: Path) -> dict[str, int]:
    return {
        str(p.relative_to(folder)): p.lstat().st_size
        for p in sorted(folder.rglob("*"))
        if p.is_file() or p.is_dir()
    }


def _edit(target: Target, change: Callable[[Any], Any]) -> None:
    manifest = json.loads((target.checkpoint / MANIFEST).read_bytes())
    change(manifest)
    _write_manifest(target, json.dumps(manifest).encode())


def _write_manifest(target: Target, raw: bytes) -> None:
    (target.checkpoint / MANIFEST).write_bytes(raw)
    (target.checkpoint / SEAL).write_bytes(seal(raw))


def _reseal(target: Target, name: str, raw: bytes) -> None:
    (target.checkpoint / name).write_bytes(raw)
    facts = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    _edit(target, lambda manifest: manifest["files"].update({name: facts}))
