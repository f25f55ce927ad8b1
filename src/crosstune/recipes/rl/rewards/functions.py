"""Score answers in child processes with limits: user functions, patterns, JSON schemas, and tests of generated code."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from crosstune.config.load import child_environment
from crosstune.core.errors import UserError
from crosstune.core.rewards import ScoredAnswer
from crosstune.files.json_files import read_object
from crosstune.files.plain_files import file_sha256
from crosstune.process.limited_child import ChildLost, Worker, command_of, end_group
from crosstune.recipes.rl.rewards.answer_checks import Reward, Scores, final_text

_PROGRAMS = Path(__file__).parent
_START_S = 60.0
"""Minimum time limit for importing a file: large libraries are slow on a busy machine."""
_PATTERN_S = 2.0
"""Longest time of a pattern for one answer."""
_MOST_AT_ONCE = 8
_FILE_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Limits:
    time_s: float
    memory_bytes: int


class FunctionReward(Reward):
    """A function with TRL's signature, in a child process that is started again after a crash or a time-out."""

    def __init__(
        self, file: Path, function: str, *, text: str, limits: Limits, say: Callable[[str], None]
    ) -> None:
        self._file, self._function, self._limits, self._say = file, function, limits, say
        self._worker = Worker(
            _PROGRAMS / "function_child.py",
            memory_bytes=limits.memory_bytes,
            environment=child_environment({}),
        )
        self._text, self._has_scored = text, False
        check_file(file, text)
        if problem := self._start():
            raise self._unusable(problem)

    def score(self, answers: Sequence[ScoredAnswer]) -> Scores:
        return self._call(_columns(answers), len(answers))

    def _call(self, columns: Mapping[str, Any], num_answers: int) -> Scores:
        """Return the scores of a call; if the call fails, the reason for every answer."""
        problem = "" if self._worker.is_alive else self._start()
        found: Scores = []
        if not problem:
            found, problem = self._ask({"columns": columns}, wait_s=self._limits.time_s)
        self._has_scored = self._has_scored or not problem
        return [problem] * num_answers if problem else found

    def identity(self) -> Any:
        return [file_sha256(self._file), self._function]

    def close(self) -> None:
        self._worker.close()

    def _start(self) -> str:
        """Import the function in a new process; return the reason for a failure, or an empty text."""
        request = {"file": str(self._file.absolute()), "function": self._function}
        if problem := self._ask(request, wait_s=max(self._limits.time_s, _START_S))[1]:
            self.close()
        return problem

    def _ask(self, request: Any, *, wait_s: float) -> tuple[Scores, str]:
        """Return the scores, and the reason for a failure or an empty text."""
        try:
            reply = self._worker.call(request, wait_s=wait_s)
        except ChildLost as error:
            reply = {"error": str(error)}
        if printed := reply.get("printed", "").strip():
            self._say(printed)
        if reply.get("is_misfit") and not self._has_scored:  # it would fail for every answer
            raise self._unusable(reply["error"])
        return reply.get("scores", []), reply.get("error", "")

    def _unusable(self, problem: str) -> UserError:
        define = f"define it there as `def {self._function}(prompts, completions, **kwargs)`"
        return UserError(
            f"--reward {self._text} cannot be used.",
            why=f"{problem}.",
            do=f"{define}, and return a list of numbers",
        )


def check_file(file: Path, text: str) -> None:
    if not file.is_file():
        raise UserError(f"There is no file {file} (--reward {text}).", do="check the path")


class PatternReward(FunctionReward):
    """A pattern or a JSON schema. Each answer has its own call, so that a slow search costs only its own answer the score."""

    def __init__(self, function: str, *, text: str, bound: Mapping[str, Any], limits: Limits) -> None:
        file, self._bound = _PROGRAMS / "pattern_functions.py", dict(bound)
        limits = replace(limits, time_s=min(limits.time_s, _PATTERN_S))
        super().__init__(file, function, text=text, limits=limits, say=lambda printed: None)

    def score(self, answers: Sequence[ScoredAnswer]) -> Scores:
        return [self._call({"completions": [one.answer], **self._bound}, 1)[0] for one in answers]

    def identity(self) -> Any:
        return self._bound


def read_schema(file: str) -> Any:
    """Read a JSON schema."""
    try:
        from jsonschema.exceptions import SchemaError
        from jsonschema.validators import validator_for
    except ImportError as error:
        raise UserError(
            f"--reward json:{file} needs the Python package jsonschema.",
            why="it is not installed.",
            do="pip install 'crosstune[rewards]'",
        ) from error
    schema = read_object(Path(file).expanduser(), foreign=True)
    if not isinstance(schema.get("$schema", ""), str):
        raise UserError(f"{file} is not a JSON schema.", why="its $schema is not text.")
    try:
        validator_for(schema).check_schema(schema)
    except SchemaError as error:
        raise UserError(f"{file} is not a JSON schema.", why=f"{error.message}.") from error
    return schema


@dataclass(kw_only=True)
class CodeReward(Reward):
    """The fraction of a column's tests that the last fenced block of Python passes; each answer runs in its own process."""

    column: str
    limits: Limits
    warn: Callable[[str], None]
    _has_warned: bool = field(default=False, init=False)

    def score(self, answers: Sequence[ScoredAnswer]) -> Scores:
        with ThreadPoolExecutor(min(_MOST_AT_ONCE, os.cpu_count() or 1)) as pool:
            return list(pool.map(self._score, answers))

    def _score(self, one: ScoredAnswer) -> float | str | None:
        tests = one.columns.get(self.column)
        if not tests:
            return None
        code = last_python(final_text(one.answer))
        if code is None:
            return 0.0
        listed = [str(test) for test in tests] if isinstance(tests, (list, tuple)) else [str(tests)]
        found = self._run({"code": code, "tests": listed})
        return found.get("passed", 0) / len(listed)

    def _run(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the report of the child; empty if the child was killed or wrote none."""
        token = secrets.token_hex()
        seconds = max(1, round(self.limits.time_s + 0.5))
        command = command_of(
            _PROGRAMS / "code_child.py",
            memory_bytes=self.limits.memory_bytes,
            CPU=seconds,
            FSIZE=_FILE_BYTES,
        )
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
            tempfile.TemporaryFile() as out,
        ):
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": out, "stderr": subprocess.DEVNULL}
            variables = {"HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1"}
            child = subprocess.Popen(command, cwd=folder, env=variables, start_new_session=True, **pipes)
            asked = json.dumps({**request, "token": token, "seconds": seconds + 5}).encode()
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):  # then no test has passed
                    child.communicate(asked, self.limits.time_s)
            finally:
                end_group(child)
            out.seek(0)
            report = _read_report(out.read(1 << 16), token)
        if report.get("in_kernel") is False and not self._has_warned:
            self._has_warned = True
            self.warn(
                "this system has no filter of system calls: the code of answers is kept from the network and from other "
                "programs inside Python only; train in a container"
            )
        return report


def last_python(text: str) -> str | None:
    """Return the last fenced block that is marked as Python or not marked; None if there is none."""
    parts = text.split("```")
    blocks = [part.partition("\n") for part in parts[1::2]]
    found = [code for mark, _, code in blocks if mark.strip().lower() in ("python", "py", "python3", "")]
    return found[-1] if found else None


def _read_report(raw: bytes, token: str) -> Mapping[str, Any]:
    try:
        report = json.loads(raw)
    except ValueError:
        return {}
    return report if isinstance(report, dict) and report.get("token") == token else {}


def _columns(answers: Sequence[ScoredAnswer]) -> dict[str, Any]:
    """Return the arguments of a function: messages, or text for a prompt that was text; a missing column is None."""
    names = dict.fromkeys(name for one in answers for name in one.columns)
    columns: dict[str, Any] = {name: [_plain(one.columns.get(name)) for one in answers] for name in names}
    columns["prompts"] = [_plain(one.prompt[-1]["content"] if one.is_text else one.prompt) for one in answers]
    columns["completions"] = [
        one.answer if one.is_text else [{"role": "assistant", "content": one.answer}] for one in answers
    ]
    return columns


def _plain(value: Any) -> Any:
    """Return a value in JSON types; dates and other objects become text."""

    def convert(other: Any) -> Any:
        return other.tolist() if hasattr(other, "tolist") else str(other)

    return json.loads(json.dumps(value, default=convert, skipkeys=True))
