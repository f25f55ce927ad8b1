"""The pages and the package agree: rooms and their map, references to files, generated tables."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT, Page

from crosstune.cli.main import COMMANDS

PACKAGE = ROOT / "src" / "crosstune"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
WRITE_MAP = ROOT / "docs" / "write_map.py"
_BLOCK = re.compile(r"^```.*?^```", re.S | re.M)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_QUOTED = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"\.?[\w.-]+(/[\w.-]+)*/?")


def _rooms() -> list[str]:
    return sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def _layers() -> set[str]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    [block] = re.findall(r'^type = "layers"\nlayers = \[\n(.*?)^\]', text, re.S | re.M)
    return set(re.findall(r"crosstune\.([\w.]+)", block))


@pytest.mark.parametrize("room", _rooms())
def test_the_import_contract_covers_the_room(room: str) -> None:
    """By its own name, or by that of each of its modules."""
    modules = {f"{room}.{path.stem}" for path in (PACKAGE / room).glob("*.py") if path.stem != "__init__"}
    assert room in _layers() or modules <= _layers()


def test_every_room_but_the_engines_keeps_frameworks_out() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    [block] = re.findall(r'"torch and transformers live.*?source_modules = \[\n(.*?)^\]', text, re.S | re.M)
    kept_out = set(re.findall(r"crosstune\.(\w+)", block))
    assert kept_out | {"torch_engine", "mlx_engine", "emulate"} == set(_rooms())


def test_the_map_of_rooms_is_fresh() -> None:
    done = subprocess.run(
        [sys.executable, str(WRITE_MAP), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    for link in _LINK.findall(text):
        target, _, anchor = link.partition("#")
        if "://" in link:
            continue
        path = (page.parent / target) if target else page
        assert path.exists(), f"{page.name} links to {link}"
        if anchor:
            assert anchor in _anchors(path), f"{page.name} links to {link}"


def _anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as code hosts make them."""
    heads = re.findall(r"^#+ (.*)$", _BLOCK.sub("", path.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    """Every path in the text and in commands that begins with a folder of the repository, or of the package."""
    missing = [name for name in _named_files(page) if not _exists(name)]
    assert not missing, f"{page.name} names {', '.join(missing)}"


def _named_files(page: Path) -> set[str]:
    text = page.read_text(encoding="utf-8")
    quoted = [word for span in _QUOTED.findall(_BLOCK.sub("", text)) for word in span.split()]
    words = quoted + [word for block in _BLOCK.findall(text) for word in block.split()]
    paths = {word for word in words if _PATH.fullmatch(word)}
    made = set(Page(page.name).files()) if page.is_relative_to(ROOT / "docs") else set()
    starts = {path.name for path in (*ROOT.iterdir(), *PACKAGE.iterdir())} - {"runs", "models"}
    return {
        path
        for path in paths
        if "/" in path and path.split("/")[0] in starts and not any(_ends(one, path) for one in made)
    }


def _ends(whole: str, part: str) -> bool:
    return f"/{whole}".endswith(f"/{part}")


def _exists(name: str) -> bool:
    return (ROOT / name).exists() or (PACKAGE / name).exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    lines = [*_QUOTED.findall(_BLOCK.sub("", text)), *"\n".join(_BLOCK.findall(text)).splitlines()]
    named = {match[1] for line in lines if (match := re.match(r"(?:\.venv/bin/)?crosstune ([a-z_]+)", line))}
    assert named <= COMMANDS.keys()
