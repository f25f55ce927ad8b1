"""Read another trainer's configuration: YAML, JSON, a command line, or the Python code of a script or notebook."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from crosstune.core.errors import UserError, shown
from crosstune.core.safe_text import HIDDEN, holds_secret
from crosstune.files.json_files import read_object
from crosstune.files.plain_files import read_plain_text
from crosstune.files.yaml_files import YAML_LIMIT, read_yaml

NOTEBOOK_LIMIT = 1 << 24
TRAINERS = frozenset(
    {"sft", "dpo", "kto", "orpo", "cpo", "bco", "reward", "grpo", "rloo", "ppo", "gkd", "gold", "prm", "xpo", "nash", "distillation"}
)  # fmt: skip
"""The trainers of TRL, in the names of its subcommands, scripts and classes."""
_CALLS = re.compile(
    r"from_pretrained|get_peft_model|\w*Config|\w*Arguments|\w*Trainer|load_dataset|get_chat_template"
)
"""The calls in Python code whose keywords are options."""
_OBJECTS = frozenset(
    {"model", "tokenizer", "processing_class", "train_dataset", "eval_dataset", "args", "data_collator", "peft_config",
     "quantization_config", "callbacks", "config", "formatting_func", "compute_metrics", "ref_model"}
)  # fmt: skip
"""Keywords that pass objects, not options."""


@dataclass(frozen=True)
class Given:
    """A key of a configuration."""

    key: str
    value: Any
    line: int | None = None
    expression: str = ""
    """The Python code of a value that is known only at run time."""


def read_given(path: Path, *, sections: Iterable[str]) -> list[Given]:
    """Return the keys of a file; those in a section as `section.key`."""
    if path.suffix in (".yaml", ".yml"):
        return list(_flat(_options(read_yaml(path), path), _lines(path), sections=frozenset(sections)))
    if path.suffix == ".ipynb":
        return _from_python(_notebook_code(read_object(path, foreign=True, limit=NOTEBOOK_LIMIT)), path)
    if path.suffix == ".json":
        return list(
            _flat(read_object(path, foreign=True, limit=YAML_LIMIT), {}, sections=frozenset(sections))
        )
    text = read_plain_text(path, limit=YAML_LIMIT)
    if path.suffix == ".py":
        return _from_python(text, path)
    found = _from_words(text, path)
    if not found:
        raise UserError(
            f"{path} contains no options.",
            why="it is not YAML, JSON, Python, a notebook, or a command with --options.",
            do="pass the configuration file of the other trainer",
        )
    return found


def _options(data: Any, path: Path) -> dict[Any, Any]:
    """Return the contents of a configuration file; raise a UserError if they are not a mapping."""
    if not isinstance(data, dict):
        why = "it is empty." if data is None else "it is not a mapping of keys to values."
        raise UserError(
            f"{path} contains no options.", why=why, do="pass the configuration file of the other trainer"
        )
    return data


def _flat(
    data: dict[Any, Any], lines: Mapping[str, int], *, sections: frozenset[str], prefix: str = ""
) -> Iterator[Given]:
    for name, value in data.items():
        key = f"{prefix}{name}".replace("-", "_")
        if isinstance(value, dict) and str(name) in sections:
            yield from _flat(value, lines, sections=sections, prefix=f"{key}.")
        else:
            yield Given(key, value, lines.get(f"{prefix}{name}"))


def _lines(path: Path) -> dict[str, int]:
    """Return the line of each key of a YAML file that `read_yaml` accepts."""
    found: dict[str, int] = {}

    def walk(node: Any, prefix: str) -> None:
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            found[f"{prefix}{key.value}"] = key.start_mark.line + 1
            walk(value, f"{prefix}{key.value}.")

    walk(yaml.compose(read_plain_text(path, limit=YAML_LIMIT), yaml.SafeLoader), "")
    return found


def _from_words(text: str, path: Path) -> list[Given]:
    """Return the `--key value` and `key=value` arguments of a command or shell script."""
    try:
        words = shlex.split(re.sub(r"\\\r?\n", " ", text), comments=True)
    except ValueError as error:
        raise UserError(
            f"{path} cannot be read as a command.", why=f"{error}.", do="close its quotes"
        ) from error
    place, trainer = _command(words)
    found = [Given("trainer", trainer)] if trainer else []
    while place < len(words):
        word = words[place]
        place += 1
        key, equals, value = word.lstrip("-").partition("=")
        if word.startswith("--") and key:
            values = [value] if equals else []
            while not equals and place < len(words) and not words[place].startswith("--"):
                values.append(words[place])
                place += 1
            found.append(Given(key.replace("-", "_"), _scalar(values)))
        elif equals and re.fullmatch(r"[a-z_][\w.]*", key) and not word.startswith("-"):
            found.append(Given(key, _scalar([value])))
    return found


def _command(words: list[str]) -> tuple[int, str]:
    """Return the start of the trainer's own arguments, after a launcher's, and TRL's trainer by subcommand or script."""
    for place, (word, after) in enumerate(pairwise(words), start=1):
        if Path(word).name == "trl" and after in TRAINERS:
            return place + 1, after
        if word.endswith(".py") and after.startswith("-"):
            name = Path(word).stem.removeprefix("run_").removesuffix("_modeling")
            return place, name if TRAINERS & set(name.split("_")) else ""
    return 0, ""


def _scalar(words: list[str]) -> Any:
    if not words:
        return True
    values = [yaml.safe_load(word) if re.fullmatch(r"[\w.+\-]+", word) else word for word in words]
    found = [float(value) if _is_float(value) else value for value in values]
    return found[0] if len(found) == 1 else found


def _is_float(value: Any) -> bool:
    return isinstance(value, str) and bool(re.fullmatch(r"[-+]?\d+(\.\d*)?e[-+]?\d+", value, re.IGNORECASE))


def _notebook_code(notebook: Mapping[str, Any]) -> str:
    cells = notebook.get("cells")
    code = [
        cell["source"] if isinstance(cell["source"], str) else "".join(map(str, cell["source"]))
        for cell in (cells if isinstance(cells, list) else [])
        if isinstance(cell, dict)
        and cell.get("cell_type") == "code"
        and isinstance(cell.get("source"), (str, list))
    ]
    lines = "\n".join(code).splitlines()
    return "\n".join("" if line.lstrip().startswith(("!", "%")) else line for line in lines)


def _from_python(text: str, path: Path) -> list[Given]:
    """Return the keywords of the calls that configure a run; nothing is executed."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        why = str(error).replace("<unknown>, ", "")
        raise UserError(f"{path} is not Python code.", why=f"{why}.", do="correct the file") from error
    known: dict[str, Any] = {}
    found: list[Given] = []
    datasets, trained, trainers, adapters = list[Any](), list[Any](), dict[str, set[str]](), dict[str, int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            value = _literal(node.value, known)
            if value is not _UNKNOWN:
                known[node.targets[0].id] = value
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not _CALLS.fullmatch(_name(node.func)):
            continue
        called = re.fullmatch(r"(\w+?)(Config|Trainer)", _name(node.func))
        if called and called[1].lower() in TRAINERS:
            trainers.setdefault(called[2], set()).add(called[1].lower())
        if ast.unparse(node.func) in (
            "LoraConfig",
            "peft.LoraConfig",
            "get_peft_model",
            "peft.get_peft_model",
        ):
            adapters[_name(node.func)] = node.lineno
        if _name(node.func) == "load_dataset":
            datasets.append((node.lineno, _dataset_call(node, known)))
            continue
        if _name(node.func) == "from_pretrained" and node.args and "Tokenizer" not in ast.unparse(node.func):
            found.append(_given(_MODEL, node.args[0], known))
        for keyword in node.keywords:
            if keyword.arg == "train_dataset":
                trained.append((keyword.value.lineno, ast.unparse(keyword.value)))
            if keyword.arg == "model" and isinstance(_literal(keyword.value, known), str):
                found.append(_given(_MODEL, keyword.value, known))
            if keyword.arg == "peft_config" and _literal(keyword.value, known) is not None:
                adapters.setdefault(ast.unparse(keyword.value), keyword.value.lineno)
            if keyword.arg is not None and keyword.arg not in _OBJECTS:
                found.append(_given(keyword.arg, keyword.value, known))
    if names := trainers.get("Trainer") or trainers.get("Config"):
        found.insert(0, Given("trainer", " and ".join(sorted(names))))
    if adapters:
        name = "LoraConfig" if "LoraConfig" in adapters else next(iter(adapters))
        found.append(Given("peft_config", name, adapters[name]))
    if calls := datasets or trained[:1]:
        found.append(Given("load_dataset", [call for _, call in calls], calls[0][0]))
    if not found:
        raise UserError(
            f"{path} does not configure a training run.",
            why="it has no call of from_pretrained, get_peft_model, a Config, Arguments or Trainer class.",
            do="pass the script or notebook that trains",
        )
    return found


_UNKNOWN = object()
_MODEL = "pretrained_model_name_or_path"


def _given(key: str, node: ast.expr, known: Mapping[str, Any]) -> Given:
    value = _literal(node, known)
    code = ast.unparse(node) if value is _UNKNOWN else ""
    return Given(key, None if code else value, node.lineno, code)


def _dataset_call(node: ast.Call, known: Mapping[str, Any]) -> Any:
    """Return the arguments of load_dataset by name, or its code if one of them is computed."""
    given = dict(zip(("path", "name", "data_dir", "data_files", "split"), node.args, strict=False))
    given |= {keyword.arg or "**": keyword.value for keyword in node.keywords}
    found = {name: _literal(value, known) for name, value in given.items()}
    return ast.unparse(node) if _UNKNOWN in found.values() else found


def _literal(node: ast.expr, known: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return known.get(node.id, _UNKNOWN)
    if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
        return ast.unparse(node)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return _UNKNOWN


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def shown_value(value: Any) -> str:
    """Return a value in one short line."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    if holds_secret(text):
        return HIDDEN
    return shown(text)[1:-1] if len(text) <= 60 else f"{shown(text[:57])[1:-1]}..."
