"""Match an answer with a pattern or a JSON schema, in the child process of a reward function, since a pattern can run for
hours.

This file runs on its own, without importing crosstune.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from typing import Any

_FENCE = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.S)


def matches(completions: Sequence[str], pattern: str) -> list[float]:
    """Return 1 for an answer in which the pattern is found; `.` also matches line ends."""
    return [float(re.search(pattern, answer, re.S) is not None) for answer in completions]


def is_json(completions: Sequence[str], schema: Any = None) -> list[float]:
    """Return 1 for an answer that is JSON, also in a fenced block, and that the schema accepts."""
    return [float(_is_valid(answer, json.dumps(schema))) for answer in completions]


def _is_valid(answer: str, schema: str) -> bool:
    fenced = _FENCE.findall(answer)
    try:
        value = json.loads(fenced[-1] if fenced else answer, parse_constant=_reject)
    except (ValueError, RecursionError):
        return False
    validator = _validator(schema)
    return validator is None or validator.is_valid(value)


def _reject(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


@functools.cache
def _validator(schema: str) -> Any:
    if schema == "null":
        return None
    from jsonschema.validators import validator_for
    from referencing import Registry

    found = json.loads(schema)
    return validator_for(found)(found, registry=Registry())  # references into the network are not followed
