"""Read YAML files with PyYAML's safe loader, limited to JSON types and to the size of a configuration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from crosstune.core.errors import shown
from crosstune.files.plain_files import UnreadableFile, read_plain_text

YAML_LIMIT = 1 << 20
DEPTH_LIMIT = 32
VALUES_LIMIT = 20_000
"""The most values in a document; an alias counts at each use."""
_LARGEST = 2**64
_TAG = "tag:yaml.org,2002:"
_OLD_NUMBER = re.compile(r"[-+]?0[0-9_]+|.*:.*")
"""Numbers of YAML 1.1 only: 017 is octal (15), and 10:30 has base 60 (630)."""


def read_yaml(path: Path) -> Any:
    """Return the value of a YAML file; dates, 10:30 and 017 are read as text."""
    text = read_plain_text(path, limit=YAML_LIMIT)
    try:
        value = yaml.load(text, _Loader)
        _check(value)
    # PyYAML raises the others for bad escapes and for text behind an explicit tag.
    except (
        yaml.YAMLError,
        ValueError,
        LookupError,
        ArithmeticError,
        AttributeError,
        RecursionError,
    ) as error:
        raise UnreadableFile(
            path,
            f"it is not YAML that crosstune reads: {_explain(error)}",
            do="correct the file",
        ) from error
    return value


def _explain(error: Exception) -> str:
    """Return the words of an error on one line, without PyYAML's name for a text."""
    return " ".join(str(error).replace('in "<unicode string>", ', "at ").split())[:400]


class _Loader(yaml.SafeLoader):
    """A safe loader that reads dates and old numbers as text and rejects repeated keys."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in rules if tag != f"{_TAG}timestamp"]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        tag = super().resolve(kind, value, implicit)
        is_number = tag in (f"{_TAG}int", f"{_TAG}float")
        return f"{_TAG}str" if is_number and _OLD_NUMBER.fullmatch(value) else tag

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen if isinstance(key, yaml.ScalarNode) else True:
                problem = f"the key {shown(key.value)} occurs twice or is not a plain word"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return node


def _check(value: Any) -> None:
    """Raise ValueError for a value that expands, nests too deeply, or is not of a JSON type."""
    left, num_values = [(value, 1)], 0
    while left:
        item, depth = left.pop()
        num_values += 1
        if num_values > VALUES_LIMIT or depth > DEPTH_LIMIT:
            raise ValueError(
                f"with its aliases it has more than {VALUES_LIMIT:,} values or {DEPTH_LIMIT} levels"
            )
        if isinstance(item, dict):
            left += [(part, depth + 1) for pair in item.items() for part in pair]
        elif isinstance(item, list):
            left += [(part, depth + 1) for part in item]
        elif isinstance(item, str):
            item.encode("utf-8", errors="surrogateescape")  # file names may contain any bytes but NUL
            if "\0" in item:
                raise ValueError(f"{shown(item)} contains a NUL character")
        elif not isinstance(item, (int, float, type(None))) or (
            isinstance(item, int) and abs(item) > _LARGEST
        ):
            raise ValueError(f"{shown(item)} is not a string, a list or a number of usual size")
