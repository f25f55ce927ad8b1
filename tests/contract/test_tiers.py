"""The tiers of tests are what they say: tests/unit knows no framework and trains nothing, and slow tests run apart."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import FRAMEWORKS

UNIT = Path(__file__).parents[1] / "unit"
ENGINES = ("crosstune.torch_engine", "crosstune.mlx_engine", "crosstune.emulate", "crosstune.compat")
TRAINING = ("crosstune.runs.pipeline", "crosstune.loop.train", "crosstune.runs.execute", "support")
_IMPORT = re.compile(r"\b(?:import|from)\s+([\w.]+(?:\s*,\s*[\w.]+)*)")
_LAZY = ("importorskip", "import_module", "__import__")


def imported_names(source: str) -> Iterator[str]:
    """Yield every module that a file imports: at its top, inside functions, by name, and in programs for children."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in _LAZY:
                yield str(node.args[0].value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "import" in node.value:
            for found in _IMPORT.findall(node.value):
                yield from (name.strip() for name in found.split(","))


def forbidden(source: str) -> set[str]:
    names = set(imported_names(source))
    rooms = (*ENGINES, *TRAINING)
    found = {name for name in names if any(name == room or name.startswith(f"{room}.") for room in rooms)}
    return found | {name for name in names if name.partition(".")[0] in FRAMEWORKS}


@pytest.mark.parametrize("path", sorted(UNIT.glob("*.py")), ids=lambda path: path.name)
def test_a_unit_test_imports_no_framework_and_no_training(path: Path) -> None:
    found = forbidden(path.read_text(encoding="utf-8"))
    assert not found, f"{path.name} belongs to tests/engine or tests/parity: it imports {sorted(found)}"


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "import numpy, mlx.core as mx",
        "from transformers import AutoTokenizer",
        "def f():\n    from crosstune.torch_engine.loading.stream import find_tensors",
        "from crosstune.runs import pipeline",
        "from crosstune.runs.pipeline import train",
        "lora = pytest.importorskip('mlx_lm.lora')",
        "code = 'import sys; import sys, torch; print(1)'",
        "code = f'from crosstune.mlx_engine import {x}'",
    ],
)
def test_the_check_sees_every_way_to_import(source: str) -> None:
    assert forbidden(source)


@pytest.mark.parametrize(
    "source",
    ["import numpy", "from crosstune.runs.resume import for_record", "word = 'torch'", "# import torch"],
)
def test_the_check_lets_other_imports_pass(source: str) -> None:
    assert not forbidden(source)


def test_slow_tests_are_left_to_make_slow(pytestconfig: pytest.Config) -> None:
    words = pytestconfig.getini("addopts")
    assert words[words.index("-m") + 1] == "not slow"
    makefile = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8")
    test, *slow = [line for line in makefile.splitlines() if "-m pytest" in line]
    assert "slow" not in test and all("-m slow" in line for line in slow)
    assert any(line.endswith("-m slow") for line in slow)
