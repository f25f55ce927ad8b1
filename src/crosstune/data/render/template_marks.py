"""Mark the text of each message, and of each `{% generation %}` block, in the output of a chat template."""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Environment, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer

from crosstune.data.render.types import Span

_MARK = f"\ufdd0{secrets.token_hex(4)}"
"""Begins a mark. Random, so that no conversation contains it."""
_MARKS = re.compile(f"{_MARK}(<|>|[0-9]+:[0-9]*);")
_TURN, _CLOSE = "_mark_turn", "_mark_close"


@dataclass(frozen=True)
class Marks:
    """Character spans in a rendered text."""

    generated: Sequence[Span] = ()
    """The contents of the `{% generation %}` blocks."""
    turns: Mapping[int, Sequence[Span]] = field(default_factory=dict)
    """Index of a message -> the text written while the template's loops were at that message."""

    @property
    def end(self) -> int:
        """The end of the last message's text."""
        return max((spans[-1][1] for spans in self.turns.values()), default=0)


class Marker(threading.local):
    """Write the marks of one rendering. Each thread has its own state."""

    def __init__(self) -> None:
        self._place_of: dict[int, int] = {}
        self._loops: set[int] = set()

    def start(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Prepare for messages, each a distinct object."""
        self._place_of = {id(message): place for place, message in enumerate(messages)}
        self._loops = set()

    def turn(self, item: Any, loop: int) -> str:
        """Return the mark for the start of a loop's body, or nothing if the loop is not over messages."""
        place = self._place_of.get(id(item))
        if place is None:
            return ""
        self._loops.add(loop)
        return f"{_MARK}{loop}:{place};"

    def close(self, _: Any, loop: int) -> str:
        """Return the mark for the end of a loop."""
        return f"{_MARK}{loop}:;" if loop in self._loops else ""


def extract_marks(marked: str) -> tuple[str, Marks]:
    """Return the text without its marks, and the marked spans."""
    pieces = _MARKS.split(marked)
    generated: list[Span] = []
    turns: dict[int, list[Span]] = {}
    stack: list[tuple[str, int]] = []  # nested loops and their messages; text belongs to the innermost
    length, begun = 0, -1
    for text, mark in zip(pieces[::2], [*pieces[1::2], ""], strict=True):
        if text and stack:
            spans = turns.setdefault(stack[-1][1], [])
            start = spans.pop()[0] if spans and spans[-1][1] == length else length
            spans.append((start, length + len(text)))
        length += len(text)
        if mark == "<":
            begun = length
        elif mark == ">":
            if 0 <= begun < length:
                generated.append((begun, length))
            begun = -1
        elif mark:
            # A new iteration or the end of the loop ends the iteration before, even one left by `continue`.
            loop, _, place = mark.partition(":")
            depth = next((depth for depth, (other, _) in enumerate(stack) if other == loop), len(stack))
            stack[depth:] = [(loop, int(place))] if place else []
    return "".join(pieces[::2]), Marks(generated, turns)


class Generation(Extension):
    """The tag `{% generation %} ... {% endgeneration %}` around text that the model writes."""

    tags = {"generation"}  # noqa: RUF012

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.marker = Marker()

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark", []), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{_MARK}<;{caller()}{_MARK}>;"

    def mark_loops(self, tree: nodes.Template) -> nodes.Template:
        """Return the template with marks at every iteration of its loops."""
        # Use filters: the sandbox checks every function call, and that costs more than the mark.
        self.environment.filters |= {_TURN: self.marker.turn, _CLOSE: self.marker.close}
        marked: nodes.Template = _MarkLoops().visit(tree)
        marked.set_environment(self.environment)
        return marked


class _MarkLoops(NodeTransformer):
    """Insert marks into loops that write to the output, not into captured text: the template could trim or split it."""

    def __init__(self) -> None:
        self.num_loops = 0

    def visit_For(self, node: nodes.For) -> Any:  # noqa: N802
        item = _item_of(node)
        if item is None or node.find(nodes.Output) is None:
            return self.generic_visit(node)
        loop = nodes.Const(self.num_loops)
        self.num_loops += 1
        self.generic_visit(node)
        node.body.insert(0, _write(item, _TURN, loop, node.lineno))
        # Filter a variable: jinja applies a filter to a constant while it compiles.
        return [node, _write(nodes.Name("messages", "load"), _CLOSE, loop, node.lineno)]

    def _keep(self, node: nodes.Node) -> nodes.Node:
        return node

    visit_Macro = visit_CallBlock = visit_FilterBlock = visit_AssignBlock = _keep  # noqa: N815


def _write(value: nodes.Expr, name: str, loop: nodes.Const, line: int) -> nodes.Node:
    return nodes.Output([nodes.Filter(value, name, [loop], [], None, None)]).set_lineno(line)


def _item_of(loop: nodes.For) -> nodes.Expr | None:
    """Return the expression for the current item of a loop: its variable, or `values[index]` in a loop over a range."""
    if not isinstance(loop.target, nodes.Name):
        return None
    name = loop.target.name
    if not any(
        isinstance(part, nodes.Call) and isinstance(part.node, nodes.Name) and part.node.name == "range"
        for part in (loop.iter, *loop.iter.find_all(nodes.Call))
    ):
        return nodes.Name(name, "load")
    # A list that is made in the body does not exist yet where the mark is.
    made = {found.name for found in loop.find_all(nodes.Name) if found.ctx == "store"}
    for access in loop.find_all(nodes.Getitem):
        values, index = access.node, access.arg
        if not (isinstance(values, nodes.Name) and isinstance(index, nodes.Name)):
            continue
        if index.name == name and values.name not in made:
            return nodes.Getitem(nodes.Name(values.name, "load"), nodes.Name(name, "load"), "load")
    return None
