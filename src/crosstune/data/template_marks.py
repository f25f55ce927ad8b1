"""Mark, in the output of a chat template, which text each message wrote and which text is inside `{% generation %}`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Environment, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer

Span = tuple[int, int]

# Unicode noncharacters, reserved for internal use; a text that contains some of them gets other ones as marks.
_FIRST_NONCHARACTER, _NUM_SETS = 0xFDD0, 8


@dataclass(frozen=True)
class Marks:
    """Character spans in a rendered text."""

    generated: Sequence[Span] = ()
    """The contents of the `{% generation %}` blocks."""
    turns: Mapping[int, Sequence[Span]] = field(default_factory=dict)
    """Index of a message -> the text written while the template's loops were at that message."""

    @property
    def end(self) -> int:
        """Return where the text of the last message ends."""
        return max((spans[-1][1] for spans in self.turns.values()), default=0)


class Marker:
    """Write the marks of one rendering, and take them out of its text."""

    def __init__(self) -> None:
        self._place_of: dict[int, int] = {}
        self._loops: set[int] = set()
        self._characters = _characters(0)

    def start(self, messages: Sequence[Any], shown: str) -> None:
        """Prepare for messages, each an object of its own. `shown` is the repr of everything the template gets."""
        self._place_of = {id(message): place for place, message in enumerate(messages)}
        self._loops = set()
        self._characters = _unused_characters(shown)

    def turn(self, loop: int, item: Any) -> str:
        """Return the mark for the start of a loop's body, or nothing if the loop is not over messages."""
        place = self._place_of.get(id(item))
        if place is None:
            return ""
        self._loops.add(loop)
        return f"{self._characters[2]}{loop}:{place}{self._characters[3]}"

    def close(self, loop: int) -> str:
        """Return the mark for the end of a loop."""
        return f"{self._characters[2]}{loop}:{self._characters[3]}" if loop in self._loops else ""

    def generated(self, text: str) -> str:
        return f"{self._characters[0]}{text}{self._characters[1]}"

    def take(self, marked: str) -> tuple[str, Marks]:
        """Return the text without its marks, and what they say."""
        begin, end, opening, closing = self._characters
        reader = _Reader()
        plain = []
        for number, piece in enumerate(
            re.split(f"({begin}|{end}|{opening}[0-9]+:[0-9]*{closing})", marked)
        ):
            if number % 2 == 0:
                reader.read(len(piece))
                plain.append(piece)
            elif piece == begin:
                reader.start = reader.length
            elif piece == end:
                reader.end_generated()
            else:
                reader.turn(*piece[1:-1].split(":"))
        return "".join(plain), Marks(reader.generated, reader.turns)


@dataclass
class _Reader:
    """The state while the marks are read. Loops can be nested, and text belongs to the message of the innermost."""

    length: int = 0
    start: int | None = None
    generated: list[Span] = field(default_factory=list)
    turns: dict[int, list[Span]] = field(default_factory=dict)
    stack: list[tuple[str, int]] = field(default_factory=list)

    def read(self, characters: int) -> None:
        begun = self.length
        self.length += characters
        if not characters or not self.stack:
            return
        spans = self.turns.setdefault(self.stack[-1][1], [])
        if spans and spans[-1][1] == begun:
            begun = spans.pop()[0]
        spans.append((begun, self.length))

    def end_generated(self) -> None:
        if self.start is not None and self.length > self.start:
            self.generated.append((self.start, self.length))
        self.start = None

    def turn(self, loop: str, place: str) -> None:
        """Begin an iteration, which ends the loop's last one even if that was left by `continue`."""
        for depth, (other, _) in enumerate(self.stack):
            if other == loop:
                del self.stack[depth:]
                break
        if place:
            self.stack.append((loop, int(place)))


class Generation(Extension):
    """The tag `{% generation %} ... {% endgeneration %}`, which marks the text that the model writes."""

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
        marked: nodes.Template = _MarkLoops(self).visit(tree)
        marked.set_environment(self.environment)
        return marked

    def _turn(self, loop: int, item: Any) -> str:
        return self.marker.turn(loop, item)

    def _close(self, loop: int) -> str:
        return self.marker.close(loop)


class _MarkLoops(NodeTransformer):
    """Insert marks into loops that write to the output.

    Loops whose text is captured stay as they are: the template could measure, trim or split the marks with the text.
    """

    def __init__(self, extension: Generation) -> None:
        self.extension = extension
        self.num_loops = 0

    def visit_For(self, node: nodes.For) -> Any:  # noqa: N802
        item = _item_of(node)
        self.generic_visit(node)
        if item is None:
            return node
        loop = nodes.Const(self.num_loops)
        self.num_loops += 1
        node.body.insert(0, self._output("_turn", [loop, item], node.lineno))
        return [node, self._output("_close", [loop], node.lineno)]

    def _output(self, method: str, arguments: list[nodes.Expr], line: int) -> nodes.Node:
        return nodes.Output([self.extension.call_method(method, arguments)]).set_lineno(line)

    def _keep(self, node: nodes.Node) -> nodes.Node:
        return node

    visit_Macro = visit_CallBlock = visit_FilterBlock = visit_AssignBlock = _keep  # noqa: N815


def _item_of(loop: nodes.For) -> nodes.Expr | None:
    """Return the expression for what a loop is at: its variable, or the element of a list if it counts through one."""
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
        if isinstance(values, nodes.Name) and isinstance(index, nodes.Name) and index.name == name:
            if values.name not in made:
                return nodes.Getitem(nodes.Name(values.name, "load"), nodes.Name(name, "load"), "load")
    return None


def _characters(number: int) -> tuple[str, str, str, str]:
    first = _FIRST_NONCHARACTER + 4 * number
    return chr(first), chr(first + 1), chr(first + 2), chr(first + 3)


def _unused_characters(shown: str) -> tuple[str, str, str, str]:
    """Return four noncharacters that the input does not contain; `repr` writes them as escapes."""
    if "\\ufd" in shown:
        for number in range(_NUM_SETS):
            found = _characters(number)
            if not any(f"\\u{ord(character):04x}" in shown for character in found):
                return found
    return _characters(0)
