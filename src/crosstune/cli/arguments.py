"""Reading a subcommand's own words, and printing sizes and times for people."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from crosstune.config.load import load_config
from crosstune.config.schema import Config
from crosstune.core.errors import UserError


class Parser(argparse.ArgumentParser):
    """argparse that raises our error instead of exiting, and takes no abbreviations."""

    def __init__(self, command: str, *, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=f"crosstune {command}",
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}", do=f"see: {self.prog} --help")


def parse_config(parser: Parser, words: Sequence[str]) -> tuple[argparse.Namespace, Config]:
    """The subcommand's own words, and the options of a run from all the others."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with options")
    if "-h" in words or "--help" in words:
        from crosstune.config.table import help_text

        parser.print_help()
        print(help_text())
        sys.exit(0)
    own, flags = parser.parse_known_args(list(words))
    return own, load_config(flags, file=own.config)


def at_least(low: int | float) -> Callable[[str], int | float]:
    """A type for argparse: a number of the kind of `low`, not below it and of a size that fits 63 bits."""

    def read(text: str) -> int | float:
        value = type(low)(text)
        if not low <= value < 2**63:
            raise argparse.ArgumentTypeError(f"{text} is not a number from {low} up")
        return value

    return read


def print_json(data: object) -> None:
    import json

    from crosstune.core.json_files import finite

    print(json.dumps(finite(data), indent=2, ensure_ascii=False, allow_nan=False))


def size(num_bytes: float) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def duration(seconds: float) -> str:
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds}s"
    minutes, rest = divmod(seconds, 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


def count(number: float) -> str:
    for unit, factor in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= factor:
            return f"{number / factor:.1f}{unit}"
    return f"{number:.0f}"
