"""Read the table of keys, `keys.yaml`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any, TypeAlias

import yaml

from crosstune.importing import dataset_values, torchtune_values, values
from crosstune.importing.values import Convert, Missing, Nothing, Options

Rule: TypeAlias = "str | Nothing | Missing | Mapping[str, Options] | Convert"
"""The option with the same meaning, a reason, their value -> options, or a function."""


@cache
def load_rules(tables: str) -> Mapping[str, Rule]:
    """Return the rules of these tables by key; later tables replace keys of earlier ones."""
    text = resources.files("crosstune.importing").joinpath("keys.yaml").read_text(encoding="utf-8")
    known = yaml.safe_load(text)
    return {key: rule for name in tables.split() for keys, rule in _rows(known[name]) for key in keys.split()}


def _rows(table: Mapping[str, Any]) -> Iterator[tuple[str, Rule]]:
    yield from ((key, key) for key in table.get("same", "").split())
    yield from table.get("renamed", {}).items()
    yield from table.get("values", {}).items()
    yield from ((keys, {"true": options, "false": {}}) for keys, options in table.get("switch", {}).items())
    yield from ((keys, _function(name)) for name, keys in table.get("computed", {}).items())
    yield from ((keys, Nothing(reason)) for reason, keys in table.get("no need", {}).items())
    yield from ((keys, Missing(advice)) for advice, keys in table.get("no counterpart", {}).items())


def _function(text: str) -> Convert:
    """Return the function of a name, or of a name with the arguments that make it."""
    name, *words = text.split()
    module = next(each for each in (values, dataset_values, torchtune_values) if hasattr(each, name))
    found = getattr(module, name)
    return found(*(int(word) if word.isdigit() else word for word in words)) if words else found


def describe(rule: Rule) -> str:
    """Return a rule in one line of Markdown."""
    if isinstance(rule, Nothing):
        return f"no need: {rule}"
    if isinstance(rule, Missing):
        return f"no counterpart: {rule}"
    if isinstance(rule, str):
        return f"`{rule}`"
    if isinstance(rule, Mapping):
        texts = [
            f"{value or 'empty'}: "
            + (", ".join(f"`{name}: {ours}`" for name, ours in options.items()) or "as is")
            for value, options in rule.items()
        ]
        return "; ".join(texts)
    return "converted by its value"
