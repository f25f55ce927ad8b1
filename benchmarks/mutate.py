"""Mutation testing: change the code in one place at a time, and list the changes that no test notices.

    python benchmarks/mutate.py --module loop/step.py
    python benchmarks/mutate.py --module loop/step.py --tests tests/unit/test_scaling.py --limit 20 --seed 1
    python benchmarks/mutate.py --module loop/step.py --json seen.json    # and after adding tests:
    python benchmarks/mutate.py --module loop/step.py --again seen.json

Without --module, every module of JUDGES is tried. A mutant is caught if its tests fail, or if they need several times as
long as on the plain code (an endless loop). The working tree is never changed: a mutant lies in a copy of src that is first
on PYTHONPATH. The exit code is 1 if a mutant survived.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import copy
import importlib.util
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Module -> the cheapest tests that cover it.
JUDGES: dict[str, Sequence[str]] = {
    "core/schedule.py": ["tests/unit/test_schedule.py"],
    "process/ranks.py": ["tests/unit/test_save.py", "tests/unit/test_watchdog.py"],
    "core/logit_distance.py": ["tests/unit/test_logit_distance.py"],
    "core/quantization.py": ["tests/unit/test_quantization_identity.py"],
    "files/atomic_files.py": ["tests/unit/test_atomic_files.py"],
    "files/safetensors_header.py": ["tests/unit/test_safetensors_header.py"],
    "loop/step.py": [
        "tests/unit/test_step.py",
        "tests/unit/test_scaling.py",
        "tests/engine/test_recover_memory.py",
    ],
    "loop/progress.py": ["tests/unit/test_progress.py"],
    "loop/prefetch.py": ["tests/unit/test_prefetch.py"],
    "loop/stop.py": ["tests/unit/test_stop.py"],
    "loop/save.py": ["tests/unit/test_save.py"],
    "torch_engine/tasks/causal_lm.py": [
        "tests/engine/test_causal_lm.py",
        "tests/engine/test_cross_entropy.py",
    ],
    "data/batches/packing.py": ["tests/unit/test_data.py", "tests/unit/test_data_corpus.py"],
    "checkpoint/read.py": ["tests/unit/test_checkpoint.py"],
    "core/safe_text.py": ["tests/unit/test_secrets.py", "tests/unit/test_escape_controls.py"],
    "mlx_engine/tasks/causal_lm.py": ["tests/engine/test_mlx_losses.py"],
}
SLOWDOWN, MIN_CPU_S, MIN_WALL_S = 5.0, 4, 20.0
"""A mutant hangs when its tests take this many times as long as the plain ones: by the time of the processor, which a
busy machine does not stretch, or by the clock, for one that waits without working."""

LIBRARIES = {
    "": ["numpy", "psutil", "safetensors.numpy", "rich.console", "yaml", "pytest_timeout"],
    "torch_engine": ["torch", "transformers"],
    "mlx_engine": ["mlx.core", "mlx_lm"],
}
"""Loaded once, before the tests are run: first those of every module, then those of a room."""

COMPARISONS: dict[type[ast.cmpop], Sequence[type[ast.cmpop]]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
}


@dataclass(frozen=True)
class Mutant:
    line: int
    change: str
    source: str

    @property
    def name(self) -> str:
        return f"{self.line}: {self.change}"


@dataclass
class Outcome:
    module: str
    tests: Sequence[str]
    caught: int = 0
    hung: int = 0
    survivors: list[Mutant] = field(default_factory=list)

    @property
    def mutants(self) -> int:
        return self.caught + len(self.survivors)

    def to_json(self) -> dict[str, object]:
        names = [mutant.name for mutant in self.survivors]
        return {"module": self.module, "mutants": self.mutants, "caught": self.caught, "survivors": names}


def make_mutants(source: str) -> list[Mutant]:
    """Return every mutant of a module that differs from it as a program."""
    tree = ast.parse(source)
    found = []
    for node in _mutable_nodes(tree):
        for other in _replacements(node):
            line = getattr(node, "lineno", 0)
            found.append(Mutant(line, f"{_show(node)} -> {_show(other)}", _replaced(tree, node, other)))
    return sorted(found, key=lambda mutant: mutant.line)


def _mutable_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run: no annotations, no decorators, and no asserts, which only check the code around them."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list") or isinstance(node, ast.Assert):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _mutable_nodes(child)


def _replacements(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            for other in COMPARISONS[type(operator)]:
                yield _with(node, ops=[*node.ops[:index], other(), *node.ops[index + 1 :]])
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in OPERATORS:
        yield _with(node, op=OPERATORS[type(node.op)]())
    elif isinstance(node, ast.BoolOp):
        yield _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.Constant):
        yield from _other_constants(node)
    elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield _with(node, value=ast.Constant(None))
    elif isinstance(node, ast.If | ast.IfExp):
        for forced in (True, False):
            yield _with(node, test=ast.Constant(forced))
    elif isinstance(node, ast.While):
        yield _with(node, test=ast.Constant(False))


def _other_constants(node: ast.Constant) -> Iterator[ast.Constant]:
    if isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node.value, int | float):
        for step in (1, -1):
            yield ast.Constant(node.value + step)


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _with(node: ast.AST, **fields: object) -> ast.AST:
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def _replaced(tree: ast.Module, node: ast.AST, other: ast.AST) -> str:
    class Replace(ast.NodeTransformer):
        def visit(self, visited: ast.AST) -> ast.AST:
            return other if visited is node else self.generic_visit(visited)

    # NodeTransformer changes the tree, so it gets a copy; only `node` keeps its identity.
    changed = Replace().visit(copy.deepcopy(tree, {id(node): node}))
    return ast.unparse(ast.fix_missing_locations(changed))


def _show(node: ast.AST) -> str:
    head = f"if {ast.unparse(node.test)}" if isinstance(node, ast.If | ast.While) else ast.unparse(node)
    return head if len(head) <= 100 else f"{head[:97]}..."


class Judge:
    """Runs tests against a copy of src in which one module is changed, each time in a separate process.

    The processes are forks of this one, which has loaded pytest and the libraries, and nothing of crosstune.
    """

    def __init__(self, copied: Path, module: str, tests: Sequence[str]) -> None:
        self.file = copied / "crosstune" / module
        self.tests = tests
        self.source = self.file.read_text(encoding="utf-8")
        self.cpu_limit_s: int | None = None
        self.wall_limit_s: float | None = None
        # Times of files are too coarse to tell two mutants apart: the changed module is compiled anew each time.
        Path(importlib.util.cache_from_source(str(self.file))).unlink(missing_ok=True)
        for library in LIBRARIES[""] + LIBRARIES.get(module.partition("/")[0], []):
            importlib.import_module(library)

    def check_plain(self) -> None:
        """Check that the tests pass on the plain code, and that they run the code of the copy."""
        started, used = time.monotonic(), _children_cpu_s()
        if self.passes(self.source) is not True:
            sys.exit(f"the tests fail on the plain code: {' '.join(self.tests)}")
        self.cpu_limit_s = max(round(SLOWDOWN * (_children_cpu_s() - used)), MIN_CPU_S)
        self.wall_limit_s = max(SLOWDOWN * (time.monotonic() - started), MIN_WALL_S)
        if self.passes("raise RuntimeError('this module is broken on purpose')") is True:
            sys.exit(f"the tests never import the module: {' '.join(self.tests)}")

    def passes(self, source: str) -> bool | None:
        """Return whether the tests pass; None when they do not end."""
        self.file.write_text(source, encoding="utf-8")
        pid = os.fork()
        if pid == 0:
            self._run_tests()
        ended = _wait(pid, self.wall_limit_s)
        self.file.write_text(self.source, encoding="utf-8")
        if ended is None or -ended in (signal.SIGXCPU, signal.SIGKILL):
            return None
        return ended == 0

    def _run_tests(self) -> NoReturn:
        """In the child: run the tests, and exit with pytest's code."""
        code = 99
        try:
            os.setpgid(0, 0)
            if self.cpu_limit_s is not None:
                resource.setrlimit(resource.RLIMIT_CPU, (self.cpu_limit_s, self.cpu_limit_s + 1))
            nothing = os.open(os.devnull, os.O_RDWR)
            for handle in (0, 1, 2):
                os.dup2(nothing, handle)
            plugins = ["-p", "no:cacheprovider", "-p", "pytest_timeout"]
            code = int(pytest.main(["-x", "-q", "--rootdir", str(ROOT), *plugins, *self.tests]))
        finally:
            os._exit(code)


def _wait(pid: int, limit_s: float | None) -> int | None:
    """Return how a child ended, as subprocess does; None if it took too long and was killed with its own children."""
    end = time.monotonic() + limit_s if limit_s is not None else math.inf
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(0.01)


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def try_module(
    module: str,
    tests: Sequence[str],
    *,
    copied: Path,
    limit: int | None,
    seed: int,
    lines: range | None,
    again: frozenset[str] | None,
) -> Outcome:
    judge = Judge(copied, module, tests)
    mutants = make_mutants(judge.source)
    if lines is not None:
        mutants = [mutant for mutant in mutants if mutant.line in lines]
    if limit is not None and limit < len(mutants):
        mutants = sorted(random.Random(seed).sample(mutants, limit), key=lambda mutant: mutant.line)
    if again is not None:
        mutants = [mutant for mutant in mutants if mutant.name in again]
    judge.check_plain()
    outcome = Outcome(module, tests)
    started = time.monotonic()
    for number, mutant in enumerate(mutants, start=1):
        passes = judge.passes(mutant.source)
        if passes:
            outcome.survivors.append(mutant)
            print(f"survived  src/crosstune/{module}:{mutant.line}  {mutant.change}", flush=True)
        else:
            outcome.caught += 1
            outcome.hung += passes is None
        _show_progress(module, number, len(mutants), len(outcome.survivors), time.monotonic() - started)
    return outcome


def _show_progress(module: str, done: int, total: int, survived: int, elapsed_s: float) -> None:
    rate = done / elapsed_s
    left_s = (total - done) / rate
    end = "\r" if sys.stderr.isatty() and done < total else "\n"
    if end == "\r" or done == total or done % 10 == 0:
        words = f"{module}  {done}/{total}  {survived} survived  {60 * rate:.0f}/min  {left_s:.0f} s left"
        print(words.ljust(90), end=end, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--module", action="append", help="path below src/crosstune; may be given again")
    parser.add_argument("--tests", nargs="+", help="test files that judge it; those of JUDGES otherwise")
    parser.add_argument("--limit", type=int, help="try a random sample of so many mutants a module")
    parser.add_argument("--seed", type=int, default=0, help="of that sample")
    parser.add_argument("--lines", help="only mutants in these lines, such as 50-80")
    parser.add_argument("--again", type=Path, help="only the mutants that survived in this file of --json")
    parser.add_argument("--json", type=Path, help="write the outcomes to this file")
    own = parser.parse_args()
    first, _, last = (own.lines or "").partition("-")
    lines = range(int(first), int(last or first) + 1) if first else None
    seen = json.loads(own.again.read_text()) if own.again else None
    outcomes = []
    with tempfile.TemporaryDirectory() as home:
        copied = Path(home) / "src"
        shutil.copytree(ROOT / "src", copied, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        compileall.compile_dir(copied, quiet=2)
        sys.dont_write_bytecode = True
        sys.path.insert(0, str(copied))
        os.environ |= {
            "PYTHONPATH": str(copied),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "OMP_NUM_THREADS": "1",
        }
        os.chdir(ROOT)
        for module in own.module or JUDGES:
            tests = own.tests or JUDGES.get(module)
            if tests is None:
                parser.error(f"--tests is needed: JUDGES has none for {module}")
            names = None
            if seen is not None:
                names = frozenset(
                    name for row in seen if row["module"] == module for name in row["survivors"]
                )
            outcome = try_module(
                module, tests, copied=copied, limit=own.limit, seed=own.seed, lines=lines, again=names
            )
            outcomes.append(outcome)
            print(
                f"{module}: {outcome.mutants} mutants, {outcome.caught} caught ({outcome.hung} by hanging), "
                f"{len(outcome.survivors)} survived",
                flush=True,
            )
    if own.json is not None:
        own.json.write_text(json.dumps([outcome.to_json() for outcome in outcomes], indent=1) + "\n")
    return int(any(outcome.survivors for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
