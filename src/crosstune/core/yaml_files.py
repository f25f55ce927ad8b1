"""Read YAML files with limits on size, depth and aliases, and without types that expand or fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from crosstune.core.errors import shown
from crosstune.core.plain_files import UnreadableFile, read_plain_text

YAML_LIMIT = 1 << 20
DEPTH_LIMIT = 32
NODES_LIMIT = 20_000
"""The number of values in a document, with every alias counted as often as it is used."""
_LARGEST = 2**64
_PREFIX = "tag:yaml.org,2002:"


def read_yaml(path: Path) -> Any:
    """Return the value of a YAML file; dates are read as text."""
    text = read_plain_text(path, limit=YAML_LIMIT)
    try:
        loader = _Loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    # The others are what PyYAML's scanner raises for escapes such as "\\UFFFFFFFF".
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise UnreadableFile(
            path,
            f"it is not YAML that crosstune reads: {' '.join(str(error).split())[:400]}",
            do="correct the file",
        ) from error


class _Loader(yaml.SafeLoader):
    """A safe loader that counts what it composes, and has no timestamps, sets or ordered maps."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in rules if tag != f"{_PREFIX}timestamp"]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._measured: dict[int, tuple[int, int]] = {}
        """Node -> its number of values and its depth, with aliases expanded."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._depth += 1
        if self._depth > DEPTH_LIMIT:
            raise _problem(f"it is nested deeper than {DEPTH_LIMIT} levels", self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        event = self.peek_event()  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        self._depth -= 1
        if not isinstance(event, yaml.AliasEvent):
            self._measure(node)
        elif id(node) not in self._measured:
            raise _problem("an alias is used inside of what it names", event.start_mark)
        return node

    def _measure(self, node: Any) -> None:
        children: list[Any] = []
        if isinstance(node, yaml.SequenceNode):
            children = node.value
        elif isinstance(node, yaml.MappingNode):
            children = [part for pair in node.value for part in pair]
            _check_keys(node)
        measures = [self._measured[id(child)] for child in children]
        size = 1 + sum(count for count, _ in measures)
        depth = 1 + max((depth for _, depth in measures), default=0)
        if size > NODES_LIMIT or depth > DEPTH_LIMIT:
            raise _problem(
                f"with its aliases it has more than {NODES_LIMIT:,} values or {DEPTH_LIMIT} levels",
                node.start_mark,
            )
        self._measured[id(node)] = (size, depth)


def _check_keys(node: yaml.MappingNode) -> None:
    seen: set[tuple[str, str]] = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _problem("a key is not a plain word", key.start_mark)
        if (key.tag, key.value) in seen:
            raise _problem(f"the key {shown(key.value)} occurs twice", key.start_mark)
        seen.add((key.tag, key.value))


def _checked(construct: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Wrap a constructor of numbers and booleans, which fails in many ways for text behind an explicit tag."""

    def read(loader: Any, node: Any) -> Any:
        text = loader.construct_scalar(node)
        try:
            value = construct(loader, node)
        except (ValueError, LookupError, ArithmeticError) as error:
            raise _problem(
                f"{shown(text)} is not {node.tag.removeprefix(_PREFIX)}", node.start_mark
            ) from error
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise _problem(f"{shown(text)} is too large a number", node.start_mark)
        return value

    return read


def _plain_text(loader: Any, node: Any) -> str:
    text = str(loader.construct_scalar(node))
    try:
        text.encode("utf-8", errors="surrogateescape")  # the names of files may hold any bytes but NUL
    except UnicodeEncodeError as error:
        raise _problem(f"{shown(text)} holds half of a character", node.start_mark) from error
    if "\0" in text:
        raise _problem(f"{shown(text)} holds a NUL character", node.start_mark)
    return text


def _problem(text: str, mark: Any) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, text, mark)


_Loader.yaml_constructors = {
    f"{_PREFIX}null": yaml.SafeLoader.construct_yaml_null,
    f"{_PREFIX}bool": _checked(yaml.SafeLoader.construct_yaml_bool),
    f"{_PREFIX}int": _checked(yaml.SafeLoader.construct_yaml_int),
    f"{_PREFIX}float": _checked(yaml.SafeLoader.construct_yaml_float),
    f"{_PREFIX}str": _plain_text,
    f"{_PREFIX}seq": yaml.SafeLoader.construct_yaml_seq,
    f"{_PREFIX}map": yaml.SafeLoader.construct_yaml_map,
    None: yaml.SafeLoader.construct_undefined,
}
