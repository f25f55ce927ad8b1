"""Write the map of rooms in CONTRIBUTING.md from the import contract in pyproject.toml and the packages' docstrings.

python docs/write_map.py            writes the block between the two markers
python docs/write_map.py --check    ends with code 1 where the block is stale
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
START = "<!-- rooms: written by `make docs`, do not edit -->"
END = "<!-- end of rooms -->"


def layers() -> list[list[str]]:
    """Return the layers from top to bottom, each with the modules that stand side by side in it."""
    contracts: list[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
        "tool"
    ]["importlinter"]["contracts"]
    [contract] = [each for each in contracts if each["type"] == "layers"]
    return [[name.strip() for name in layer.split("|")] for layer in contract["layers"]]


def summary(module: str) -> str:
    """Return the first line of a module's or a package's docstring, without importing it."""
    path = ROOT.joinpath("src", *module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    words = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    if not words:
        raise SystemExit(f"{file} needs a one-line docstring that describes it")
    return words.splitlines()[0]


def table() -> str:
    lines = ["| layer | room | content |", "|---|---|---|"]
    for number, rooms in enumerate(layers(), start=1):
        lines += [f"| {number} | `{room.partition('.')[2]}` | {summary(room)} |" for room in rooms]
    return "\n".join(lines)


def with_table(page: str) -> str:
    before, start, rest = page.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise SystemExit(f"{PAGE.name} lacks the markers {START} and {END}")
    return f"{before}{start}\n{table()}\n{end}{after}"


def main(words: list[str]) -> int:
    page = PAGE.read_text(encoding="utf-8")
    fresh = with_table(page)
    if "--check" in words:
        if page != fresh:
            print(f"the map in {PAGE.name} is stale; run: make docs", file=sys.stderr)
        return int(page != fresh)
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
