"""Damaged files of rl, preference and distillation runs, of sweeps and of exports; each with a command that reads them."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path

from crosstune.checkpoint.manifest import MANIFEST, SEAL, seal
from crosstune.cli.main import main
from crosstune.models.tiny import tiny_model
from injection.hostile_runs import RECORD, Made, damage
from injection.intact_files import FIXED, Workshop
from injection.mutations import put

SMALL = {"vocab": 300, "hidden": 16, "intermediate": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
ROW = {"prompt": "Say it", "completion": "it is", "chosen": "it is", "rejected": "no", "answer": "yes"}
RL = "--reward exact:answer --max_new_tokens 3 --num_generations 2 --num_iterations 2 --beta 0.1"
WORDS = {
    "rl": f"--recipe rl {RL}",
    "preference": "--recipe preference --reference precomputed",
    "distill": "--recipe distill --teacher_top_k 4 --teacher {teacher}",
}
# A value that is only unusual is an option like any other: the error is about the option.
OPTIONS = ("--", "option", "cannot", "dataset", "model", "Unknown", "checkpoint", "reward", "teacher")


def reseal(folder: Path, name: str) -> None:
    """Write the size and hash of a damaged file of a checkpoint into its manifest, as an attacker would."""
    if not (folder / name).is_file():
        return
    manifest, raw = json.loads((folder / MANIFEST).read_bytes()), (folder / name).read_bytes()
    manifest["files"][name] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    encoded = json.dumps(manifest).encode()
    put(folder / MANIFEST, encoded)
    put(folder / SEAL, seal(encoded))


def _data(shop: Workshop) -> Path:
    path = shop.good / "asked.jsonl"
    if not path.exists():
        rows = [{**ROW, "prompt": f"Say {number}"} for number in range(24)]
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def _trained(shop: Workshop, recipe: str) -> Path:
    def make(folder: Path) -> None:
        teacher = shop.made("teacher", lambda place: tiny_model(place, **SMALL, seed=1))  # type: ignore[arg-type]
        files = ["--model_name", str(shop.good / "model"), "--dataset", str(_data(shop)), "--lora_rank", "2"]
        files += ["--output_dir", str(folder.parent), "--name", folder.name, "--batch_size", "2"]
        words = WORDS[recipe].format(teacher=teacher).split()
        assert main(["train", *words, *FIXED, *files, "--max_steps", "2", "--save_steps", "1"]) == 0

    return shop.made(f"{recipe}-run", make)


def _run_of(recipe: str) -> Callable[[Workshop, Path, random.Random], Made]:
    def case(shop: Workshop, work: Path, chance: random.Random) -> Made:
        run = shop.link(_trained(shop, recipe), work / "run")
        checkpoint = sorted((run / "checkpoints").glob("step-*"))[-1]
        names = [
            *RECORD,
            *(f"checkpoints/{checkpoint.name}/{name}.safetensors" for name in ("weights", "random")),
        ]
        names += ["reference.safetensors"] * 3 * (recipe == "preference")
        name = chance.choice(names)
        damage(run / name, chance)
        if name.startswith("checkpoints") and chance.random() < 0.8:
            reseal(checkpoint, Path(name).name)
        resume = ["train", "--resume", str(run), "--max_steps", "3"]
        commands = [resume, resume, ["report", str(run)], ["compare", str(run), str(_trained(shop, recipe))]]
        commands += [["plan", "--config", str(run / "config.yaml")]] * (name == "config.yaml")
        commands.append(["move", str(run), "--to", "cpu", "--out", str(work / "run.tar")])
        command = chance.choice(commands)
        return f"{recipe}-run {Path(name).name} {command[0]}", command, (str(work), *OPTIONS)

    return case


def _swept(shop: Workshop, work: Path, chance: random.Random) -> Made:
    def words(folder: Path) -> list[str]:
        files = ["--model_name", str(shop.good / "model"), "--dataset", str(_data(shop)), "--lora_rank", "2"]
        files += ["--output_dir", str(folder.parent), "--name", folder.name, "--max_steps", "1"]
        return ["sweep", "--over", "lr=1e-4,1e-3", *FIXED, "--num_samples", "0", *files]

    def make(folder: Path) -> None:
        assert main(words(folder)) == 0

    folder = shop.link(shop.made("swept", make), work / "runs" / "swept")
    trial = [f"trials/trial-000/{name}" for name in RECORD]
    name = chance.choice(
        ["sweep.json", "sweep.json", "request.json", "best.yaml", "trials/trial-000.yaml", *trial]
    )
    damage(folder / name, chance)
    run = str(folder / "trials" / "trial-000")
    commands = [["report", str(folder)], ["report", run], ["runs", "--output_dir", str(folder.parent)]]
    commands += [["train", "--config", str(folder / "best.yaml"), "--max_steps", "0"]] * (name == "best.yaml")
    commands += [words(folder)] * (name in ("sweep.json", "request.json"))
    command = chance.choice(commands)
    return f"sweep {Path(name).name} {command[0]}", command, (str(work), "--", *OPTIONS)


def _exported(shop: Workshop, work: Path, chance: random.Random) -> Made:
    def make(folder: Path) -> None:
        words = ["--to", "hf", "--backend", "cpu", "--out", str(folder)]
        assert main(["export", str(shop.good / "adapter"), *words]) == 0

    folder = shop.link(shop.made("exported", make), work / "exported")
    name = chance.choice(sorted(path.name for path in folder.iterdir()))
    damage(folder / name, chance)
    train = ["train", *FIXED, "--model_name", str(folder), "--dataset", str(_data(shop)), "--max_steps", "1"]
    commands = [
        ["generate", str(folder), "--prompt", "Hi", "--max_new_tokens", "1", "--backend", "cpu"],
        ["export", str(folder), "--to", "gguf", "--backend", "cpu", "--out", str(work / "out")],
        [*train, "--lora_rank", "2", "--output_dir", str(work / "runs"), "--name", "r"],
    ]
    command = chance.choice(commands)
    return f"exported {name} {command[0]}", command, (str(folder), name, "template", "token", *OPTIONS)


TRAINED_KINDS: dict[str, Callable[[Workshop, Path, random.Random], Made]] = {
    "rl": _run_of("rl"),
    "preferred": _run_of("preference"),
    "distilled": _run_of("distill"),
    "swept": _swept,
    "exported": _exported,
}
