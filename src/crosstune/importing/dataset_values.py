"""Convert the datasets, templates, special tokens and scaled positions of other trainers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crosstune.config.options.method import ROPE_KINDS
from crosstune.data.render.built_in_templates import TEMPLATES
from crosstune.importing.values import (
    FILE_FOLDER,
    Convert,
    Found,
    Missing,
    Noted,
    Nothing,
    Options,
    is_off,
    last_part,
)

_PARTS = ("name", "subset", "data_dir", "fraction", "shards", "columns")
"""Keys of a dataset that select a part of it."""
_MLX_COLUMNS = {"prompt_feature": "prompt", "completion_feature": "completion", "chat_feature": "messages",
                "text_feature": "text"}  # fmt: skip


def held_out(value: Any, given: Mapping[str, Any]) -> Found:
    if is_off(value):
        return {"skip_eval": True} if not (given.get("eval_dataset") or given.get("test_datasets")) else {}
    number = float(value)
    chosen: Options = {"eval_fraction": number} if number < 1 else {"eval_samples": int(number)}
    return {"skip_eval": False, **chosen}


def text_field(value: Any, given: Mapping[str, Any]) -> Found:
    return {} if value in (None, "", "text") else {"columns": f"{value}=text"}


def dataset_part(value: Any, given: Mapping[str, Any]) -> Found:
    if is_off(value) or value == "train":
        return {}
    return Missing("--dataset reads the training split; save the part as a file and pass it")


def load_dataset(value: Any, given: Mapping[str, Any]) -> Found:
    """Convert the calls of load_dataset in Python code, each its arguments by name or code that cannot be read."""
    found: dict[str, set[str]] = {}
    for call in value:
        if isinstance(call, str):
            return Missing(f"{call} is computed by the program; pass --dataset FILE to this command")
        split, files = str(call.get("split") or "train"), call.get("data_files")
        if call.get("name") or call.get("data_dir") or "[" in split or "+" in split:
            return Missing(
                "--dataset reads the training split; save the part as a file and pass --dataset FILE"
            )
        parts = files if isinstance(files, Mapping) else {split: files or call["path"]}
        for part, paths in parts.items():
            known = {"train": "dataset", "test": "eval_dataset", "validation": "eval_dataset"}
            if part not in known:
                return Missing(
                    f"--dataset reads the training split, not {part}; save it as a file and pass --dataset FILE"
                )
            found.setdefault(known[part], set()).add(paths if isinstance(paths, str) else ",".join(paths))
    if len(found.get("dataset", ())) != 1 or len(found.get("eval_dataset", "1")) != 1:
        return Missing("the code does not load one dataset for training; pass --dataset FILE to this command")
    train, test = found["dataset"].pop(), found.get("eval_dataset", {""}).pop()
    return {"dataset": train} | (
        {"eval_dataset": test, "skip_eval": False} if test not in ("", train) else {}
    )


def axolotl_data(option: str) -> Convert:
    def convert(value: Any, given: Mapping[str, Any]) -> Found:
        items = value if isinstance(value, list) else [value]
        paths, formats, columns = list[str](), set[str](), dict[str, str]()
        for item in items:
            if not isinstance(item, Mapping) or not isinstance(item.get("path"), str):
                return Missing("list a path for each dataset")
            if part := next((key for key in _PARTS if not is_off(item.get(key))), None):
                return Missing(f"--dataset has no {part}; save the part as a file and pass --{option} FILE")
            files = item.get("data_files") or item["path"]
            paths += map(str, files) if isinstance(files, list) else [str(files)]
            split = str(item.get("split") or "train")
            if option == "dataset" and not split.startswith("train"):
                return Missing(
                    f"--dataset reads the training split, not {split}; save it as a file and pass it"
                )
            kind = item.get("type")
            formats.add("text" if kind == "completion" or option == "pretraining" else "auto")
            messages = "prompt" if given.get("rl") else "messages"
            renames = {"field_messages": messages, "field_instruction": "instruction", "field_input": "input",
                       "field_output": "output", "field_chosen": "chosen", "field_rejected": "rejected",
                       "field_prompt": "prompt", "field": "text", "field_completion": "completion",
                       "field_label": "label", "field_system": "system"}  # fmt: skip
            for source in (item, kind if isinstance(kind, Mapping) else {}):
                columns |= {
                    source[key]: ours for key, ours in renames.items() if isinstance(source.get(key), str)
                }
        if given.get("dataset_exact_deduplication"):
            paths = list(dict.fromkeys(paths))
        if len(set(paths)) < len(paths):
            return Missing(
                f"a path is listed twice; pass it once with a larger weight, as in --{option} a.jsonl:2,b.jsonl:1"
            )
        found: dict[str, Any] = {option: ",".join(paths)}
        if option == "dataset":
            found |= {"dataset_format": "text"} if formats == {"text"} else {}
            found |= rename_columns(columns)
        return found | ({"skip_eval": False} if option == "eval_dataset" else {})

    return convert


def rename_columns(columns: Mapping[str, str]) -> dict[str, Any]:
    """Return the option that renames columns of the data; empty if all have their names."""
    renamed = [f"{theirs}={ours}" for theirs, ours in columns.items() if theirs != ours]
    return {"columns": ",".join(renamed)} if renamed else {}


def axolotl_template(value: Any, given: Mapping[str, Any]) -> Found:
    if is_off(value) or value in ("tokenizer_default", "jinja"):
        return {}
    name = str(value).removeprefix("tokenizer_default_fallback_")
    if name in TEMPLATES:
        return {"chat_template": name}
    return Nothing("the model's own template is used; set --chat_template FILE if it is a different one")


def named_template(value: Any, given: Mapping[str, Any]) -> Found:
    """Convert a template by its file or by Unsloth's name."""
    if is_off(value) or value in TEMPLATES or Path(str(value)).suffix in (".jinja", ".txt"):
        return {} if is_off(value) else {"chat_template": value}
    return Nothing("the model's own template is used; set --chat_template FILE if it is another")


def template_text(value: Any, given: Mapping[str, Any]) -> Found:
    if is_off(value):
        return {}
    return (
        {"chat_template": value}
        if Path(str(value)).suffix
        else Missing("save the template as FILE: --chat_template FILE")
    )


def special_tokens(value: Any, given: Mapping[str, Any]) -> Found:
    if is_off(value):
        return {}
    if isinstance(value, list):
        return {"add_tokens": ",".join(map(str, value))}
    more = value.get("additional_special_tokens")
    if not set(value) <= {"bos_token", "eos_token", "pad_token", "unk_token", "additional_special_tokens"}:
        return Missing("the model's special tokens stay as they are; use --add_tokens for new ones")
    return (
        {"add_tokens": ",".join(map(str, more))}
        if more
        else Nothing("the tokenizer's own special tokens are used")
    )


def scaled_positions(value: Any, given: Mapping[str, Any]) -> Found:
    """Convert the type of RoPE scaling, or the dictionary of a model's config."""
    if is_off(value):
        return {}
    if isinstance(value, str):
        return Noted(
            {"rope_scaling": value}, "add --rope_factor: context_length divided by the model's own context"
        )
    kind = value.get("rope_type") or value.get("type")
    others = value.keys() - {"rope_type", "type", "factor", "original_max_position_embeddings", "rope_theta"}
    if others or kind not in ROPE_KINDS:
        return Missing("write it into config.json in a copy of the model's folder, and train that")
    return {"rope_scaling": kind, "rope_factor": value.get("factor")}


def factory_data(option: str) -> Convert:
    """Return a rule for names in LLaMA-Factory's dataset_info.json, which is looked up next to the file."""

    def convert(value: Any, given: Mapping[str, Any]) -> Found:
        names = [name.strip() for name in value.split(",")] if isinstance(value, str) else list(value)
        known, folder = _dataset_info(given)
        paths, columns = list[str](), dict[str, str]()
        for name in names:
            entry = known.get(name)
            if entry is None and Path(str(name)).suffix:
                paths.append(str(name))
            elif not isinstance(entry, Mapping):
                return Missing(
                    f"{name} is a name in dataset_info.json, which is not in dataset_dir; pass --{option} FILE to this command"
                )
            else:
                path = entry.get("hf_hub_url") or entry.get("file_name")
                if not isinstance(path, str):
                    return Missing(
                        f"{name} in dataset_info.json has no file_name or hf_hub_url; pass --{option} FILE"
                    )
                paths.append(path if "hf_hub_url" in entry else str(folder / path))
                ours = {"prompt": "instruction", "query": "input", "response": "output", "messages": "messages",
                        "system": "system", "tools": "tools", "chosen": "chosen", "rejected": "rejected",
                        "kto_tag": "label"}  # fmt: skip
                for key, theirs in (entry.get("columns") or {}).items():
                    if key in ours and theirs not in ("conversations", "prompt", "response"):
                        columns[str(theirs)] = ours[key]
        found: dict[str, Any] = {option: ",".join(paths)}
        if option == "dataset":
            found |= rename_columns(columns)
        return found | ({"skip_eval": False} if option == "eval_dataset" else {})

    return convert


def _dataset_info(given: Mapping[str, Any]) -> tuple[Mapping[str, Any], Path]:
    beside = Path(str(given.get(FILE_FOLDER, ".")))
    wanted = Path(str(given.get("dataset_dir") or "data"))
    for folder in (wanted, beside / wanted, beside):
        path = folder / "dataset_info.json"
        if path.is_file() and path.stat().st_size < 1 << 22:
            try:
                found = json.loads(path.read_text(encoding="utf-8"))
            except ValueError:
                continue
            return (found if isinstance(found, dict) else {}), folder
    return {}, beside


def mlx_hub_data(value: Any, given: Mapping[str, Any]) -> Found:
    if not isinstance(value, Mapping) or not isinstance(value.get("path"), str):
        return Missing("use --dataset HUB_ID")
    theirs = {key: item for key, item in value.items() if not is_off(item)}
    columns = {str(theirs.pop(key)): ours for key, ours in _MLX_COLUMNS.items() if key in theirs}
    whole = theirs.pop("train_split", "train") == "train"
    held_out = theirs.pop("valid_split", "validation") in ("validation", "valid", "test")
    theirs.pop("test_split", None)
    if theirs.keys() - {"path", "name"} or not (whole and held_out):
        return Missing("--dataset reads the training split; save the part as a file and pass --dataset FILE")
    return {"dataset": value["path"], **rename_columns(columns)}


_TUNE_COLUMNS = {
    "stack_exchange_paired_dataset": "question=prompt,response_j=chosen,response_k=rejected",
    "samsum_dataset": "dialogue=prompt,summary=completion",
    "grammar_dataset": "input=prompt,output=completion",
}


def tune_dataset(option: str) -> Convert:
    section = "dataset" if option == "dataset" else "dataset_val"

    def convert(value: Any, given: Mapping[str, Any]) -> Found:
        names = {"alpaca_dataset": "tatsu-lab/alpaca", "alpaca_cleaned_dataset": "yahma/alpaca-cleaned",
                 "slimorca_dataset": "Open-Orca/SlimOrca-Dedup", "samsum_dataset": "Samsung/samsum",
                 "stack_exchange_paired_dataset": "lvwerra/stack-exchange-paired", "grammar_dataset": "liweili/c4_200m",
                 "hh_rlhf_helpful_dataset": "RLHFlow/HH-RLHF-Helpful-standard"}  # fmt: skip
        files = given.get(f"{section}.data_files")
        source = (
            files if isinstance(files, str) else given.get(f"{section}.source") or names.get(last_part(value))
        )
        if not isinstance(source, str) or source in ("json", "csv", "text", "parquet"):
            return Missing(f"pass --{option} FILE to this command")
        found: dict[str, Any] = {option: source}
        if last_part(value) == "text_completion_dataset":
            found["dataset_format"] = "text"
        if columns := _TUNE_COLUMNS.get(last_part(value)):
            found["columns"] = columns
        return found | ({"skip_eval": False} if option == "eval_dataset" else {})

    return convert
