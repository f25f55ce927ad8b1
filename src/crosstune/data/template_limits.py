"""Limit what a template may do: steps, CPU time, sizes of strings, and the functions it can call."""

from __future__ import annotations

import string
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jinja2 import nodes
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MOST_STEPS = 2_000_000
MOST_SECONDS = 1.0
"""CPU time, so that a busy machine does not fail a template."""
MOST_CHARACTERS = 32 << 20
"""The limit for any string, list or output, in addition to the size of the conversation."""
MOST_BITS = 4096
_STEPS_BETWEEN_LOOKS = 256

# What chat templates use. Other filters (center, wordwrap, format, random, ...) can make huge strings, or a different
# text each time.
# fmt: off
FILTERS = frozenset(
    {
        "abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float",
        "groupby", "indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min",
        "reject", "rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr", "sort",
        "string", "sum", "title", "tojson", "trim", "unique", "upper", "wordcount",
    }
)
METHODS = frozenset(
    {
        "capitalize", "casefold", "count", "endswith", "find", "format", "get", "index", "isalnum",
        "isalpha", "isascii", "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle",
        "isupper", "items", "join", "keys", "lower", "lstrip", "partition", "removeprefix", "removesuffix",
        "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith",
        "strip", "swapcase", "title", "upper", "values",
    }
)
# fmt: on


class OverLimit(Exception):
    """A template exceeded a limit of time, memory or features."""


@dataclass
class Budget:
    """The remaining budget of one rendering; `start` resets it."""

    steps: int = 0
    deadline: float = 0.0
    characters: int = MOST_CHARACTERS
    written: int = 0

    def start(self, *, input_characters: int) -> None:
        # The limits apply to what a template adds, so that long conversations can be rendered.
        self.steps = MOST_STEPS
        self.characters = MOST_CHARACTERS + 16 * input_characters
        self.written = 0
        self.deadline = time.thread_time() + MOST_SECONDS + input_characters / 5e6

    def spend(self, steps: int = 1) -> None:
        looked = self.steps // _STEPS_BETWEEN_LOOKS
        self.steps -= steps
        if self.steps < 0:
            raise OverLimit(f"it takes more than {MOST_STEPS:,} steps")
        if self.steps // _STEPS_BETWEEN_LOOKS != looked and time.thread_time() > self.deadline:
            raise OverLimit(f"it takes more than {MOST_SECONDS:g} s of CPU time")

    def check_size(self, characters: int) -> None:
        if characters > self.characters:
            raise OverLimit(f"it makes a text of more than {self.characters >> 20} million characters")

    def write(self, characters: int) -> None:
        """Count output, to the text or to a variable that captures it."""
        self.written += characters
        self.check_size(self.written)

    def put_out(self, value: Any) -> Any:
        self.write(self._weigh(value))
        return value

    def check_value(self, value: Any) -> Any:
        """Return the value after checking the size of its text; a list can contain another many times."""
        self.check_size(self._weigh(value))
        return value

    def _weigh(self, value: Any) -> int:
        if isinstance(value, str):
            return len(value)
        if isinstance(value, Mapping):
            value = [part for item in value.items() for part in item]
        if not isinstance(value, (list, tuple, set, frozenset)):
            return 1
        self.spend(len(value))
        return 2 + sum(self._weigh(item) for item in value)

    def counted(self, values: Iterable[Any], characters: int) -> Iterator[Any]:
        """Yield the values of a loop whose body has this many characters of plain text."""
        for value in values:
            self.spend()
            self.write(characters)
            yield value

    def joined(self, values: list[Any]) -> str:
        texts = [str(self.check_value(value)) for value in values]
        self.check_size(sum(map(len, texts)))
        return "".join(texts)


class GuardedEnvironment(ImmutableSandboxedEnvironment):
    """jinja's sandbox, which protects our objects, with limits on computation and memory."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, budget: Budget, **settings: Any) -> None:
        super().__init__(optimized=False, finalize=budget.put_out, **settings)
        self.budget = budget
        self.macro_characters: dict[str, int] = {}
        self.filters = {name: made for name, made in self.filters.items() if name in FILTERS}
        self.filters |= {"_counted": budget.counted, "_joined": budget.joined}
        for name, guard in (("replace", _replaced), ("join", _join), ("indent", _indent), ("string", _one)):
            self.filters[name] = _before(self.filters[name], guard, budget)
        for name in ("lipsum", "cycler", "joiner"):
            self.globals.pop(name, None)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            if loop.recursive:
                raise OverLimit("it uses a recursive loop, which cannot be bounded")
            loop.iter = _filtered(loop.iter, "_counted", nodes.Const(_plain_characters(loop)))
        for macro in tree.find_all(nodes.Macro):
            self.macro_characters[macro.name] = _plain_characters(macro)
        tree = _JoinConcats().visit(tree)
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.budget.spend()
        if operator == "%" and isinstance(left, str):
            _check_widths(left)
            self.budget.check_value(right)
        if operator == "**":
            _check_power(left, right)
        elif operator == "*":
            _check_product(left, right, self.budget)
        elif (
            operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple))
        ):
            self.budget.check_size(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.budget.spend()
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(function, Macro):
            self.budget.write(self.macro_characters.get(function.name, 0))
        elif isinstance(owner, (str, list, tuple, dict)):
            if name not in METHODS:
                raise OverLimit(f"it calls the method {name}, which chat templates do not need")
            _check_method(name, owner, args, self.budget)
        return super().call(context, function, *args, **kwargs)


class _JoinConcats(NodeTransformer):
    """Replace `a ~ b` by our own join, since jinja's cannot be intercepted."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_joined")


def _filtered(node: nodes.Node, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _plain_characters(node: nodes.Node) -> int:
    return sum(len(data.data) for data in node.find_all(nodes.TemplateData))


def _before(function: Callable[..., Any], guard: Callable[..., None], budget: Budget) -> Callable[..., Any]:
    """Return the filter with a guard on its arguments. `jinja_pass_arg` means that jinja passes its context first."""

    def guarded(*args: Any, **kwargs: Any) -> Any:
        values = args[1:] if hasattr(function, "jinja_pass_arg") else args
        guard(budget, *values, **kwargs)
        return function(*args, **kwargs)

    if hasattr(function, "jinja_pass_arg"):
        guarded.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
    return guarded


def _replaced(budget: Budget, text: Any, old: Any = "", new: Any = "", *rest: Any, **named: Any) -> None:
    text, old, new = str(budget.check_value(text)), str(old), str(new)
    budget.check_size(len(text) + text.count(old) * max(0, len(new) - len(old)))


def _join(budget: Budget, values: Any, separator: Any = "", *rest: Any, **named: Any) -> None:
    if isinstance(values, (list, tuple)):
        separator = named.get("d", separator)
        size = sum(len(str(budget.check_value(value))) for value in values)
        budget.check_size(size + len(values) * len(str(separator)))


def _indent(budget: Budget, text: Any, width: Any = 4, *rest: Any, **named: Any) -> None:
    width = named.get("width", width)
    step = width if isinstance(width, int) else len(str(width))
    budget.check_size(len(str(text)) + (str(text).count("\n") + 1) * step)


def _one(budget: Budget, value: Any) -> None:
    budget.check_value(value)


def _check_method(name: str, owner: Any, args: tuple[Any, ...], budget: Budget) -> None:
    if name == "replace" and len(args) >= 2:
        _replaced(budget, owner, args[0], args[1])
    elif name == "join" and args and isinstance(args[0], (list, tuple)):
        _join(budget, args[0], owner)
    elif name == "format":
        _check_format(str(owner))


def _check_format(text: str) -> None:
    for _, _, spec, _ in string.Formatter().parse(text):
        if spec:
            _check_widths(spec.replace("{", "*"))


def _check_widths(form: str) -> None:
    numbers = "".join(char if char.isdigit() else " " for char in form).split()
    if "*" in form or any(len(number) > 3 for number in numbers):
        raise OverLimit("it formats text with a width that is not limited")


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MOST_BITS:
        raise OverLimit("it raises a number to a power that is too large")


def _check_product(left: Any, right: Any, budget: Budget) -> None:
    for value, times in ((left, right), (right, left)):
        if isinstance(value, (str, list, tuple)) and isinstance(times, int):
            budget.check_size(len(value) * max(times, 0))
    if (
        isinstance(left, int)
        and isinstance(right, int)
        and left.bit_length() + right.bit_length() > MOST_BITS
    ):
        raise OverLimit("it makes a number that is too large")
