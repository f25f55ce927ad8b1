"""Damaged inputs of the commands around a run: benchmarks, cards, pairs and their journals, other trainers' configurations,
tasks."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import yaml

from crosstune.cli.main import main
from crosstune.files.journal import Journal
from injection.hostile_runs import RECORD, Made, damage
from injection.intact_files import Workshop
from injection.intact_runs import profiled_run
from injection.mutations import damage_json, put

CONFIGS = {
    "axolotl.yml": "base_model: org/m\nadapter: lora\nlora_r: 8\nlora_alpha: 16\nlearning_rate: 0.0002\nsequence_len: 512\n"
    "datasets:\n  - path: d.jsonl\n    type: chat_template\nmicro_batch_size: 2\nnum_epochs: 1\nlora_target_modules: [q_proj]\n",
    "factory.yaml": "stage: dpo\nfinetuning_type: lora\nmodel_name_or_path: org/m\ndataset: d\ntemplate: qwen\nlora_rank: 8\n"
    "pref_beta: 0.1\ncutoff_len: 512\nlearning_rate: 1.0e-5\n",
    "tune.yaml": "model:\n  _component_: torchtune.models.llama3.lora_llama3_8b\n  lora_rank: 8\n  lora_alpha: 16\nepochs: 1\n"
    "batch_size: 2\noptimizer:\n  _component_: torch.optim.AdamW\n  lr: 3e-4\n",
    "train.py": "from trl import SFTConfig, SFTTrainer\nfrom peft import LoraConfig\nargs = SFTConfig(learning_rate=1e-4, "
    "max_length=512, packing=True)\ntrainer = SFTTrainer(model='org/m', args=args, peft_config=LoraConfig(r=8))\n",
    "train.sh": "accelerate launch sft.py --model_name_or_path org/m --dataset_name d --learning_rate 1e-4 --use_peft \\\n"
    "  --lora_r 8 --max_length 512 --packing\n",
    "train.ipynb": json.dumps({"cells": [{"cell_type": "code", "source": [
        "from unsloth import FastLanguageModel\n", "model, t = FastLanguageModel.from_pretrained('org/m', load_in_4bit=True)"
    ]}]}),
    "lora.json": json.dumps({"base_model": "org/m", "adapter": "qlora", "lora_r": 8, "micro_batch_size": 1, "sequence_len": 64}),
}  # fmt: skip
RESULTS = [
    {"side": side, "asked": "arc", "definition": None, "weights": "0" * 64, "chat_template": False, "limit": None}
    | {"task": "arc", "metric": metric, "value": 0.5, "stderr": 0.1, "num_samples": 24, "num_fewshot": 0}
    | {"higher_is_better": True, "version": 1, "num_fewshot_asked": None, "precision": "auto"}
    for side in ("before", "after")
    for metric in ("acc", "acc_norm")
]  # fmt: skip
PAIRS = [
    {"prompt": f"Say {n}.", "chosen": "yes, it is", "rejected": "no", "score_chosen": n / 9, "score_rejected": -1.0, "judge": "j"}
    for n in range(6)
]  # fmt: skip
JUDGE = "def short(prompt, answer):\n    return -len(answer)\n"
TASK = (
    "task: t\ndataset_path: json\ndataset_kwargs: {data_files: {test: DATA}}\ntest_split: test\noutput_type: multiple_choice\n"
    'doc_to_text: "{{q}}"\ndoc_to_choice: [" a", " b"]\ndoc_to_target: "{{label}}"\n'
    "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
)


def _imports(shop: Workshop, work: Path, chance: random.Random) -> Made:
    name = chance.choice(list(CONFIGS))
    path = work / name
    raw = CONFIGS[name].encode()
    if name.endswith((".yml", ".yaml")) and chance.random() < 0.7:
        path.write_bytes(_as_yaml(damage_json(yaml.safe_load(CONFIGS[name]), chance)))
    else:
        path.write_bytes(raw)
        damage(path, chance)
    words = ["import", str(path), "--out", str(work / "out.yaml"), *chance.choice([[], ["--lenient"]])]
    return f"import {name}", words, (name, "--")


def _as_yaml(text: bytes) -> bytes:
    """Return damaged JSON as YAML, if it still is JSON that YAML can write."""
    try:
        return yaml.safe_dump(json.loads(text)).encode()
    except (ValueError, RecursionError):
        return text


def _benchmarks(shop: Workshop, work: Path, chance: random.Random) -> Made:
    run = shop.link(profiled_run(shop), work / "run")
    path = run / "benchmarks.json"
    path.write_text(json.dumps({"format": 1, "lm_eval": "0.4", "results": RESULTS}))
    if chance.random() < 0.75:
        damage(path, chance)
    else:
        damage(
            run / chance.choice([*RECORD, "adapter/crosstune.json", "adapter/adapter_config.json"]), chance
        )
    push = ["push", str(run), "--to", "org/name", "--base", "org/base", "--dry_run"]
    commands = [["report", str(run)], push, [*push, "--out", str(work / "out")], [*push, "--json"]]
    commands.append(["compare", str(run), str(profiled_run(shop)), "--out", str(work / "c.html")])
    command = chance.choice(commands)
    return f"benchmarks {command[0]}", command, (str(run), "--", "adapter", "base model")


def _pairs(shop: Workshop, work: Path, chance: random.Random) -> Made:
    (work / "judge.py").write_text(JUDGE)
    path, out, judge = work / "pairs.jsonl", work / "out.jsonl", ["--judge", f"{work / 'judge.py'}:short"]
    path.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    check = ["pairs", "check", str(path), *judge, *chance.choice([[], ["--out", str(out)], ["--json"]])]
    if chance.random() < 0.5:
        damage(path, chance)
        return "pairs check", check, (str(path), "prompt")
    prompts = work / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in PAIRS))
    options = ["--num", "2", "--max_new_tokens", "2", "--backend", "cpu", "--out", str(out)]
    make = ["pairs", "make", str(shop.good / "adapter"), "--prompts", str(prompts), *judge, *options]
    if chance.random() < 0.4:
        damage(prompts, chance)
        return "pairs make prompts", make, (str(prompts), "pair", "--", "message", "prompt")
    kept = _pair_journals(shop, make, out)
    for partial in kept.iterdir():
        shutil.copy(partial, out.with_name(partial.name))
    damage(out.with_name(chance.choice(sorted(each.name for each in kept.iterdir()))), chance)
    return "pairs make journal", make, (str(work), "pair")


def _pair_journals(shop: Workshop, make: list[str], out: Path) -> Path:
    """The journals of a command that was killed before it wrote its pairs; they fit prompts and a judge of the same text."""

    def keep(folder: Path) -> None:
        plain, Journal.remove = Journal.remove, lambda self: None  # type: ignore[method-assign,assignment,return-value]
        try:
            assert main(make) in (0, 2)
        finally:
            Journal.remove = plain  # type: ignore[method-assign]
        folder.mkdir()
        for partial in out.parent.glob(f"{out.name}*.partial"):
            shutil.move(partial, folder / partial.name)
        out.unlink(missing_ok=True)

    return shop.made("pair-journals", keep)


def _tasks(shop: Workshop, work: Path, chance: random.Random) -> Made:
    data, task = work / "rows.jsonl", work / "task.yaml"
    data.write_text("".join(json.dumps({"q": f"{n}?", "label": n % 2}) + "\n" for n in range(3)))
    task.write_text(TASK.replace("DATA", str(data)))
    damaged = chance.choice([data, task, task])
    if damaged is task and chance.random() < 0.7:
        put(task, _as_yaml(damage_json(yaml.safe_load(task.read_text()), chance)))
    else:
        damage(damaged, chance)
    words = ["eval", str(shop.good / "adapter"), "--tasks", str(task), "--backend", "cpu", "--limit", "2"]
    return f"tasks {damaged.name}", words, (str(work), "task")


RESULT_KINDS: dict[str, Callable[[Workshop, Path, random.Random], Made]] = {
    "imports": _imports,
    "benchmarks": _benchmarks,
    "made pairs": _pairs,
    "tasks": _tasks,
}
