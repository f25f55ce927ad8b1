"""Damaged files of every format that crosstune reads, each with the command that meets it.

A case is a function of its seed, so `benchmarks/fuzz_files.py --seed N --cases 1` shows it again.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from crosstune.checkpoint.manifest import MANIFEST, SEAL, seal
from crosstune.cli.main import main
from crosstune.models.adapter_files import PEFT_WEIGHTS
from injection.hostile_pairs import preference_case
from injection.hostile_pictures import PICTURE_KINDS
from injection.hostile_results import RESULT_KINDS
from injection.hostile_runs import RUN_KINDS, damage
from injection.hostile_trained import TRAINED_KINDS, reseal
from injection.intact_files import FIXED, ROWS, Workshop
from injection.mutations import (
    damage_bytes,
    damage_gguf,
    damage_json,
    damage_tar,
    damage_tokenizer,
    damage_yaml,
    put,
    put_special,
)

MODEL_FILES = (
    *(
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
    ),
    *("special_tokens_map.json", "model.safetensors", "model.safetensors.index.json"),
)
PREFERENCE = "preference"
LATER_KINDS = {**RESULT_KINDS, **TRAINED_KINDS, **PICTURE_KINDS}
FIRST_RESULTS = 100
"""The tests run the cases before this number; they run the later kinds by name."""
RUN_FILES = ("plan.json", "summary.json", "metrics.jsonl", "events.jsonl", "config.yaml")


@dataclass(frozen=True)
class Case:
    """A command over a damaged file; `names` are words of which an error must contain one."""

    kind: str
    words: list[str]
    names: tuple[str, ...]


def make_case(shop: Workshop, seed: int, *, only: str | None = None) -> Case:
    """Make the damaged files of a seed in a fresh folder; of one kind, if `only` names it."""
    chance = random.Random(seed)
    work = shop.home / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    kind = only or chance.choice([*KINDS, *RUN_KINDS])
    if kind == PREFERENCE or (only is None and seed % 20 == 13):
        return Case(*preference_case(shop, work, chance))
    if kind in LATER_KINDS or (only is None and seed >= FIRST_RESULTS and seed % 4 == 1):
        name = kind if kind in LATER_KINDS else chance.choice(list(LATER_KINDS))
        return Case(*LATER_KINDS[name](shop, work, chance))
    return KINDS[kind](shop, work, chance) if kind in KINDS else Case(*RUN_KINDS[kind](shop, work, chance))


def run_case(case: Case, *, out: Callable[[], str]) -> str | None:
    """Run the command of a case in this process; return what is wrong with its end, None if nothing is. `out` returns
    what it printed."""
    try:
        code = main(list(case.words))
    except SystemExit as error:
        code = int(error.code or 0)
    said = out()
    if code not in (0, 2):
        return f"exit code {code}: {said[-300:]}"
    if "Traceback" in said:
        return f"a traceback: {said[-300:]}"
    if len(said) > 20_000:
        return f"{len(said):,} characters"
    if code == 2 and not any(name in said for name in (*case.names, "pip install")):
        return f"the error names none of {case.names}: {said[-300:]}"
    return None


def _model(shop: Workshop, work: Path, chance: random.Random) -> Case:
    folder = shop.copy("model", work)
    name = chance.choice(MODEL_FILES)
    if name == "config.json" or chance.random() < 0.3:
        name = "config.json"
    if name == "tokenizer.json" and chance.random() < 0.4:
        put(folder / name, damage_tokenizer(json.loads((folder / name).read_bytes()), chance))
    else:
        damage(folder / name, chance)
    commands = {
        "plan": ["plan", "--backend", "cpu", "--model_name", str(folder)],
        "data": ["data", "--model_name", str(folder), "--dataset", str(shop.good / "data.jsonl")],
        "train": [*_train(shop, work), "--model_name", str(folder)],
        "generate": ["generate", str(folder), "--prompt", "Hi", "--max_new_tokens", "2", "--backend", "cpu"],
        "export": ["export", str(folder), "--to", "gguf", "--backend", "cpu", "--out", str(work / "out")],
    }
    command = chance.choice(["plan", "data", "data", "train", "generate", "export"])
    return Case(
        f"model {name} {command}",
        commands[command],
        (str(folder), name, "lora_target_modules", "token", "template", "context", "unverified"),
    )


def _train(shop: Workshop, work: Path) -> list[str]:
    data = ["--dataset", str(shop.good / "data.jsonl"), "--output_dir", str(work / "runs"), "--name", "r"]
    return ["train", *FIXED, *data, "--max_steps", "1", "--lora_rank", "2", "--lr", "1e-4"]


def _adapter(shop: Workshop, work: Path, chance: random.Random) -> Case:
    folder = shop.copy("adapter", work)
    name = chance.choice(
        [*["adapter_config.json"] * 2, PEFT_WEIGHTS, "crosstune.json", "tokenizer_config.json"]
    )
    damage(folder / name, chance)
    commands = [
        ["convert", str(folder), "--to", "mlx", "--out", str(work / "out")],
        ["merge", str(folder), "--backend", "cpu", "--out", str(work / "out")],
        ["generate", str(folder), "--prompt", "Hi", "--max_new_tokens", "2", "--backend", "cpu"],
        [*_train(shop, work), "--model_name", str(shop.good / "model"), "--base_adapter", str(folder)],
    ]
    place = chance.randrange(4)
    words = (
        "lora_rank",
        "lora_alpha",
        "lora_target_modules",
        "Unknown model",
        "There is no folder",
        "too long",
    )
    names = (str(folder), name, *words, "precision", "pattern")
    return Case(f"adapter {name} {commands[place][0]}", commands[place], names)


def _checkpoint(shop: Workshop, work: Path, chance: random.Random) -> Case:
    run = shop.copy("run", work)
    folder = sorted((run / "checkpoints").glob("step-*"))[-1]
    name = chance.choice(
        [*[MANIFEST] * 3, SEAL, *(f"{part}.safetensors" for part in ("weights", "moments", "random"))]
    )
    damage(folder / name, chance)
    if name == MANIFEST and (folder / name).is_file() and chance.random() < 0.7:
        put(folder / SEAL, seal((folder / name).read_bytes()))
    elif name.endswith(".safetensors") and (folder / name).is_file() and chance.random() < 0.6:
        reseal(folder, name)
    commands = [
        ["checkpoint", "verify", str(run)],
        ["checkpoint", "show", str(folder)],
        ["checkpoint", "list", str(run)],
        [
            "train",
            "--resume",
            str(folder),
            "--output_dir",
            str(work / "runs"),
            "--name",
            "r",
            "--max_steps",
            "2",
        ],
    ]
    command = chance.choice(commands)
    return Case(
        f"checkpoint {name} {command[1]}",
        command,
        (str(folder), folder.name, str(run), "checkpoint", "cannot be"),
    )


def _archive(shop: Workshop, work: Path, chance: random.Random) -> Case:
    path = work / "run.crosstune.tar"
    good = shop.good / "run.crosstune.tar"
    if chance.random() < 0.5:
        path.write_bytes(damage_tar(good.read_bytes(), chance))
    else:
        _rewrite_note(good, path, chance)
    words = ["train", "--resume", str(path), "--output_dir", str(work / "runs"), "--max_steps", "2"]
    return Case("archive", words, (str(path), str(work / "runs"), "option", "base model", "backend"))


def _rewrite_note(good: Path, path: Path, chance: random.Random) -> None:
    """Write the archive with a damaged note whose hash fits, or with more members."""
    with tarfile.open(good) as source, tarfile.open(path, "w") as target:
        members = [(member, source.extractfile(member).read()) for member in source]  # type: ignore[union-attr]
        note = json.loads(members[0][1])
        note.pop("sha256")
        extra = chance.choice(
            [None, None, "x/y", "plan.json/y", "../x", "n" * 300, "a\\b", "/abs", ".", "a/../b"]
        )
        if extra is not None:
            members.append((tarfile.TarInfo(extra), b"text"))
            note["files"][extra] = hashlib.sha256(b"text").hexdigest()
        else:
            try:
                note = json.loads(damage_json(note, chance))
            except ValueError:
                note = {}
        if isinstance(note, dict):
            note["sha256"] = hashlib.sha256(json.dumps(note, sort_keys=True).encode()).hexdigest()
        members[0] = (members[0][0], json.dumps(note).encode())
        for member, raw in members:
            found = tarfile.TarInfo(member.name)
            found.size = len(raw)
            target.addfile(found, io.BytesIO(raw))


def _gguf(shop: Workshop, work: Path, chance: random.Random) -> Case:
    path = work / "model.gguf"
    path.write_bytes(damage_gguf((shop.good / "model.gguf").read_bytes(), chance))
    data = ["data", "--model_name", str(path), "--dataset", str(shop.good / "data.jsonl")]
    plan = ["plan", "--backend", "cpu", "--model_name", str(path)]
    return Case("gguf", chance.choice([data, plan]), (str(path), "template", "tokenizer"))


def _yaml(shop: Workshop, work: Path, chance: random.Random) -> Case:
    path = work / "c.yaml"
    if chance.random() < 0.08:
        put_special(path, chance)
    elif chance.random() < 0.2:
        path.write_bytes(damage_bytes(b"lr: 0.1\nbatch_size: 4\nmodel_name: x\n", chance))
    else:
        path.write_text(damage_yaml(chance))
    option = chance.choice(["--config", "--config", "--mlx_config"])
    words = ["plan", "--machine", "cpu-laptop", "--model_name", str(shop.good / "model"), option, str(path)]
    return Case(
        f"yaml {option}", words, (str(path), "cannot be", "dataset", "Unknown", "lora_target_modules", "lr")
    )


def _data(shop: Workshop, work: Path, chance: random.Random) -> Case:
    suffix = chance.choice([".jsonl", ".json", ".csv", ".tsv"])
    path = work / f"d{suffix}"
    if suffix in (".csv", ".tsv"):
        mark = "," if suffix == ".csv" else "\t"
        raw = "".join(
            mark.join(row) + "\n" for row in [("prompt", "completion"), ("a", "b"), ("c", '"d\n e"')]
        ).encode()
        path.write_bytes(damage_bytes(raw, chance))
    elif suffix == ".json":
        path.write_bytes(
            damage_json(ROWS, chance)
            if chance.random() < 0.7
            else damage_bytes(json.dumps(ROWS).encode(), chance)
        )
    else:
        shutil.copy(shop.good / "data.jsonl", path)
        damage(path, chance)
    return Case(
        f"data {suffix}",
        ["data", "--model_name", str(shop.good / "model"), "--dataset", str(path)],
        (str(path),),
    )


def _report(shop: Workshop, work: Path, chance: random.Random) -> Case:
    run = shop.copy("run", work)
    name = chance.choice(RUN_FILES)
    damage(run / name, chance)
    command = chance.choice(
        [["report", str(run)], ["generate", str(run), "--prompt", "Hi", "--max_new_tokens", "1"]]
    )
    return Case(f"{command[0]} {name}", command, (str(run), name))


def _machine(shop: Workshop, work: Path, chance: random.Random) -> Case:
    from crosstune.machines.probe import load_machine

    path = work / "m.json"
    path.write_bytes(damage_json(json.loads(json.dumps(load_machine("cpu-laptop").to_json())), chance))
    words = ["plan", "--machine", str(path), "--model_name", str(shop.good / "model")]
    return Case("machine", words, (str(path), "cpu-laptop", "backend", "Backend", "memory"))


KINDS: dict[str, Callable[[Workshop, Path, random.Random], Case]] = {
    "model": _model,
    "model again": _model,
    "model once more": _model,
    "adapter": _adapter,
    "checkpoint": _checkpoint,
    "archive": _archive,
    "gguf": _gguf,
    "yaml": _yaml,
    "data": _data,
    "report": _report,
    "machine": _machine,
}
