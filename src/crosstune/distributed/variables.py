"""Read numbers and addresses strictly from environment variables that launchers set."""

from __future__ import annotations

import re
from collections.abc import Mapping

from crosstune.core.errors import UserError, shown

MOST_PROCESSES = 2**20
_ADDRESS = re.compile(r"[A-Za-z0-9_.:%-]{1,253}")


def has(environment: Mapping[str, str], name: str) -> bool:
    """Return whether the variable is set to more than white space."""
    return bool(environment.get(name, "").strip())


def read_number(
    environment: Mapping[str, str],
    name: str,
    *,
    low: int = 0,
    high: int = MOST_PROCESSES,
    default: int | None = None,
) -> int:
    """Return an integer from `low` to `high`; the default where the variable is not set."""
    if default is not None and not has(environment, name):
        return default
    text = environment[name].strip()
    if not (text.isascii() and text.isdigit() and len(text) < 20 and low <= int(text) <= high):
        raise UserError(
            f"{name} cannot be {shown(environment[name])} (an environment variable).",
            do=f"set it to an integer from {low} to {high}, as the program that starts the processes does, or unset it",
        )
    return int(text)


def read_port(environment: Mapping[str, str], name: str, *, default: int) -> int:
    return read_number(environment, name, low=1, high=65535, default=default)


def read_address(environment: Mapping[str, str], name: str) -> str:
    """Return a host name or an address without its port."""
    text = environment[name].strip()
    if _ADDRESS.fullmatch(text) is None or text.count(":") == 1:
        raise UserError(
            f"{name} cannot be {shown(environment[name])} (an environment variable).",
            do="set it to the name or address of the first machine, such as 10.0.0.1, without a port",
        )
    return text
