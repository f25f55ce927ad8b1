"""No import cycles in the package, including imports inside functions and under TYPE_CHECKING."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import crosstune

ROOT = Path(crosstune.__file__).parent


def import_graph(root: Path) -> dict[str, set[str]]:
    """Return module -> the modules of the package that it imports anywhere; a parent package does not count."""
    files = {
        ".".join((root.name, *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in root.rglob("*.py")
    }
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        names = set[str]()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path}: a relative import"
                full = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                names |= {name if name in files else str(node.module) for name in full.values()}
        graph[module] = names & files.keys() - {module}
    return graph


def test_no_import_cycles() -> None:
    try:
        TopologicalSorter(import_graph(ROOT)).prepare()
    except CycleError as error:
        raise AssertionError(" <- ".join(error.args[1])) from None
