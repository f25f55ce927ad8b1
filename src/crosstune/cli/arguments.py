"""Parse the arguments of a subcommand, and print its result as JSON."""

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
    """An ArgumentParser that raises UserError instead of exiting, and accepts no abbreviations."""

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
    """Return the subcommand's own arguments, and the run configuration made from the remaining ones."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with options")
    if "-h" in words or "--help" in words:
        from crosstune.config.table import help_text

        parser.print_help()
        print(help_text())
        sys.exit(0)
    own, flags = parser.parse_known_args(list(words))
    return own, load_config(flags, file=own.config)


def at_least(low: int | float) -> Callable[[str], int | float]:
    """Return an argparse type: a number of the type of `low` that is at least `low` and fits into 63 bits."""

    def read(text: str) -> int | float:
        value = type(low)(text)
        if not low <= value < 2**63:
            raise argparse.ArgumentTypeError(f"{text} is not a number of at least {low}")
        return value

    return read


def print_json(data: object) -> None:
    """Print data as JSON, with null for non-finite numbers."""
    from crosstune.core.json_files import to_json

    print(to_json(data, indent=2))
