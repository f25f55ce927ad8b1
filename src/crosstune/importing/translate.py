"""Translate another trainer's configuration into options of crosstune, with a note for each key."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from crosstune.config.load import make_config
from crosstune.config.recipe_spec import load_recipe
from crosstune.config.schema import options_by_name
from crosstune.core.errors import UserError
from crosstune.core.names import did_you_mean
from crosstune.files.plain_files import read_plain_text
from crosstune.importing.read import NOTEBOOK_LIMIT, Given, read_given, shown_value
from crosstune.importing.tools import LORA_CONFIG, TOOLS, Rule, Tool
from crosstune.importing.torchtune_values import last_layers
from crosstune.importing.values import (
    FILE_FOLDER,
    LAST_16,
    SCALE_OF_20,
    TWICE_THE_RANK,
    Missing,
    Noted,
    Nothing,
    is_off,
    resolve_references,
)

_IMPORTS_UNSLOTH = re.compile(r"\b(?:from|import) unsloth\b|\bFast(?:Language|Vision)?Model\b")
_EITHER = {
    "max_steps": "num_epochs",
    "num_epochs": "max_steps",
    "warmup_steps": "warmup_ratio",
    "warmup_ratio": "warmup_steps",
}
"""An option -> the option that replaces it."""
_PRECISIONS = ("bf16", "fp16", "dtype", "torch_dtype")
Kind = Literal["mapped", "default", "nothing", "missing"]
"""A key that sets options, sets them to crosstune's defaults, changes nothing, or has no counterpart."""


@dataclass(frozen=True)
class Note:
    """A key of the other trainer and its translation."""

    key: str
    value: Any
    line: int | None
    kind: Kind
    text: str


@dataclass(kw_only=True)
class Imported:
    """The options of an imported configuration."""

    tool: Tool
    options: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    added: dict[str, Any] = field(default_factory=dict)
    """Defaults of the other trainer that differ from crosstune's."""

    @property
    def missing(self) -> list[Note]:
        return [note for note in self.notes if note.kind == "missing"]

    @property
    def remark(self) -> str:
        return self.tool.remark if self.options.get("recipe", "sft") == "sft" else ""

    def to_yaml(self) -> str:
        head = f"# Imported from {self.tool.title}. Options under the second comment are its defaults.\n"
        text = yaml.safe_dump(self.options, sort_keys=False, allow_unicode=True) if self.options else ""
        if self.added:
            text += f"# Defaults of {self.tool.title} that differ from crosstune's.\n"
            text += yaml.safe_dump(self.added, sort_keys=False, allow_unicode=True)
        return head + text


def import_file(path: Path, *, tool: str = "auto", overrides: Mapping[str, Any] | None = None) -> Imported:
    """Translate a file; `overrides` are options of crosstune that override the file."""
    every = [section for each in TOOLS.values() for section in each.sections]
    name = tool if tool != "auto" else _recognize(read_given(path, sections=every), path)
    chosen = TOOLS[name]
    given = [_negated(entry, chosen) for entry in read_given(path, sections=chosen.sections)]
    return _translate(given, chosen, folder=path.parent, overrides=overrides or {})


def _negated(entry: Given, tool: Tool) -> Given:
    """Return `--no_key` as the key with the value False."""
    key = entry.key.removeprefix("no_")
    is_switch = entry.value is True and entry.key not in tool.rules and key in tool.rules
    return Given(key, False, entry.line) if is_switch else entry


def _recognize(given: Sequence[Given], path: Path) -> str:
    """Return the trainer with the most keys in the file."""
    if path.suffix in (".py", ".ipynb"):
        return "unsloth" if _IMPORTS_UNSLOTH.search(read_plain_text(path, limit=NOTEBOOK_LIMIT)) else "trl"
    keys = {entry.key for entry in given}
    scores = {name: (len(keys & tool.marks), len(keys & set(tool.rules))) for name, tool in TOOLS.items()}
    best = max(scores, key=lambda name: scores[name])
    if not scores[best][0]:
        raise UserError(
            f"Cannot tell which trainer {path} is for.",
            why="it has none of the keys that identify one.",
            do=f"pass --from {', '.join(TOOLS)}",
        )
    return best


def _translate(given: Sequence[Given], tool: Tool, *, folder: Path, overrides: Mapping[str, Any]) -> Imported:
    everything = {entry.key: entry.value for entry in given}
    everything |= {
        key: resolve_references(value, everything)
        for key, value in everything.items()
        if isinstance(value, str)
    }
    everything[FILE_FOLDER] = str(folder)
    result = Imported(tool=tool)
    for entry in given:
        found = _apply(tool.rules, entry, everything)
        if isinstance(found, Missing):
            instead = {name for name in overrides if f"--{name}" in found}
            kind: Kind = "mapped" if instead else "missing"
            text = f"replaced by --{next(iter(instead))}" if instead else str(found)
            result.notes.append(Note(entry.key, entry.value, entry.line, kind, text))
        elif isinstance(found, Nothing) or not found:
            text = str(found) if isinstance(found, Nothing) else "as in crosstune"
            result.notes.append(Note(entry.key, entry.value, entry.line, "nothing", text))
        elif wrong := _why_invalid(found):
            result.notes.append(Note(entry.key, entry.value, entry.line, "missing", wrong))
        else:
            _keep(result, entry, found)
    for name in overrides:
        result.options.pop(_EITHER.get(name, ""), None)
    result.options |= overrides
    _add_defaults(result, everything)
    make_config(**result.options, **result.added)  # raises if they are not valid
    return result


def _why_invalid(options: Mapping[str, Any]) -> str:
    """Return why options have invalid values; an empty string if they are valid."""
    try:
        make_config(**options)
    except UserError as error:
        first = next(iter(getattr(error, "problems", ())), error)
        return f"{first.message.replace(' (argument)', '').rstrip('.')}; {first.do or first.why}"
    return ""


def _apply(rules: Mapping[str, Rule], entry: Given, everything: Mapping[str, Any]) -> Any:
    rule = rules.get(entry.key) or next(
        (rules[name] for name in rules if name.endswith("*") and entry.key.startswith(name[:-1])), None
    )
    if rule is None:
        if is_off(entry.value) and not entry.expression:
            return Nothing("not set")
        return Missing(f"unknown key; {did_you_mean(entry.key, list(rules))}".strip("; "))
    if isinstance(rule, Nothing):
        return rule
    if entry.expression and entry.key in _PRECISIONS:
        return Nothing("crosstune uses the best precision that the machine supports")
    if entry.expression:
        return Missing(f"{entry.expression} is computed by the program; set the option in the written file")
    value = everything[entry.key]
    if isinstance(rule, Missing):
        return Nothing("off") if is_off(value) else rule
    if isinstance(rule, str):
        return {} if value is None else {rule: value}
    if isinstance(rule, Mapping):
        text = "" if value is None else str(value).lower()
        if text not in rule and is_off(value):
            return {}
        return rule.get(text, Missing(f"known values: {', '.join(name or 'empty' for name in rule)}"))
    try:
        return rule(value, everything)
    except (TypeError, ValueError, KeyError, IndexError, ZeroDivisionError):
        return Missing(f"the value {shown_value(value)} cannot be read")


def _keep(result: Imported, entry: Given, found: Mapping[str, Any]) -> None:
    """Keep the options of a key. A later key does not override an earlier key, unless it is more specific."""
    options = options_by_name()
    texts, is_default = [], True
    for name, value in found.items():
        if name not in options:
            raise AssertionError(f"{entry.key} sets {name}, which is not an option")
        before = result.options.get(name)
        if name == "train_type" and before in ("qlora", "dora") and value in ("lora", "full"):
            continue
        if isinstance(value, float):
            is_whole = value == int(value) and options[name].type is not float
            value = int(value) if is_whole else float(f"{value:.10g}")
        result.options[name] = value
        texts.append(f"{name}: {shown_value(value)}")
        is_default = is_default and value == options[name].default
    kind: Kind = "default" if is_default else "mapped"
    text = ", ".join(texts) or "already set"
    text += f" ({found.note})" if isinstance(found, Noted) else ""
    result.notes.append(Note(entry.key, entry.value, entry.line, kind, text))


def _add_defaults(result: Imported, everything: Mapping[str, Any]) -> None:
    options, known = result.options, options_by_name()
    presets = load_recipe(options.get("recipe", "sft")).preset_options
    defaults = {
        **result.tool.defaults,
        **(LORA_CONFIG if everything.get("peft_config") == "LoraConfig" else {}),
    }
    has_adapter = options.get("train_type", defaults.get("train_type")) != "full"
    rank: Any = options.get("lora_rank", defaults.get("lora_rank", known["lora_rank"].default))
    for name, value in defaults.items():
        if name in options or (name.startswith("lora_") and not has_adapter):
            continue
        if _EITHER.get(name) in options:
            continue
        if name in ("beta", "sft_weight") and options.get("preference_loss") != "simpo":
            continue  # the same in both, except for simpo
        if name == "cosine_min_lr_ratio" and not str(
            options.get("lr_scheduler", defaults.get("lr_scheduler", "cosine"))
        ).startswith("cosine"):
            continue
        if name == "lr":
            value = result.tool.rates.get(options.get("recipe", "sft"), value)
        if value in (TWICE_THE_RANK, SCALE_OF_20):
            value = (2 if value == TWICE_THE_RANK else 20) * rank
        if value == LAST_16:
            layers = last_layers(16, everything) if has_adapter and "num_layers" not in everything else {}
            value = layers.get("layers_to_transform") if isinstance(layers, dict) else None
        if value != known[name].default or name in presets:
            result.added[name] = value
