"""Damaged files of run folders: records, judges, ladders, latents, journals, locks; each with a command that reads them."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from injection.intact_files import FIXED, Workshop
from injection.intact_runs import (
    decode_words,
    generate_words,
    journal,
    judge_folder,
    ladder_folder,
    ladder_words,
    latent_folder,
    predict_words,
    profiled_run,
)
from injection.mutations import damage_bytes, damage_json, damage_npy, damage_safetensors, put, put_special

RECORD = ("plan.json", "summary.json", "metrics.jsonl", "events.jsonl", "config.yaml")
Made = tuple[str, list[str], tuple[str, ...]]
"""The kind of a case, its command, and words of which an error must contain one."""


def damage(path: Path, chance: random.Random) -> None:
    """Damage a file by its format, or replace it with something that is not a file."""
    raw = path.read_bytes()
    if chance.random() < 0.06:
        put_special(path, chance)
    elif path.suffix == ".safetensors":
        put(path, damage_safetensors(raw, chance))
    elif path.suffix == ".npy":
        put(path, damage_npy(raw, chance))
    elif path.suffix == ".json" and chance.random() < 0.75:
        put(path, damage_json(json.loads(raw), chance))
    elif path.suffix == ".jsonl" and chance.random() < 0.6:
        lines = raw.splitlines()
        for _ in range(chance.choice([1, 1, 4])):
            place = chance.randrange(len(lines))
            try:
                value = json.loads(lines[place])
            except ValueError:  # damaged before
                continue
            lines[place] = damage_json([value], chance)[1:-1].replace(b"\n", b"")
        put(path, b"\n".join(lines) + b"\n")
    else:
        put(path, damage_bytes(raw, chance))


def _case(kind: str, words: list[str], work: Path, *names: str) -> Made:
    return kind, words, (str(work), *names)


def _record(shop: Workshop, work: Path, chance: random.Random) -> Made:
    run = shop.link(profiled_run(shop), work / "run")
    names = chance.sample(RECORD, chance.choice([1, 1, 2]))
    for name in names:
        damage(run / name, chance)
    if chance.random() < 0.2:
        (run / chance.choice(RECORD)).unlink(missing_ok=True)
    out = ["--out", str(work / "out")]
    place = ["--output_dir", str(work), "--name", "run"]
    data = ["--model_name", str(shop.good / "model"), "--dataset", str(shop.good / "data.jsonl")]
    commands = {
        "report": ["report", str(run)],
        "report json": ["report", str(run), "--json"],
        "runs": ["runs", "--output_dir", str(work)],
        "runs json": ["runs", "--output_dir", str(work), "--json", "--all"],
        "compare": ["compare", str(run), str(profiled_run(shop))],
        "compare page": ["compare", str(run), str(profiled_run(shop)), "--out", str(work / "c.html")],
        "compare json": ["compare", str(run), str(profiled_run(shop)), "--json"],
        "generate": ["generate", str(run), "--prompt", "Hi", "--max_new_tokens", "1", "--backend", "cpu"],
        "merge": ["merge", str(run), "--backend", "cpu", *out],
        "export": ["export", str(run), "--to", "hf", "--backend", "cpu", *out],
        "move": ["move", str(run), "--to", "cpu", "--out", str(work / "run.tar")],
        "list": ["checkpoint", "list", str(run)],
        "prune": ["checkpoint", "prune", str(run), "--keep_last_n", "1"],
        "checkpoint": ["checkpoint", "export", str(run), *out],
        "resume": ["train", "--resume", str(run), "--max_steps", "3"],
        "auto": ["train", *FIXED, *data, *place, "--max_steps", "3", "--lora_rank", "2", "--resume", "auto"],
        "again": ["train", *FIXED, *data, *place, "--max_steps", "1"],
        "config": ["plan", "--config", str(run / "config.yaml")],
        "judge": ["judge", "eval", str(run), "--backend", "cpu"],
        "decode": ["latents", "decode", str(run), "--text", "a", "--device", "cpu"],
    }
    command = chance.choice(list(commands))
    # A value that is only unusual is an option like any other: the error is about the option.
    options = ("--", "option", "cannot", "dataset", "model", "not a judge", "Unknown", "config")
    return _case(f"record {'+'.join(names)} {command}", commands[command], work, *options)


def _judge(shop: Workshop, work: Path, chance: random.Random) -> Made:
    run = shop.link(judge_folder(shop), work / "judge")
    names = ["test_metrics.json", "test_predictions.json", "adapter/judge.json", "plan.json"]
    name = chance.choice(names)
    if name == "test_metrics.json":
        command = chance.choice([["report", str(run)], ["report", str(run), "--json"]])
    elif name == "test_predictions.json":
        eval_file = ["judge", "eval", "--predictions", str(run / name)]
        command = chance.choice([["report", str(run)], eval_file, [*eval_file, "--json"]])
    else:
        predict = predict_words(shop, run, work / "out.jsonl")
        test = ["judge", "eval", str(run), "--backend", "cpu", "--out", str(work / "out"), "--skip_untrained"]
        command = chance.choice([predict, test, ["report", str(run)]])
    damage(run / name, chance)
    return _case(
        f"judge {name} {' '.join(command[:2])[:12]}", command, work, "--", "score", "cannot", "dataset"
    )


def _ladder(shop: Workshop, work: Path, chance: random.Random) -> Made:
    intact = ladder_folder(shop)
    folder = shop.link(intact, work / "runs" / "ladder")
    trial = [f"trials/baseline/{name}" for name in RECORD]
    name = chance.choice(
        ["ladder.json", "request.json", "train.yaml", "trials/baseline.yaml", "trials/baseline.log", *trial]
    )
    damage(folder / name, chance)
    run = str(folder / "trials" / "baseline")
    commands = [ladder_words(shop, folder), ladder_words(shop, folder), ["report", str(folder)]]
    commands += [["report", run], ["runs", "--output_dir", str(folder.parent)]]
    commands += [["train", "--config", str(folder / "train.yaml"), "--max_steps", "0"]] * (
        name == "train.yaml"
    )
    command = chance.choice(commands)
    return _case(f"ladder {name} {command[0]}", command, work, "original options", "--", "cannot", "Unknown")


def _latents(shop: Workshop, work: Path, chance: random.Random) -> Made:
    home = latent_folder(shop)
    run = shop.link(home / "run", work / "run")
    pairs = shop.link(home / "pairs", work / "pairs")
    files = [path for path in sorted(pairs.rglob("*")) if path.is_file()]
    files += [path for path in sorted((run / "model").rglob("*")) if path.is_file()]
    path = chance.choice([*files, run / "plan.json"])
    device = ["--device", "cpu"]
    out = ["--out", str(work / "out")]
    if path.is_relative_to(pairs):
        train = ["train", "--recipe", "latent_diffusion", "--dataset", str(pairs), "--max_steps", "1"]
        train += ["--hidden_size", "32", "--n_blocks", "1", "--backend", "cpu", "--skip_eval"]
        commands = [
            [*train, "--output_dir", str(work), "--name", "new"],
            ["latents", "export", str(pairs), "--layout", chance.choice(["files", "shards"]), *out],
            ["latents", "eval", str(run), "--data", str(pairs), "--samples", "4", "--steps", "2", *device],
            ["plan", "--recipe", "latent_diffusion", "--dataset", str(pairs), "--backend", "cpu"],
        ]
    else:
        vectors = ["--vectors", str(home / "few.npy"), "--steps", "2", *device]
        commands = [
            ["latents", "decode", str(run), *vectors],
            ["latents", "encode", str(run), "--text", "the cat", "--steps", "2", *device],
            ["latents", "sample", str(run), "--samples", "2", "--steps", "2", *device],
            ["report", str(run)],
        ]
    damage(path, chance)
    command = chance.choice(commands)
    return _case(f"latents {path.name} {command[1]}", command, work, "vocabulary", "--", "cannot")


def _vectors(shop: Workshop, work: Path, chance: random.Random) -> Made:
    home = latent_folder(shop)
    path = work / "few.npy"
    shutil.copy(home / "few.npy", path)
    damage(path, chance)
    return _case("vectors decode", decode_words(shop, path, work / "out.jsonl"), work, "--")


def _journal(shop: Workshop, work: Path, chance: random.Random) -> Made:
    output = work / "out.jsonl"
    words, partial = chance.choice(
        [
            (generate_words(shop, output), journal(shop, "generate")),
            (predict_words(shop, judge_folder(shop), output), journal(shop, "predict")),
            (decode_words(shop, latent_folder(shop) / "few.npy", output), journal(shop, "decode")),
        ]
    )
    path = work / "out.jsonl.partial"
    shutil.copy(partial, path)
    if chance.random() < 0.5:  # the request fits, a row does not have its checksum
        key, *rows = path.read_bytes().splitlines()
        place = chance.randrange(len(rows))
        crc, _, text = rows[place].partition(b" ")
        rows[place] = crc + b" " + damage_json([json.loads(text)], chance)[1:-1].replace(b"\n", b"")
        put(path, b"\n".join([key, *rows]) + b"\n")
    else:
        damage(path, chance)
    return _case(f"journal {' '.join(words[:2])[:12]}", words, work)


def _places(shop: Workshop, work: Path, chance: random.Random) -> Made:
    """Locks, links and folders of a run that are something else."""
    run = shop.link(profiled_run(shop), work / "run")
    (work / ".locks").mkdir()
    names = [work / ".locks" / "run.lock", run / "checkpoints" / "latest", run / "report.html"]
    names += [run / "checkpoints" / "step-00000009", run / ".shared", run / "adapter" / "crosstune.json"]
    path = chance.choice(names)
    if path.name == "run.lock" and chance.random() < 0.5:
        path.write_bytes(chance.randbytes(50))
    else:
        put_special(path, chance)
    commands = [
        ["train", "--resume", str(run), "--max_steps", "3"],
        ["runs", "--output_dir", str(work)],
        ["report", str(run)],
        ["checkpoint", "list", str(run)],
        ["checkpoint", "verify", str(run)],
        ["checkpoint", "prune", str(run), "--keep_last_n", "1"],
        ["generate", str(run), "--prompt", "Hi", "--max_new_tokens", "1", "--backend", "cpu"],
        ["move", str(run), "--to", "cpu", "--out", str(work / "run.tar")],
    ]
    command = chance.choice(commands)
    return _case(f"place {path.name} {' '.join(command[:2])[:16]}", command, work)


RUN_KINDS: dict[str, Callable[[Workshop, Path, random.Random], Made]] = {
    "record": _record,
    "record again": _record,
    "judge": _judge,
    "judge again": _judge,
    "ladder": _ladder,
    "latents": _latents,
    "vectors": _vectors,
    "journal": _journal,
    "place": _places,
}
