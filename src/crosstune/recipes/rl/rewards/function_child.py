"""The child process of a reward function: load its file, then call it for each line of standard input.

This file runs on its own, without importing crosstune.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Function = Callable[..., Any]
_LARGEST = 3.4e38
"""The largest score: scores are stored in float32."""
_MAX_PRINTED = 2000
"""Characters of a call's output that are returned."""


class WrongArguments(TypeError):
    """The function cannot be called with the columns of the answers."""


def load(file: str, name: str) -> Function:
    """Import the file, as `python FILE` finds its imports, and return its function."""
    path = Path(file)
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickle look it up
    spec.loader.exec_module(module)
    found: Function = getattr(module, name)
    if not callable(found):
        raise TypeError(f"{name} is not a function")
    if inspect.iscoroutinefunction(found):
        raise TypeError(f"{name} is async; define it without async")
    return found


def call(function: Function, columns: dict[str, Any]) -> list[float | str | None]:
    """Return a score for each completion: a number, None, or a sentence that says why there is none."""
    signature, num_answers = inspect.signature(function), len(columns["completions"])
    takes, given = signature.parameters.values(), ", ".join(columns)
    if not any(one.kind is one.VAR_KEYWORD for one in takes):
        columns = {one.name: columns[one.name] for one in takes if one.name in columns}
    try:
        signature.bind(**columns)
    except TypeError as error:
        raise WrongArguments(f"{error}; it is called by name with {given}") from error
    found = function(**columns)
    if hasattr(found, "tolist"):  # an array or a tensor
        found = found.tolist()
    if isinstance(found, (str, bytes, dict)) or not hasattr(found, "__iter__"):
        raise TypeError(f"it returned {_short(found)} instead of a list of numbers")
    scores = [_score(one) for one in found]
    if len(scores) != num_answers:
        raise ValueError(f"it returned {len(scores)} scores for {num_answers} answers")
    return scores


def _score(value: Any) -> float | str | None:
    if value is None:
        return None
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        return f"it returned {_short(value)}, which is not a number"
    number = float(value)
    return number if abs(number) <= _LARGEST else f"it returned {number}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _described(error: BaseException) -> str:
    """Return the error with its place in the user's file."""
    if isinstance(error, WrongArguments):
        return str(error)
    places = [one for one in traceback.extract_tb(error.__traceback__) if one.filename != __file__]
    place = f" ({places[-1].filename}, line {places[-1].lineno})" if places else ""
    return f"{type(error).__name__}: {error}{place}"


def main() -> None:
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # for native code; Python's output is returned
    function, process = None, os.getpid()
    for line in requests:
        request, reply, printed = json.loads(line), dict[str, Any](), io.StringIO()
        if hasattr(signal, "alarm"):
            signal.alarm(int(request["wait_s"]) + 5)  # ends the process if its parent is gone
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            try:
                if function is None:
                    function = load(request["file"], request["function"])
                else:
                    reply["scores"] = call(function, request["columns"])
            except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - any error of the user's code
                reply["error"] = _described(error)
                reply["is_misfit"] = isinstance(error, WrongArguments)
        if os.getpid() != process:  # the function forked and returned in the child too
            os._exit(0)
        reply["printed"] = printed.getvalue()[:_MAX_PRINTED]
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()
        if hasattr(signal, "alarm"):
            signal.alarm(0)


if __name__ == "__main__":
    main()
