"""Mark the text of each message, and of each `{% generation %}` block, in the output of a chat template."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from jinja2 import Environment, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer

from crosstune.data.render.types import Span

# Unicode noncharacters, reserved for internal use; text that contains some of them gets different marks.
_FIRST_NONCHARACTER, _NUM_SETS = 0xFDD0, 8
_TURN, _CLOSE = "_mark_turn", "_mark_close"


class _Signs:
    """The characters that marks are made of."""

    def __init__(self, begin: str, end: str, opening: str, closing: str) -> None:
        self.begin, self.end, self.opening, self.closing = begin, end, opening, closing
        self.pattern = re.compile(f"({begin}|{end}|{opening}[0-9]+:[0-9]*{closing})")


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
    """Write the marks of one rendering, and remove them from its text. Each thread has its own state."""

    def __init__(self) -> None:
        self._place_of: dict[int, int] = {}
        self._loops: set[int] = set()
        self._signs = _signs(0)

    def start(self, messages: Sequence[Mapping[str, Any]], others: str) -> None:
        """Prepare for messages, each a distinct object. `others` is the repr of the other variables."""
        self._place_of = {id(message): place for place, message in enumerate(messages)}
        self._loops.clear()
        self._signs = _signs(0)
        if _has_noncharacter(messages) or "\\ufd" in others:
            self._signs = _unused_signs(repr(messages) + others)

    def turn(self, item: Any, loop: int) -> str:
        """Return the mark for the start of a loop's body, or nothing if the loop is not over messages."""
        place = self._place_of.get(id(item))
        if place is None:
            return ""
        self._loops.add(loop)
        return f"{self._signs.opening}{loop}:{place}{self._signs.closing}"

    def close(self, _: Any, loop: int) -> str:
        """Return the mark for the end of a loop."""
        return f"{self._signs.opening}{loop}:{self._signs.closing}" if loop in self._loops else ""

    def generated(self, text: str) -> str:
        return f"{self._signs.begin}{text}{self._signs.end}"

    def take(self, marked: str) -> tuple[str, Marks]:
        """Return the text without its marks, and the marked spans."""
        pieces = self._signs.pattern.split(marked)
        generated: list[Span] = []
        turns = _Turns()
        length, begun = 0, -1
        for number, piece in enumerate(pieces):
            if number % 2 == 0:
                if piece:
                    turns.add(length, length + len(piece))
                    length += len(piece)
            elif piece == self._signs.begin:
                begun = length
            elif piece == self._signs.end:
                if 0 <= begun < length:
                    generated.append((begun, length))
                begun = -1
            else:
                turns.move(*piece[1:-1].split(":"))
        return "".join(pieces[::2]), Marks(generated, turns.spans)


class _Turns:
    """Assign text to messages. Loops can be nested, and text belongs to the message of the innermost loop."""

    def __init__(self) -> None:
        self.spans: dict[int, list[Span]] = {}
        self._stack: list[tuple[str, int]] = []

    def add(self, start: int, end: int) -> None:
        if not self._stack:
            return
        spans = self.spans.setdefault(self._stack[-1][1], [])
        if spans and spans[-1][1] == start:
            start = spans.pop()[0]
        spans.append((start, end))

    def move(self, loop: str, place: str) -> None:
        """Begin an iteration, or end the loop. Either ends the iteration before, even one left by `continue`."""
        for depth, (other, _) in enumerate(self._stack):
            if other == loop:
                del self._stack[depth:]
                break
        if place:
            self._stack.append((loop, int(place)))


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
        return self.marker.generated(caller())

    def mark_loops(self, tree: nodes.Template) -> nodes.Template:
        """Return the template with marks at every iteration of its loops."""
        # Use filters: the sandbox checks every function call, and that costs more than the mark.
        self.environment.filters |= {_TURN: self.marker.turn, _CLOSE: self.marker.close}
        marked: nodes.Template = _MarkLoops().visit(tree)
        marked.set_environment(self.environment)
        return marked


class _MarkLoops(NodeTransformer):
    """Insert marks into loops that write to the output.

    Loops whose text is captured are not marked: the template could measure, trim or split the marks with the text.
    """

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


@cache
def _signs(number: int) -> _Signs:
    return _Signs(*(chr(_FIRST_NONCHARACTER + 4 * number + place) for place in range(4)))


def _has_noncharacter(messages: Sequence[Mapping[str, Any]]) -> bool:
    return any(
        "\\ufd" in repr(value)
        for message in messages
        for value in message.values()
        if not (isinstance(value, str) and value.isascii())
    )


def _unused_signs(shown: str) -> _Signs:
    """Return signs that the input does not contain. `repr` writes noncharacters as escapes."""
    for number in range(_NUM_SETS):
        if not any(f"\\u{_FIRST_NONCHARACTER + 4 * number + place:04x}" in shown for place in range(4)):
            return _signs(number)
    return _signs(0)
