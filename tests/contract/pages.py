"""Follow a page of the documentation as a reader would: its files into a copy of the package, its commands in a shell."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import warm

from crosstune.models.bundled import BUNDLED
from crosstune.models.cache import install
from crosstune.models.tiny import tiny_model

ROOT = Path(__file__).parents[2]
_FILE = re.compile(r"Save it as\s+`(?P<path>[^`]+)`:\n\n```python\n(?P<code>.*?)```", re.S)
_NEEDS_SHELL = re.compile(r"[|<>&;$`*?~#]")
_COMMANDS = re.compile(r"```sh\n(.*?)```", re.S)


@dataclass(frozen=True)
class Page:
    name: str

    @property
    def text(self) -> str:
        [path] = (ROOT / "docs").rglob(self.name)
        return path.read_text(encoding="utf-8")

    def files(self) -> dict[str, str]:
        """Return the whole files that the page has its reader save, by their path."""
        return {match["path"]: match["code"] for match in _FILE.finditer(self.text)}

    def commands(self) -> list[str]:
        return [line for block in _COMMANDS.findall(self.text) for line in block.strip().splitlines()]


@dataclass(frozen=True)
class Workshop:
    """A folder with `crosstune` on the path of its shell, and with a copy of the package if the page adds files to it."""

    home: Path
    source: Path = ROOT / "src"

    @cached_property
    def _warm(self) -> warm.Server:
        """A process that imports the copy."""
        return warm.Server(self.environment, home=self.home)

    def close(self) -> None:
        if "_warm" in vars(self):
            self._warm.close()

    def save(self, page: Page) -> None:
        assert len(page.files()) == page.text.count("```python"), (
            "a block of code without 'Save it as `path`:'"
        )
        for path, code in page.files().items():
            file = self.home / path
            assert not file.exists(), f"{path} is there already"
            file.write_text(code, encoding="utf-8")

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("CROSSTUNE_")}
        return kept | {
            "PYTHONPATH": str(self.source),
            "PATH": f"{self.home / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "CROSSTUNE_CACHE": str(self.home / "cache"),
        }

    def shell(self, line: str) -> str:
        """Run a line of a page as it stands."""
        done = subprocess.run(
            line, shell=True, cwd=self.home, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def follow(self, line: str) -> str:
        """Run a line of a page: in a fork of a process that has torch imported, if it needs no shell."""
        plain = line.startswith("crosstune ") and not _NEEDS_SHELL.search(line)
        return self.run(line.removeprefix("crosstune ")) if plain else self.shell(line)

    def run(self, words: str, *, code: int = 0) -> str:
        return self.python(warm.MAIN, *shlex.split(words), code=code)

    def python(self, program: str, *words: str, code: int = 0) -> str:
        if self.source.is_relative_to(self.home):
            started = self._warm.start(program, *words)
        else:
            variables = dict.fromkeys(os.environ) | self.environment
            started = warm.start(warm.IN_FOLDER + program, str(self.home), *words, variables=variables)
        found, out = started.end()
        assert found == code, f"{words or program}\n{out}"
        return out

    def json(self, path: str) -> Any:
        return json.loads((self.home / path).read_text(encoding="utf-8"))

    def metrics(self, name: str) -> list[dict[str, Any]]:
        lines = (self.home / "runs" / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@dataclass
class Followed:
    """The output of a page's commands, by their number; each is run once, in order, when it is first asked for."""

    workshop: Workshop
    page: Page
    outputs: list[str] = field(default_factory=list)

    def __getitem__(self, number: int) -> str:
        for command in self.page.commands()[len(self.outputs) : number + 1]:
            self.outputs.append(self.workshop.follow(command))
        return self.outputs[number]


def put_tiny_model(cache: Path) -> Path:
    """Install a tiny model under the name of the bundled one, which takes minutes where this takes seconds."""
    name = "smollm2-135m"
    source = BUNDLED[name].source
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CROSSTUNE_CACHE", str(cache))
        install(name, lambda folder, scratch: tiny_model(folder), need_bytes=0, source=source)
    return cache


@contextlib.contextmanager
def open_workshop(home: Path, page: Page) -> Iterator[Workshop]:
    """Save the files of the page in `home`, beside a copy of the package if some of them belong to it."""
    workshop = Workshop(home)
    if any(path.startswith("src/") for path in page.files()):
        workshop = Workshop(home, source=home / "src")
        shutil.copytree(ROOT / "src", home / "src", ignore=shutil.ignore_patterns("*.egg-info"))
        shutil.copy(ROOT / "pyproject.toml", home)
    command = home / "bin" / "crosstune"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m crosstune "$@"\n')
    command.chmod(0o755)
    workshop.save(page)
    try:
        yield workshop
    finally:
        workshop.close()
