"""Damaged preference data in every layout and file format, and damaged stored references, each with a training that reads them."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import shutil
from pathlib import Path
from typing import Any

from crosstune.cli.main import main
from injection.hostile_runs import Made, damage
from injection.intact_files import FIXED, Workshop
from injection.mutations import HOSTILE, damage_bytes, damage_json, put

Row = dict[str, Any]
SIDES = (
    "chosen",
    "rejected",
    "prompt",
    "completion",
    "label",
    "messages",
    "kto_tag",
    "conversations",
    "tools",
)


def _user(text: str) -> Row:
    return {"role": "user", "content": text}


def _answer(text: str) -> Row:
    return {"role": "assistant", "content": text}


def layouts(n: int) -> dict[str, Row]:
    """Return a row in each layout that is read."""
    ask, good, bad, label = f"What is {n}?", f"It is {n}.", "I do not know.", n % 2 == 0
    turn = {"prompt": [_user(ask)]}
    return {
        "text": {"prompt": ask, "chosen": good, "rejected": bad},
        "lists": turn | {"chosen": [_answer(good)], "rejected": [_answer(bad)]},
        "message": turn | {"chosen": _answer(good), "rejected": _answer(bad)},
        "whole": {"chosen": [_user(ask), _answer(good)], "rejected": [_user(ask), _answer(bad)]},
        "marked": {
            side: f"\n\nHuman: {ask}\n\nAssistant: {text}" for side, text in (("chosen", good), ("rejected", bad))
        },
        "input": {"instruction": ask, "input": "of all", "chosen_response": good, "rejected_response": bad},
        "shared": {
            "conversations": [{"from": "human", "value": ask}],
            "chosen": {"from": "gpt", "value": good},
            "rejected": {"from": "gpt", "value": bad},
        },
        "tools": {"prompt": ask, "chosen": good, "rejected": bad, "system": "Be short.", "tools": [{"name": "add"}]},
        "label": {"prompt": ask, "completion": good if label else bad, "label": label},
        "tag": {"messages": [_user(ask), _answer(good if label else bad)], "kto_tag": label},
    }  # fmt: skip


def damaged_pairs(shop: Workshop, work: Path, chance: random.Random) -> Made:
    """Damage rows, or the bytes of the file around them."""
    name = chance.choice(list(layouts(0)))
    rows = [layouts(n)[name] for n in range(8)]
    if chance.random() < 0.1:  # another layout in between
        rows[3] = layouts(3)[chance.choice(list(layouts(0)))]
    if chance.random() < 0.6:
        for row in chance.sample(rows, chance.choice([1, 1, 8])):
            _damage_row(row, chance)
    suffix = chance.choice([".jsonl", ".jsonl", ".json", ".csv", ".jsonl.gz"])
    path = work / f"pairs{suffix}"
    raw = _encode(rows, suffix)
    if suffix == ".json" and chance.random() < 0.4:
        raw = damage_json(rows, chance)
    elif chance.random() < 0.4:
        raw = damage_bytes(raw, chance)
    if suffix.endswith(".gz"):
        raw = gzip.compress(raw)
        raw = damage_bytes(raw, chance) if chance.random() < 0.4 else raw
    put(path, raw)
    paired = "label" not in rows[0] and "kto_tag" not in rows[0]
    loss = chance.choice(["dpo", "simpo", "kto"] if paired else ["kto", "kto", "kto", "dpo"])
    words = [*_train(shop, work), "--dataset", str(path), "--preference_loss", loss]
    words += ["--skip_bad_rows"] if chance.random() < 0.3 else []
    return f"pairs {name} {suffix} {loss}", words, (str(path), "context")


def _damage_row(row: Row, chance: random.Random) -> None:
    kind, keys = chance.randrange(6), [key for key in row if key in SIDES]
    key = chance.choice(keys or list(row))
    deep: Any = "x"
    for _ in range(chance.choice([5, 300])):
        deep = [deep]
    if kind == 0:
        del row[key]
    elif kind == 1:
        row[key] = chance.choice(HOSTILE)
    elif kind == 2:
        row[key] = deep if chance.random() < 0.5 else {"role": deep, "content": deep}
    elif kind == 3 and isinstance(row[key], list):
        row[key].append(chance.choice([*HOSTILE, _user("again"), _answer(""), {"role": "assistant"}]))
    elif kind == 4:
        row["chosen"] = row["rejected"] = chance.choice(["same", "", " ", "\ud800", "<|im_end|>" * 3])
    else:
        row["label" if "label" in row else key] = chance.choice(
            [True, 2, "maybe", float("nan"), None, "1", -0.0]
        )


def _encode(rows: list[Row], suffix: str) -> bytes:
    if suffix == ".csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, sorted({key for row in rows for key in row}), restval="")
        writer.writeheader()
        writer.writerows(
            {key: v if isinstance(v, str) else json.dumps(v) for key, v in row.items()} for row in rows
        )
        return text.getvalue().encode(errors="surrogatepass")
    lines = [json.dumps(row, ensure_ascii=suffix != ".jsonl.gz") for row in rows]
    return ("[" + ",".join(lines) + "]" if suffix == ".json" else "\n".join(lines)).encode(
        errors="surrogatepass"
    )


def damaged_reference(shop: Workshop, work: Path, chance: random.Random) -> Made:
    """Resume a run whose stored reference is damaged."""

    def make(folder: Path) -> None:
        pairs = folder.with_name("pairs.jsonl")
        pairs.write_bytes(_encode([layouts(n)["text"] for n in range(8)], ".jsonl"))
        words = [*_train(shop, work), "--dataset", str(pairs), "--reference", "precomputed"]
        assert main([*words, "--save_steps", "1", "--train_type", "lora"]) == 0
        shutil.move(work / "runs" / "r", folder)

    run = shop.link(shop.made("preference-run", make), work / "run")
    damage(run / "reference.safetensors", chance)
    words = ["train", "--resume", str(run), "--output_dir", str(work / "runs"), "--max_steps", "2"]
    return "pairs reference", words, (str(run), "reference")


def _train(shop: Workshop, work: Path) -> list[str]:
    place = ["--model_name", str(shop.good / "model"), "--output_dir", str(work / "runs"), "--name", "r"]
    amount = ["--max_steps", "1", "--lora_rank", "2", "--lr", "1e-4", "--batch_size", "2", "--skip_eval"]
    return ["train", *FIXED, *place, *amount, "--recipe", "preference"]


def preference_case(shop: Workshop, work: Path, chance: random.Random) -> Made:
    return (damaged_reference if chance.random() < 0.15 else damaged_pairs)(shop, work, chance)
